//! Ceilings of this machine, measured in the same run.

use std::hint::black_box;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Instant;

use anyhow::Result;

const COPY_BYTES: usize = 256 << 20;
const ROUNDS: usize = 5;

/// Bytes a second of plain copies by `threads` threads, each between buffers of its own; the
/// best of a few rounds, in GB/s.
pub(crate) fn memcpy(threads: usize) -> f64 {
    let part = COPY_BYTES / threads;
    let mut sides: Vec<_> = (0..threads)
        .map(|_| (vec![1_u8; part], vec![2_u8; part]))
        .collect();
    let mut best = 0.0_f64;
    for _ in 0..ROUNDS {
        let started = Instant::now();
        thread::scope(|scope| {
            for (from, to) in &mut sides {
                scope.spawn(|| {
                    to.copy_from_slice(from);
                    black_box(to);
                });
            }
        });
        let speed = (part * threads) as f64 / started.elapsed().as_secs_f64() / 1e9;
        best = best.max(speed);
    }
    best
}

/// The p50 of a bare TCP round trip over loopback: `bytes` there, 8 back; the best of a few
/// rounds. Seconds.
pub(crate) fn echo(bytes: usize) -> Result<f64> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let other = thread::spawn(move || -> std::io::Result<()> {
        let (mut stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        let mut buffer = vec![0; bytes];
        while stream.read_exact(&mut buffer).is_ok() {
            stream.write_all(&[0; 8])?;
        }
        Ok(())
    });
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    let message = vec![7; bytes];
    let mut answer = [0; 8];
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let mut samples = Vec::new();
        for _ in 0..1000 {
            let started = Instant::now();
            stream.write_all(&message)?;
            stream.read_exact(&mut answer)?;
            samples.push(started.elapsed().as_secs_f64());
        }
        best = best.min(super::figures::median(&samples));
    }
    drop(stream);
    let _ = other.join();
    Ok(best)
}
