//! TCP and Unix sockets as one type, and the listener for both.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncWrite, Interest};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::runtime::Handle;
use tokio::task::coop::consume_budget;
use tokio::task::yield_now;
use tokio::time::{Duration, sleep};

use crate::Address;

mod raw;
pub(crate) use raw::{is_closed, receive_bytes, send_bytes};

/// Pause before another attempt when the backlog of a Unix socket is full.
const FULL_PAUSE: Duration = Duration::from_millis(5);

/// Send buffer of a connection within this machine. The kernel doubles it for its own needs and
/// caps it (`net.core.wmem_max`). The default of a Unix socket (208 KiB, 512-byte units) makes
/// both sides wait for each other.
const LOCAL_BUFFER: usize = 256 << 10;

/// Bytes that a task moves before it yields to the other tasks of its thread.
const YIELD_AFTER: u64 = 1 << 20;

/// Bytes that a task has moved since it last yielded.
#[derive(Debug, Default)]
pub(crate) struct Moved(u64);

impl Moved {
    /// Counts bytes, and yields after [`YIELD_AFTER`].
    pub(crate) async fn add(&mut self, bytes: u64) {
        self.0 += bytes;
        if self.0 >= YIELD_AFTER {
            self.0 = 0;
            yield_now().await;
        }
    }
}

/// A connected stream socket.
#[derive(Debug)]
pub(crate) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Socket {
    /// Connects.
    pub(crate) async fn connect(address: &Address) -> io::Result<Self> {
        match address {
            Address::Tcp { host, port } => {
                Self::tcp(TcpStream::connect((host.as_str(), *port)).await?)
            }
            Address::Unix(path) => Self::connect_unix(path).await,
        }
    }

    fn tcp(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        // The kernel sizes TCP buffers better than a fixed number would, except within this
        // machine: there the bytes in flight fill any buffer, and should stay in the CPU's cache.
        if let (Ok(here), Ok(there)) = (stream.local_addr(), stream.peer_addr())
            && here.ip() == there.ip()
        {
            let _ = SockRef::from(&stream).set_send_buffer_size(LOCAL_BUFFER);
        }
        Ok(Self::Tcp(stream))
    }

    fn unix(stream: UnixStream) -> Self {
        let _ = SockRef::from(&stream).set_send_buffer_size(LOCAL_BUFFER);
        Self::Unix(stream)
    }

    async fn connect_unix(path: &Path) -> io::Result<Self> {
        loop {
            match UnixStream::connect(path).await {
                // The backlog is full.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => sleep(FULL_PAUSE).await,
                connected => return connected.map(Self::unix),
            }
        }
    }

    /// Ends the connection when the other host acknowledges nothing for `timeout`, whether bytes
    /// are in flight (`TCP_USER_TIMEOUT`) or not (keepalive probes). Does nothing on Unix sockets.
    pub(crate) fn set_dead_after(&self, timeout: Duration) {
        let Self::Tcp(stream) = self else { return };
        let socket = SockRef::from(stream);
        let interval = (timeout / 3).max(Duration::from_secs(1));
        let keepalive = TcpKeepalive::new()
            .with_time(interval)
            .with_interval(interval)
            .with_retries(3);
        // A socket that was reset meanwhile refuses the option; the next call on it reports the
        // error.
        let _ = socket.set_tcp_keepalive(&keepalive);
        let _ = socket.set_tcp_user_timeout(Some(timeout));
    }

    /// Moves the socket to the reactor of another thread.
    pub(crate) fn watched_by(self, thread: &Handle) -> io::Result<Self> {
        let _entered = thread.enter();
        Ok(match self {
            Self::Tcp(stream) => Self::Tcp(TcpStream::from_std(stream.into_std()?)?),
            Self::Unix(stream) => Self::Unix(UnixStream::from_std(stream.into_std()?)?),
        })
    }

    /// Sets how many bytes must have arrived before a reader is woken. Returns `false` where that
    /// is not supported.
    pub(crate) fn set_low_water(&self, bytes: u64) -> bool {
        match self {
            Self::Tcp(stream) => raw::set_low_water(stream.as_raw_fd(), bytes),
            Self::Unix(_) => false,
        }
    }

    /// Returns whether both ends are on this host.
    pub(crate) fn is_local(&self) -> bool {
        match self {
            Self::Tcp(stream) => stream.peer_addr().is_ok_and(|to| to.ip().is_loopback()),
            Self::Unix(_) => true,
        }
    }

    /// Returns whether this is a Unix socket.
    pub(crate) fn is_unix(&self) -> bool {
        matches!(self, Self::Unix(_))
    }

    /// Returns whether the other side has closed the connection. Call it when nothing is unread.
    pub(crate) fn is_closed(&self) -> bool {
        match self {
            Self::Tcp(stream) => is_closed(stream.as_raw_fd()),
            Self::Unix(stream) => is_closed(stream.as_raw_fd()),
        }
    }

    /// Waits until the socket may be ready.
    pub(crate) async fn ready(&self, interest: Interest) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.ready(interest).await,
            Self::Unix(stream) => stream.ready(interest).await,
        }?;
        Ok(())
    }

    /// Runs `io` on the file descriptor until it does not return `WouldBlock`. Takes part in
    /// tokio's cooperative scheduling: a socket that is always ready would never yield.
    pub(crate) async fn when<T>(
        &self,
        interest: Interest,
        mut io: impl FnMut(RawFd) -> io::Result<T>,
    ) -> io::Result<T> {
        consume_budget().await;
        loop {
            self.ready(interest).await?;
            let done = self.try_now(interest, &mut io);
            match done.map_err(|error| (error.kind(), error)) {
                Ok(done) => return Ok(done),
                Err((io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted, _)) => {}
                Err((_, error)) => return Err(error),
            }
        }
    }

    /// Runs `io` on the file descriptor once; it may return `WouldBlock`.
    pub(crate) fn try_now<T>(
        &self,
        interest: Interest,
        io: impl FnOnce(RawFd) -> io::Result<T>,
    ) -> io::Result<T> {
        match self {
            Self::Tcp(stream) => stream.try_io(interest, || io(stream.as_raw_fd())),
            Self::Unix(stream) => stream.try_io(interest, || io(stream.as_raw_fd())),
        }
    }

    /// Fills a buffer.
    ///
    /// # Errors
    /// `UnexpectedEof` at the end of the stream.
    pub(crate) async fn read_exact(&self, buffer: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < buffer.len() {
            let rest = &mut buffer[done..];
            match self
                .when(Interest::READABLE, |fd| receive_bytes(fd, rest))
                .await?
            {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                n => done += n,
            }
        }
        Ok(())
    }

    /// Sends all of a buffer.
    pub(crate) async fn write_all(&self, buffer: &[u8]) -> io::Result<()> {
        let mut done = 0;
        while done < buffer.len() {
            let rest = &buffer[done..];
            done += self
                .when(Interest::WRITABLE, |fd| send_bytes(fd, rest))
                .await?;
        }
        Ok(())
    }
}

/// All sockets of a connection. Dropping them shuts each down first, so that the peer reads an
/// orderly end: a TCP socket that is closed with unread bytes is reset, and a reset does not prove
/// that this side closed it.
#[derive(Debug)]
pub(crate) struct Sockets(pub(crate) Vec<Socket>);

impl Drop for Sockets {
    fn drop(&mut self) {
        let mut context = Context::from_waker(Waker::noop());
        for socket in &mut self.0 {
            // Completes at once for both kinds.
            let _ = match socket {
                Socket::Tcp(stream) => Pin::new(stream).poll_shutdown(&mut context),
                Socket::Unix(stream) => Pin::new(stream).poll_shutdown(&mut context),
            };
        }
    }
}

/// A bound address. Removes the file of its Unix socket when dropped.
#[derive(Debug)]
pub(crate) struct Listener {
    kind: Kind,
    address: Address,
}

#[derive(Debug)]
enum Kind {
    Tcp(TcpListener),
    /// With the file's device and inode, which distinguish it from another listener's file.
    Unix(UnixListener, PathBuf, (u64, u64)),
}

impl Listener {
    /// Binds. Call it within a tokio runtime.
    pub(crate) fn bind(address: &Address) -> io::Result<Self> {
        match address {
            Address::Tcp { host, port } => Self::tcp(host, *port),
            Address::Unix(path) => Self::unix(path),
        }
    }

    fn tcp(host: &str, port: u16) -> io::Result<Self> {
        let listener = std::net::TcpListener::bind((host, port))?;
        listener.set_nonblocking(true)?;
        let address = Address::Tcp {
            host: host.to_owned(),
            port: listener.local_addr()?.port(),
        };
        let kind = Kind::Tcp(TcpListener::from_std(listener)?);
        Ok(Self { kind, address })
    }

    fn unix(path: &Path) -> io::Result<Self> {
        remove_stale(path)?;
        let listener = UnixListener::bind(path)?;
        let file = fs::symlink_metadata(path)?;
        let kind = Kind::Unix(listener, path.to_owned(), (file.dev(), file.ino()));
        let address = Address::Unix(path.to_owned());
        Ok(Self { kind, address })
    }

    /// The address, with the port that was chosen.
    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// Returns whether only this host can connect.
    pub(crate) fn is_local(&self) -> bool {
        match &self.kind {
            Kind::Tcp(listener) => listener.local_addr().is_ok_and(|at| at.ip().is_loopback()),
            Kind::Unix(..) => true,
        }
    }

    /// Accepts the next connection; returns it with the source address (`None`: Unix).
    pub(crate) async fn accept(&self) -> io::Result<(Socket, Option<IpAddr>)> {
        match &self.kind {
            Kind::Tcp(listener) => {
                let (stream, from) = listener.accept().await?;
                Ok((Socket::tcp(stream)?, Some(from.ip())))
            }
            Kind::Unix(listener, ..) => {
                let (stream, _) = listener.accept().await?;
                Ok((Socket::unix(stream), None))
            }
        }
    }
}

/// Removes the socket file of a process that has ended. Call it within a tokio runtime.
fn remove_stale(path: &Path) -> io::Result<()> {
    let Ok(file) = fs::symlink_metadata(path) else {
        return Ok(());
    };
    if !file.file_type().is_socket() {
        let what = format!("{} exists and is not a socket", path.display());
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
    }
    // Polled once: while the backlog is full the connect stays pending.
    let mut context = Context::from_waker(Waker::noop());
    match pin!(UnixStream::connect(path)).poll(&mut context) {
        Poll::Ready(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path)
        }
        Poll::Ready(Err(error)) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        _ => {
            let what = format!("another process listens at {}", path.display());
            Err(io::Error::new(io::ErrorKind::AddrInUse, what))
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Kind::Unix(_, path, ours) = &self.kind
            && fs::symlink_metadata(path).is_ok_and(|file| (file.dev(), file.ino()) == *ours)
        {
            let _ = fs::remove_file(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use tokio::task::LocalSet;

    use super::*;

    #[test]
    fn a_task_that_moves_much_yields_to_others_of_its_thread() {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        let tasks = LocalSet::new();
        let turns = Rc::new(Cell::new(0));
        let other = Rc::clone(&turns);
        tasks.spawn_local(async move {
            loop {
                other.set(other.get() + 1);
                yield_now().await;
            }
        });
        let moves = async {
            let mut moved = Moved::default();
            for _ in 0..16 {
                moved.add(YIELD_AFTER / 4).await;
            }
        };
        tasks.block_on(&runtime.expect("a runtime"), moves);
        assert!((4..=8).contains(&turns.get()), "{} turns", turns.get());
    }
}
