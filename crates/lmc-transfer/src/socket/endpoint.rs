//! Sockets, TCP and Unix, as one type.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use tokio::io::{AsyncWrite, Interest};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::runtime::Handle;
use tokio::task::coop::consume_budget;
use tokio::task::yield_now;
use tokio::time::{Duration, sleep};

use super::window::{is_closed, receive_bytes, send_bytes, set_bytes};
use crate::Address;

/// Pause before another attempt where as many wait at a Unix socket as may.
const FULL_PAUSE: Duration = Duration::from_millis(5);

/// Bytes that may be on a way within this machine. The kernel takes twice as many for its own
/// needs, and no more than it is told to allow (`net.core.wmem_max`). Counted so, a Unix socket
/// has 208 KiB of itself instead of 512, with which both sides wait for each other.
const LOCAL_BUFFER: u64 = 256 << 10;

/// Bytes that a task moves before it gives way to others of its thread.
const A_TURN: u64 = 1 << 20;

/// What a task has moved since it gave way.
#[derive(Debug, Default)]
pub(super) struct Moved(u64);

impl Moved {
    /// Counts bytes; gives way to others where it is their turn.
    pub(super) async fn add(&mut self, bytes: u64) {
        self.0 += bytes;
        if self.0 >= A_TURN {
            self.0 = 0;
            yield_now().await;
        }
    }
}

#[derive(Debug)]
pub(super) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Socket {
    /// Connects; none for an address of another kind.
    pub(super) async fn connect(address: &Address) -> Option<io::Result<Self>> {
        match address {
            Address::Tcp { host, port } => {
                let connected = TcpStream::connect((host.as_str(), *port)).await;
                Some(connected.and_then(Self::tcp))
            }
            Address::Unix(path) => Some(Self::connect_unix(path).await),
            Address::Memory(_) => None,
        }
    }

    fn tcp(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        // The kernel sizes the buffers of TCP better than a fixed number would, but for a way
        // within this machine: what is on that fills them, and should stay in the cache.
        // One that is reset by now has no peer, which whoever uses it next is told.
        if let (Ok(here), Ok(there)) = (stream.local_addr(), stream.peer_addr())
            && here.ip() == there.ip()
        {
            set_bytes(stream.as_raw_fd(), libc::SO_SNDBUF, LOCAL_BUFFER);
        }
        Ok(Self::Tcp(stream))
    }

    fn unix(stream: UnixStream) -> Self {
        set_bytes(stream.as_raw_fd(), libc::SO_SNDBUF, LOCAL_BUFFER);
        Self::Unix(stream)
    }

    async fn connect_unix(path: &Path) -> io::Result<Self> {
        loop {
            match UnixStream::connect(path).await {
                // As many wait there as may.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => sleep(FULL_PAUSE).await,
                connected => return connected.map(Self::unix),
            }
        }
    }

    /// Has it watched by another thread.
    pub(super) fn watched_by(self, thread: &Handle) -> io::Result<Self> {
        let _entered = thread.enter();
        Ok(match self {
            Self::Tcp(stream) => Self::Tcp(TcpStream::from_std(stream.into_std()?)?),
            Self::Unix(stream) => Self::Unix(UnixStream::from_std(stream.into_std()?)?),
        })
    }

    /// Sets how many bytes must be there before a reader is woken. False where that cannot be set.
    pub(super) fn set_low_water(&self, bytes: u64) -> bool {
        match self {
            Self::Tcp(stream) => set_bytes(stream.as_raw_fd(), libc::SO_RCVLOWAT, bytes),
            Self::Unix(_) => false,
        }
    }

    pub(super) fn is_unix(&self) -> bool {
        matches!(self, Self::Unix(_))
    }

    /// Whether the other side has closed it; to be asked where nothing is left to be read.
    pub(super) fn is_closed(&self) -> bool {
        match self {
            Self::Tcp(stream) => is_closed(stream.as_raw_fd()),
            Self::Unix(stream) => is_closed(stream.as_raw_fd()),
        }
    }

    /// Waits until it may be ready.
    pub(super) async fn ready(&self, interest: Interest) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.ready(interest).await,
            Self::Unix(stream) => stream.ready(interest).await,
        }?;
        Ok(())
    }

    /// Runs `io` on the file descriptor until it does not say "would block". Now and then it
    /// gives way to other tasks first: a socket that is always ready would never do so.
    pub(super) async fn when<T>(
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

    /// Runs `io` on the file descriptor once; it may say "would block".
    pub(super) fn try_now<T>(
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
    /// Also the end of the stream.
    pub(super) async fn read_exact(&self, buffer: &mut [u8]) -> io::Result<()> {
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
    pub(super) async fn write_all(&self, buffer: &[u8]) -> io::Result<()> {
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

/// All sockets of a connection. When they go, the other side is told by the end of each stream:
/// closing alone, with bytes unread, would reset TCP connections, which says less.
#[derive(Debug)]
pub(super) struct Sockets(pub(super) Vec<Socket>);

impl Drop for Sockets {
    fn drop(&mut self) {
        let mut context = Context::from_waker(Waker::noop());
        for socket in &mut self.0 {
            // Is done at once, for both kinds.
            let _ = match socket {
                Socket::Tcp(stream) => Pin::new(stream).poll_shutdown(&mut context),
                Socket::Unix(stream) => Pin::new(stream).poll_shutdown(&mut context),
            };
        }
    }
}

/// Where a channel is connected to. Takes its Unix socket's name away when dropped.
#[derive(Debug)]
pub(super) struct Listener {
    kind: Kind,
    address: Address,
}

#[derive(Debug)]
enum Kind {
    Tcp(TcpListener),
    /// With the file's device and inode, to tell it from another's of the same name.
    Unix(UnixListener, PathBuf, (u64, u64)),
}

impl Listener {
    /// Binds; none for an address of another kind. To be called where a runtime is entered.
    pub(super) fn bind(address: &Address) -> Option<io::Result<Self>> {
        match address {
            Address::Tcp { host, port } => Some(Self::tcp(host, *port)),
            Address::Unix(path) => Some(Self::unix(path)),
            Address::Memory(_) => None,
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
    pub(super) fn address(&self) -> &Address {
        &self.address
    }

    /// The next that connects, and the address that it comes from.
    pub(super) async fn accept(&self) -> io::Result<(Socket, Option<IpAddr>)> {
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

/// Takes away the socket of a process that has ended. To be called where a runtime is entered.
fn remove_stale(path: &Path) -> io::Result<()> {
    let Ok(file) = fs::symlink_metadata(path) else {
        return Ok(());
    };
    if !file.file_type().is_socket() {
        let what = format!("{} is there and no socket", path.display());
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
    }
    // Once, since it may be for ever that nobody accepts.
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
    fn who_moves_much_gives_way_to_others_of_its_thread() {
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
                moved.add(A_TURN / 4).await;
            }
        };
        tasks.block_on(&runtime.expect("a runtime"), moves);
        assert!((4..=8).contains(&turns.get()), "{} turns", turns.get());
    }
}
