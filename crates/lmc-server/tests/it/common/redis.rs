//! A Redis for tests of the binary.

use std::process::{Command, Stdio};

use lmc_testkit::{Folder, Process, free_port, until};

/// A Redis of its own.
pub(crate) struct Redis {
    pub(crate) port: u16,
    pub(crate) process: Process,
    _folder: Folder,
}

impl Redis {
    pub(crate) fn start(options: &[&str]) -> Self {
        let (port, folder) = (free_port(), Folder::temporary());
        let mut command = Command::new("redis-server");
        command.args(["--port", &port.to_string(), "--bind", "127.0.0.1"]);
        command.args(["--dir", folder.text(), "--save", "", "--appendonly", "no"]);
        let process = Process::spawn(command.args(options).stdout(Stdio::null()));
        until("the server answers", || {
            std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        Self {
            port,
            process,
            _folder: folder,
        }
    }
}
