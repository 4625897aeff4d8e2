//! A link to a server of this host that delays what passes, can be narrow, and can be made to stall.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;

/// Bytes that are passed on at a time.
const PIECE: usize = 256 << 10;
/// Pieces under way in one direction of a connection.
const PIECES: usize = 1024;

/// One direction of a link, of all connections together.
#[derive(Clone, Debug)]
struct Lane {
    delay: Duration,
    /// Most bytes in a second.
    rate: Option<u64>,
    /// End of the last piece.
    busy_until: Arc<Mutex<Instant>>,
}

impl Lane {
    /// Returns the instant at which a piece that was read now has passed a narrow link.
    fn passed(&self, len: usize) -> Instant {
        let now = Instant::now();
        let Some(rate) = self.rate else {
            return now;
        };
        let mut busy_until = self
            .busy_until
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let time = Duration::from_secs_f64(len as f64 / rate as f64);
        *busy_until = busy_until.max(now) + time;
        *busy_until
    }
}

/// The link. Its threads end with their connections.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) port: u16,
    is_stalled: Arc<AtomicBool>,
}

impl Link {
    /// Passes connections on to a port, each byte this much later, and at most `rate` bytes in a
    /// second in each direction.
    pub(crate) fn to(server: u16, delay: Duration, rate: Option<u64>) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let port = listener.local_addr()?.port();
        let is_stalled = Arc::new(AtomicBool::new(false));
        let stalled = Arc::clone(&is_stalled);
        let lane = || Lane {
            delay,
            rate,
            busy_until: Arc::new(Mutex::new(Instant::now())),
        };
        let (there, back) = (lane(), lane());
        thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let Ok(far) = TcpStream::connect(("127.0.0.1", server)) else {
                    continue;
                };
                // A client that meets an error sees the connection end.
                let (Ok(near_again), Ok(far_again)) = (near.try_clone(), far.try_clone()) else {
                    continue;
                };
                pass(near, far, there.clone(), Arc::clone(&stalled));
                pass(far_again, near_again, back.clone(), Arc::clone(&stalled));
            }
        });
        Ok(Self { port, is_stalled })
    }

    /// Passes nothing on from now on.
    pub(crate) fn stall(&self) {
        self.is_stalled.store(true, Ordering::Relaxed);
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, lane: Lane, stalled: Arc<AtomicBool>) {
    let (pieces, due) = sync_channel::<(Instant, Vec<u8>)>(PIECES);
    thread::spawn(move || {
        let mut piece = vec![0; PIECE];
        while let Ok(len @ 1..) = from.read(&mut piece) {
            let passed = lane.passed(len);
            let due = passed + lane.delay;
            if pieces.send((due, piece[..len].to_vec())).is_err() {
                break;
            }
            // The sender waits for a narrow link, and no memory here does.
            thread::sleep(passed.saturating_duration_since(Instant::now()));
        }
    });
    thread::spawn(move || {
        // Small requests leave at once.
        let _ = to.set_nodelay(true);
        for (at, piece) in due {
            thread::sleep(at.saturating_duration_since(Instant::now()));
            while stalled.load(Ordering::Relaxed) {
                thread::sleep(Duration::from_millis(10));
            }
            if to.write_all(&piece).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
    });
}
