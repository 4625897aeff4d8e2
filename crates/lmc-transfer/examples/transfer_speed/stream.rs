//! Bare sockets: a batch goes with one `writev` where the kernel takes it whole, into one
//! `readv`, and is answered by a byte. No checksum, no number named, no deadline. They know
//! what ours are: how much to keep on the way, and those of TCP to wake a reader for much at a time.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use lmc_transfer::conformance::fill_value;

use crate::keeper::Other;
use crate::memory;
use crate::{Failure, Mover, Shape, Way};

/// Parts of one system call at most.
const PARTS: usize = 1024;
/// Bytes of an order: four words.
const HEAD: usize = 32;

/// Bytes on the way within a machine.
const BUFFER: libc::c_int = 256 << 10;
/// Bytes of a batch for which a reader is woken, at most and at least.
const WAKE_AT: usize = 1 << 20;
const LEAST: usize = 256 << 10;
/// Time that a reader waits for [`WAKE_AT`] bytes: fewer may be all that come.
const TIMEOUT: Duration = Duration::from_millis(2);

trait Socket: Read + Write + Send {
    /// Wakes a waiting reader at `bytes` bytes, or after [`TIMEOUT`].
    fn wake_at(&self, bytes: usize) -> io::Result<()>;
}

impl Socket for TcpStream {
    fn wake_at(&self, bytes: usize) -> io::Result<()> {
        self.set_read_timeout((bytes > 1).then_some(TIMEOUT))?;
        set(self, libc::SO_RCVLOWAT, bytes as libc::c_int)
    }
}

impl Socket for UnixStream {
    fn wake_at(&self, _: usize) -> io::Result<()> {
        Ok(())
    }
}

fn tcp(socket: TcpStream) -> io::Result<Box<dyn Socket>> {
    socket.set_nodelay(true)?;
    set(&socket, libc::SO_SNDBUF, BUFFER)?;
    Ok(Box::new(socket))
}

fn unix(socket: UnixStream) -> io::Result<Box<dyn Socket>> {
    set(&socket, libc::SO_SNDBUF, BUFFER)?;
    Ok(Box::new(socket))
}

fn set(socket: &impl AsRawFd, option: libc::c_int, value: libc::c_int) -> io::Result<()> {
    // SAFETY: the kernel reads the one number, which lives through the call.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            (&raw const value).cast(),
            size_of_val(&value) as libc::socklen_t,
        )
    };
    match set {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// An order to the other side.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
enum Order {
    /// Makes targets for a batch.
    Reserve,
    /// Makes the objects of a batch.
    Objects,
    /// Receives the batch.
    Take,
    /// Sends the batch.
    Give,
    /// Compares the batch with what it must be.
    Verify,
}

impl Order {
    const ALL: [Self; 5] = [
        Self::Reserve,
        Self::Objects,
        Self::Take,
        Self::Give,
        Self::Verify,
    ];
}

/// An order as it is sent, with what it may need.
fn head(order: Order, Shape { count, len }: Shape, seed: u64) -> [u8; HEAD] {
    let words = [order as u64, count as u64, len as u64, seed];
    let mut bytes = [0; HEAD];
    for (number, word) in bytes.chunks_mut(8).zip(words) {
        number.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

fn parse(head: [u8; HEAD]) -> Result<(Order, Shape, u64), Failure> {
    let word = |at: usize| {
        let word = head[8 * at..8 * (at + 1)].try_into();
        u64::from_le_bytes(word.expect("8 bytes"))
    };
    let order = Order::ALL
        .into_iter()
        .find(|order| *order as u64 == word(0));
    let shape = Shape {
        count: word(1) as usize,
        len: word(2) as usize,
    };
    Ok((order.ok_or("no such order")?, shape, word(3)))
}

/// One stream and its share of a batch.
struct Half {
    socket: Box<dyn Socket>,
    bytes: Vec<u8>,
    shape: Shape,
    seed: u64,
}

impl Half {
    fn new(socket: Box<dyn Socket>) -> Self {
        Self {
            socket,
            bytes: Vec::new(),
            shape: Shape { count: 0, len: 1 },
            seed: 0,
        }
    }

    fn targets(&mut self, shape: Shape, seed: u64) {
        self.bytes.resize(shape.count * shape.len, 0);
        self.bytes.fill(memory::BEFORE);
        (self.shape, self.seed) = (shape, seed);
    }

    fn objects(&mut self, shape: Shape, seed: u64) {
        self.targets(shape, seed);
        for (number, object) in self.bytes.chunks_mut(shape.len).enumerate() {
            fill_value(seed, number, object);
        }
    }

    fn verify(&self) -> Result<(), Failure> {
        memory::verify(self.bytes.chunks(self.shape.len), self.seed)
    }

    fn give(&mut self, before: &[u8]) -> Result<(), Failure> {
        let mut parts = vec![IoSlice::new(before)];
        parts.extend(self.bytes.chunks(self.shape.len).map(IoSlice::new));
        let mut parts = &mut parts[..];
        while !parts.is_empty() {
            let now = parts.len().min(PARTS);
            let sent = self.socket.write_vectored(&parts[..now])?;
            IoSlice::advance_slices(&mut parts, sent);
        }
        Ok(())
    }

    fn take(&mut self) -> Result<(), Failure> {
        let mut left = self.bytes.len();
        let mut mark = 1;
        let parts = self.bytes.chunks_mut(self.shape.len);
        let mut parts: Vec<_> = parts.map(IoSliceMut::new).collect();
        let mut parts = &mut parts[..];
        while !parts.is_empty() {
            // More than there will be would never wake it.
            let wanted = match mark > left || mark == 1 {
                true if left >= LEAST => (left / 4).clamp(LEAST, WAKE_AT),
                true => 1,
                false => mark,
            };
            if wanted != mark {
                self.socket.wake_at(wanted)?;
                mark = wanted;
            }
            let now = parts.len().min(PARTS);
            match self.socket.read_vectored(&mut parts[..now]) {
                Ok(0) => return Err("the other side is gone".into()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
                Ok(received) => {
                    left -= received;
                    IoSliceMut::advance_slices(&mut parts, received);
                }
            }
        }
        if mark > 1 {
            self.socket.wake_at(1)?;
        }
        Ok(())
    }

    fn ask(&mut self, order: Order, shape: Shape, seed: u64) -> Result<(), Failure> {
        self.socket.write_all(&head(order, shape, seed))?;
        self.answered()
    }

    fn answered(&mut self) -> Result<(), Failure> {
        let mut answer = [0];
        self.socket.read_exact(&mut answer)?;
        match answer {
            [1] => Ok(()),
            _ => Err("the other side found a wrong byte".into()),
        }
    }

    fn move_once(&mut self, way: Way) -> Result<(), Failure> {
        let nothing = Shape { count: 0, len: 0 };
        match way {
            Way::Write | Way::Send => {
                self.give(&head(Order::Take, nothing, 0))?;
                self.answered()
            }
            Way::Read => {
                self.socket.write_all(&head(Order::Give, nothing, 0))?;
                self.take()
            }
        }
    }

    /// Does what the other side says, to its end.
    fn obey(mut self) -> Result<(), Failure> {
        let mut bytes = [0; HEAD];
        while self.socket.read_exact(&mut bytes).is_ok() {
            let (order, shape, seed) = parse(bytes)?;
            let mut well = true;
            match order {
                Order::Reserve => self.targets(shape, seed),
                Order::Objects => self.objects(shape, seed),
                Order::Take => self.take()?,
                Order::Verify => well = self.verify().is_ok(),
                Order::Give => {
                    self.give(&[])?;
                    continue;
                }
            }
            self.socket.write_all(&[u8::from(well)])?;
        }
        Ok(())
    }
}

pub(crate) fn serve(kind: &str) -> Result<(), Failure> {
    // The driver's end closes standard input, and with it this process ends.
    let path = std::env::temp_dir().join(format!("lmc-bare-{}", std::process::id()));
    let serve = |socket: Box<dyn Socket>| {
        thread::spawn(move || Half::new(socket).obey());
    };
    match kind {
        "unix" => {
            let listener = UnixListener::bind(&path)?;
            println!("{}", path.display());
            thread::spawn(move || {
                while let Ok((socket, _)) = listener.accept() {
                    if let Ok(socket) = unix(socket) {
                        serve(socket);
                    }
                }
            });
        }
        _ => {
            let listener = TcpListener::bind("127.0.0.1:0")?;
            println!("{}", listener.local_addr()?);
            thread::spawn(move || {
                while let Ok((socket, _)) = listener.accept() {
                    if let Ok(socket) = tcp(socket) {
                        serve(socket);
                    }
                }
            });
        }
    }
    io::copy(&mut io::stdin(), &mut io::sink())?;
    let _ = std::fs::remove_file(path);
    Ok(())
}

pub(crate) struct Driver {
    halves: Vec<Half>,
    other: Other,
    way: Way,
}

impl Driver {
    pub(crate) fn start(kind: &str, streams: usize) -> Result<Self, Failure> {
        let (other, address) = Other::start(&format!("stream:{kind}:{streams}"))?;
        let connect = |_| -> Result<Half, Failure> {
            Ok(Half::new(match kind {
                "unix" => unix(UnixStream::connect(&address)?)?,
                _ => tcp(TcpStream::connect(&address)?)?,
            }))
        };
        Ok(Self {
            halves: (0..streams.max(1)).map(connect).collect::<Result<_, _>>()?,
            other,
            way: Way::Write,
        })
    }
}

impl Mover for Driver {
    fn prepare(&mut self, way: Way, shape: Shape, seed: u64) -> Result<(), Failure> {
        self.way = way;
        let streams = self.halves.len();
        if !shape.count.is_multiple_of(streams) {
            return Err(format!("{streams} streams do not share {} objects", shape.count).into());
        }
        let share = Shape {
            count: shape.count / streams,
            len: shape.len,
        };
        for half in &mut self.halves {
            match way {
                Way::Read => {
                    half.targets(share, seed);
                    half.ask(Order::Objects, share, seed)?;
                }
                Way::Write | Way::Send => {
                    half.objects(share, seed);
                    half.ask(Order::Reserve, share, seed)?;
                }
            }
        }
        Ok(())
    }

    fn run(&mut self, batches: usize) -> Result<Vec<Duration>, Failure> {
        let way = self.way;
        let begin = Barrier::new(self.halves.len());
        let moved = |half: &mut Half| -> Result<Vec<Duration>, Failure> {
            (0..batches)
                .map(|_| {
                    begin.wait();
                    let started = Instant::now();
                    half.move_once(way)?;
                    begin.wait();
                    Ok(started.elapsed())
                })
                .collect()
        };
        if let [half] = &mut self.halves[..] {
            return moved(half);
        }
        let times = thread::scope(|scope| {
            let moved = &moved;
            let threads: Vec<_> = self
                .halves
                .iter_mut()
                .map(|half| scope.spawn(move || moved(half)))
                .collect();
            let join = |thread: thread::ScopedJoinHandle<'_, _>| match thread.join() {
                Ok(times) => times,
                Err(_) => Err(Failure::from("a thread panicked")),
            };
            threads.into_iter().map(join).collect::<Result<Vec<_>, _>>()
        })?;
        Ok(times.into_iter().next().unwrap_or_default())
    }

    fn verify(&mut self) -> Result<(), Failure> {
        for half in &mut self.halves {
            match self.way {
                Way::Read => half.verify()?,
                Way::Write | Way::Send => half.ask(Order::Verify, half.shape, half.seed)?,
            }
        }
        Ok(())
    }

    fn other(&self) -> Option<u32> {
        Some(self.other.id())
    }
}
