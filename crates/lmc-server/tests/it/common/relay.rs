//! A TCP relay on the path between two programs.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// The bytes that went over one connection in one direction.
type Record = Arc<Mutex<Vec<u8>>>;

/// Passes connections on to a port of this host and records every byte, until it is cut.
pub(crate) struct Relay {
    pub(crate) port: u16,
    link: Arc<Link>,
}

struct Link {
    is_cut: AtomicBool,
    /// Most bytes in a second of all connections in one direction.
    rate: AtomicU64,
    /// Ends of the last pieces towards the server and from there.
    busy_until: [Mutex<Instant>; 2],
    /// Both ends of each connection.
    streams: Mutex<Vec<TcpStream>>,
    records: Mutex<Vec<Record>>,
}

impl Relay {
    /// Listens at a port of its own, and connects each connection on to a port.
    pub(crate) fn start(to: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let link = Arc::new(Link {
            is_cut: AtomicBool::default(),
            rate: AtomicU64::new(u64::MAX),
            busy_until: [Instant::now(); 2].map(Mutex::new),
            streams: Mutex::default(),
            records: Mutex::default(),
        });
        let shared = Arc::clone(&link);
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                // The server may be away, and either side may leave.
                let _ = shared.pass(client, to);
            }
        });
        Self { port, link }
    }

    /// Passes no more than this number of bytes on in a second, in each direction.
    pub(crate) fn limit(&self, rate: u64) {
        self.link.rate.store(rate, Ordering::SeqCst);
    }

    /// Ends all connections and takes none any more; or takes them again.
    pub(crate) fn cut(&self, is_cut: bool) {
        let mut streams = self.link.streams.lock();
        self.link.is_cut.store(is_cut, Ordering::SeqCst);
        for stream in streams.drain(..) {
            // It may have ended.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Returns true if the bytes passed in clear, in either direction.
    pub(crate) fn has(&self, needle: &[u8]) -> bool {
        let has = |record: &Record| {
            let record = record.lock();
            record.windows(needle.len()).any(|window| window == needle)
        };
        self.link.records.lock().iter().any(has)
    }

    /// Returns the number of bytes that passed so far, in both directions.
    pub(crate) fn bytes(&self) -> usize {
        let records = self.link.records.lock();
        records.iter().map(|record| record.lock().len()).sum()
    }
}

impl Link {
    fn pass(self: &Arc<Self>, client: TcpStream, to: u16) -> io::Result<()> {
        let mut streams = self.streams.lock();
        if self.is_cut.load(Ordering::SeqCst) {
            return Ok(());
        }
        let server = TcpStream::connect(("127.0.0.1", to))?;
        for (direction, (from, to)) in [(&client, &server), (&server, &client)]
            .into_iter()
            .enumerate()
        {
            let (from, to) = (from.try_clone()?, to.try_clone()?);
            let link = Arc::clone(self);
            thread::spawn(move || {
                let _ = link.carry(direction, &from, &to);
                let _ = to.shutdown(Shutdown::Write);
            });
        }
        streams.extend([client, server]);
        Ok(())
    }

    /// Passes the bytes of one direction of a connection on, at the rate of the link.
    fn carry(&self, direction: usize, mut from: &TcpStream, mut to: &TcpStream) -> io::Result<()> {
        let (mut piece, record) = (vec![0; 64 << 10], Record::default());
        self.records.lock().push(Arc::clone(&record));
        loop {
            let len = from.read(&mut piece)?;
            if len == 0 {
                return Ok(());
            }
            record.lock().extend_from_slice(&piece[..len]);
            let rate = self.rate.load(Ordering::SeqCst);
            let time = Duration::from_secs_f64(len as f64 / rate as f64);
            let passed_on = {
                let mut busy_until = self.busy_until[direction].lock();
                *busy_until = busy_until.max(Instant::now()) + time;
                *busy_until
            };
            thread::sleep(passed_on.saturating_duration_since(Instant::now()));
            to.write_all(&piece[..len])?;
        }
    }
}
