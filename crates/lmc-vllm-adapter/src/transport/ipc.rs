//! A Unix socket that ZeroMQ clients reach as `ipc://PATH`.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process;

use socket2::{Domain, SockAddr, Socket, Type};
use tokio::net::UnixListener;

use super::passing::refuse_descriptors;

/// A listening Unix socket. Dropping it removes the socket's file.
#[derive(Debug)]
pub(super) struct IpcListener {
    listener: UnixListener,
    path: PathBuf,
    /// Device and inode of the file, so that another server's file is never removed.
    file: (u64, u64),
}

impl IpcListener {
    /// Listens at a path, with a mode that decides who may connect. Replaces the socket of a server
    /// that was killed.
    ///
    /// # Errors
    /// `AddrInUse` when a server listens at the path, `AlreadyExists` when the file is not a
    /// socket.
    pub(super) fn bind(path: &Path, mode: u32) -> io::Result<Self> {
        match fs::symlink_metadata(path) {
            Ok(there) if !there.file_type().is_socket() => {
                return Err(io::ErrorKind::AlreadyExists.into());
            }
            Ok(_) => match connect(path) {
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
                // A stopped server accepts no connection, and its queue is full.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(io::ErrorKind::AddrInUse.into());
                }
                Ok(()) => return Err(io::ErrorKind::AddrInUse.into()),
                Err(error) => return Err(error),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        // Created under another name, so that no client connects before the mode is set.
        let mut name = path
            .file_name()
            .ok_or(io::ErrorKind::InvalidInput)?
            .to_owned();
        name.push(format!(".{}", process::id()));
        let made = path.with_file_name(name);
        let _ = fs::remove_file(&made);
        let listener = UnixListener::bind(&made)?;
        // Before Linux 6.16 the kernel cannot refuse descriptors, and closes them.
        let _ = refuse_descriptors(&listener);
        let named = fs::set_permissions(&made, Permissions::from_mode(mode))
            .and_then(|()| fs::rename(&made, path))
            .and_then(|()| fs::symlink_metadata(path));
        match named {
            Ok(file) => Ok(Self {
                listener,
                path: path.to_owned(),
                file: (file.dev(), file.ino()),
            }),
            Err(error) => {
                let _ = fs::remove_file(&made);
                Err(error)
            }
        }
    }

    pub(super) fn listener(&self) -> &UnixListener {
        &self.listener
    }
}

impl Drop for IpcListener {
    fn drop(&mut self) {
        let there = fs::symlink_metadata(&self.path);
        if there.is_ok_and(|there| (there.dev(), there.ino()) == self.file) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Connects without waiting for a free entry in the server's queue.
fn connect(path: &Path) -> io::Result<()> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM.cloexec().nonblocking(), None)?;
    socket.connect(&SockAddr::unix(path)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(tag: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("lmc_ipc_{tag}_{}", process::id()));
        fs::create_dir_all(&folder).expect("a folder");
        folder
    }

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_a_live_one_or_a_file_is_not() {
        let folder = folder("stale");
        let path = folder.join("lmc.sock");
        // As a killed server leaves it.
        drop(std::os::unix::net::UnixListener::bind(&path).expect("a socket"));
        let first = IpcListener::bind(&path, 0o600).expect("the stale one is replaced");
        let mode = fs::metadata(&path).expect("it is there").mode();
        assert_eq!(mode & 0o777, 0o600);
        let error = IpcListener::bind(&path, 0o666).expect_err("one listens there");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        drop(first);
        assert!(!path.exists());
        fs::write(&path, "a file").expect("written");
        let error = IpcListener::bind(&path, 0o600).expect_err("it is a file");
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).expect("untouched"), b"a file");
        fs::remove_dir_all(folder).expect("removed");
    }
    /// A server that is stopped lets connections queue up. A connect would wait for it.
    #[tokio::test]
    async fn a_socket_whose_queue_is_full_is_in_use() {
        let folder = folder("full");
        let path = folder.join("lmc.sock");
        let listener = Socket::new(Domain::UNIX, Type::STREAM, None).expect("a socket");
        let address = SockAddr::unix(&path).expect("a path");
        listener.bind(&address).expect("a path");
        listener.listen(0).expect("a socket");
        let queued = std::os::unix::net::UnixStream::connect(&path).expect("it listens");
        let (sender, bound) = std::sync::mpsc::channel();
        let at = path.clone();
        let runtime = tokio::runtime::Handle::current();
        std::thread::spawn(move || {
            let _entered = runtime.enter();
            sender
                .send(IpcListener::bind(&at, 0o600).map(drop))
                .expect("the test waits");
        });
        let timeout = lmc_testkit::DEADLINE;
        let error = bound
            .recv_timeout(timeout)
            .expect("it does not wait")
            .expect_err("in use");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        drop((queued, listener));
        fs::remove_dir_all(folder).expect("removed");
    }
}
