//! The server and the service manager that started it.

use std::os::unix::net::UnixDatagram;

use lmc_testkit::{DEADLINE, Folder};

use crate::common::{Server, lmc};

/// A service manager's end of the socket.
struct Manager {
    socket: UnixDatagram,
    folder: Folder,
}

impl Manager {
    fn new() -> Self {
        let folder = Folder::temporary();
        let socket = UnixDatagram::bind(folder.join("notify")).expect("a socket");
        socket.set_read_timeout(Some(DEADLINE)).expect("a timeout");
        Self { socket, folder }
    }

    /// A server that this manager has started, and kills 8 s after the last ping.
    fn start(&self) -> Server {
        let mut command = lmc();
        command
            .env("NOTIFY_SOCKET", self.folder.join("notify"))
            .env("WATCHDOG_USEC", "8000000");
        Server::start_by(command, &[])
    }

    /// Waits for a notice that has this line.
    fn line(&self, wanted: &str) -> String {
        let mut bytes = [0; 4096];
        loop {
            let length = self.socket.recv(&mut bytes).expect("a notice");
            let notice = String::from_utf8_lossy(&bytes[..length]);
            if notice.lines().any(|line| line == wanted) {
                return notice.into_owned();
            }
        }
    }
}

/// The first notice comes when engines are served, and not before.
#[test]
fn a_service_manager_learns_of_the_start_of_life_and_of_the_stop() {
    let manager = Manager::new();
    let server = manager.start();
    manager.line("READY=1");
    let _ = server.client();
    for _ in 0..2 {
        let ping = manager.line("WATCHDOG=1");
        assert!(ping.contains("STATUS=serving engines: ok"), "{ping}");
    }
    server.terminate();
    let stopping = manager.line("STOPPING=1");
    // 10 s for requests, 5 s for drives, and 5 s more.
    assert!(
        stopping.contains("EXTEND_TIMEOUT_USEC=20000000"),
        "{stopping}"
    );
}

#[test]
fn a_name_that_leads_to_no_service_manager_keeps_no_server_from_serving() {
    for name in ["vsock:2:1234", "/nonexistent/notify"] {
        let mut command = lmc();
        command.env("NOTIFY_SOCKET", name);
        let server = Server::start_by(command, &[]);
        let _ = server.client();
        server.terminate();
    }
}
