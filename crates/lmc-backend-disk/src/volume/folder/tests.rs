//! One suite for both engines, on a real directory. Every wait has a deadline.

use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::time::Instant;

use lmc_memory::{ArenaConfig, Pool, PoolConfig};
use lmc_testkit::{DEADLINE, Folder as TempFolder, rounds, until};

use super::*;
use crate::volume::{Buf, Done, Kind, SlotPart, is_abandoned};

const MIB: u64 = 1 << 20;

/// A reproducible source of numbers.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) % bound
    }
}

/// Bytes that only this offset of this file has.
fn stamp(bytes: &mut [u8], offset: u64) {
    for (i, word) in bytes.chunks_mut(8).enumerate() {
        let value = (offset + 8 * i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5A5A;
        word.copy_from_slice(&value.to_le_bytes()[..word.len()]);
    }
}

fn assert_stamp(bytes: &[u8], offset: u64) {
    let mut expected = vec![0; bytes.len()];
    stamp(&mut expected, offset);
    assert!(bytes == expected, "wrong bytes at {offset}");
}

fn own(len: u64, offset: u64) -> Buf {
    let mut buf = AlignedBuf::new(len);
    stamp(&mut buf, offset);
    Buf::Own(buf)
}

struct Ask {
    kind: Kind,
    file: FileId,
    offset: u64,
    len: u64,
    buf: Option<Buf>,
}

fn read(file: FileId, offset: u64, len: u64) -> Ask {
    let buf = Some(Buf::Own(AlignedBuf::new(len)));
    Ask {
        kind: Kind::Read,
        file,
        offset,
        len,
        buf,
    }
}

fn write(file: FileId, offset: u64, len: u64) -> Ask {
    let buf = Some(own(len, offset));
    Ask {
        kind: Kind::Write,
        file,
        offset,
        len,
        buf,
    }
}

fn sync(file: FileId) -> Ask {
    Ask {
        kind: Kind::Sync,
        file,
        offset: 0,
        len: 0,
        buf: None,
    }
}

fn start(volume: &FolderVolume, asks: Vec<Ask>) -> mpsc::Receiver<(usize, Done)> {
    let (send, received) = mpsc::channel();
    let ops = asks.into_iter().enumerate().map(|(i, ask)| {
        let Ask {
            kind,
            file,
            offset,
            len,
            buf,
        } = ask;
        let send = send.clone();
        let done = Box::new(move |done| drop(send.send((i, done))));
        VolumeOp {
            kind,
            file,
            offset,
            len,
            buf,
            abandoned: None,
            done,
        }
    });
    volume.submit(ops.collect());
    received
}

/// Asks, waits for all, and gives the ends in the order of the questions.
fn ask(volume: &FolderVolume, asks: Vec<Ask>) -> Vec<Done> {
    let count = asks.len();
    let received = start(volume, asks);
    let mut ends: Vec<Option<Done>> = (0..count).map(|_| None).collect();
    for _ in 0..count {
        let (i, done) = received
            .recv_timeout(DEADLINE)
            .expect("an operation did not end");
        assert!(ends[i].replace(done).is_none(), "an operation ended twice");
    }
    assert!(received.try_recv().is_err(), "an operation ended twice");
    ends.into_iter().map(Option::unwrap).collect()
}

fn ask_one(volume: &FolderVolume, one: Ask) -> io::Result<Option<Buf>> {
    let done = ask(volume, vec![one]).pop().unwrap();
    done.result.map(|()| done.buf)
}

fn kind_of(result: io::Result<Option<Buf>>) -> io::ErrorKind {
    result.expect_err("it should have failed").kind()
}

fn pool() -> (Arc<Arena>, Pool) {
    let arena = Arc::new(ArenaConfig::anonymous(48 << 20).build().unwrap());
    let pool = Pool::new(Arc::clone(&arena), PoolConfig::default()).unwrap();
    (arena, pool)
}

fn volume(dir: &TempFolder, engine: DiskIo, depth: u32, arena: Option<Arc<Arena>>) -> FolderVolume {
    let config = FolderConfig {
        engine,
        depth,
        threads: 4,
        arena,
    };
    FolderVolume::open(dir, config).unwrap()
}

/// Many sizes from and into slots and own memory, each offset checked byte for byte.
fn mixed(volume: &FolderVolume, pool: &Pool) {
    let seed = 0x1234_5678_9ABC_DEF1;
    println!("seed {seed:#x}");
    let mut random = Random(seed);
    let size = rounds(24, 120) as u64 * MIB;
    // The last extent may end beyond it.
    let file = volume.open("mixed", Some(size + 80 * MIB)).unwrap();
    let mut extents = Vec::new();
    let mut at = 0;
    while at < size {
        let blocks = match random.below(4) {
            0 => 1 + random.below(2048),
            1 => 1 + random.below(256),
            _ => 1 + random.below(16),
        };
        // The last block may end in a slot's padding, which belongs to no chunk.
        let exact = blocks * BLOCK - random.below(2) * random.below(BLOCK);
        extents.push((at, blocks * BLOCK, exact));
        at += (blocks + random.below(8)) * BLOCK;
    }
    for i in (1..extents.len()).rev() {
        extents.swap(i, random.below(i as u64 + 1) as usize);
    }
    println!("{} extents", extents.len());
    for batch in extents.chunks(40) {
        let mut asks = Vec::new();
        for &(offset, len, exact) in batch {
            let mut one = write(file, offset, len);
            if let Some(mut slot) = pool.reserve(exact) {
                stamp(slot.bytes_mut(), offset);
                one.buf = Some(Buf::From(slot.written().seal()));
            }
            asks.push(one);
        }
        for done in ask(volume, asks) {
            done.result.unwrap();
            assert!(matches!(done.buf, Some(Buf::From(_) | Buf::Own(_))));
        }
    }
    ask_one(volume, sync(file)).unwrap();
    assert_eq!(pool.usage().used, 0);
    for batch in extents.chunks(37) {
        let mut asks = Vec::new();
        for &(offset, len, exact) in batch {
            let mut one = read(file, offset, len);
            if let Some(slot) = pool.reserve(exact) {
                one.buf = Some(Buf::Into(SlotPart::whole(slot)));
            }
            asks.push(one);
        }
        for (done, &(offset, _, exact)) in ask(volume, asks).into_iter().zip(batch) {
            done.result.unwrap();
            match done.buf.unwrap() {
                Buf::Own(buf) => assert_stamp(&buf[..exact as usize], offset),
                Buf::Into(part) => assert_stamp(part.bytes(), offset),
                Buf::From(_) => panic!("another buffer came back"),
            }
        }
    }
    assert_eq!(pool.usage().used, 0);
    volume.close(file);
    volume.remove("mixed").unwrap();
}

fn ends_of_files(volume: &FolderVolume, dir: &TempFolder) {
    let len = || fs::metadata(dir.join("short")).unwrap().len();
    let set_len = |len| {
        let file = OpenOptions::new().write(true).open(dir.join("short"));
        file.unwrap().set_len(len).unwrap();
    };
    let file = volume.open("short", Some(3 * BLOCK)).unwrap();
    assert_eq!(len(), 3 * BLOCK);
    ask_one(volume, write(file, 0, 3 * BLOCK)).unwrap();
    set_len(2 * BLOCK + 1000);
    let Some(Buf::Own(buf)) = ask_one(volume, read(file, 0, 2 * BLOCK)).unwrap() else {
        panic!("the buffer did not come back");
    };
    assert_stamp(&buf, 0);
    for (offset, len) in [
        (0, 3 * BLOCK),
        (BLOCK, 4 * BLOCK),
        (2 * BLOCK, BLOCK),
        (MIB, BLOCK),
    ] {
        let kind = kind_of(ask_one(volume, read(file, offset, len)));
        assert_eq!(
            kind,
            io::ErrorKind::UnexpectedEof,
            "{len} bytes at {offset}"
        );
    }
    // Made longer, the rest reads as zeroes.
    set_len(4 * BLOCK);
    let Some(Buf::Own(buf)) = ask_one(volume, read(file, 3 * BLOCK, BLOCK)).unwrap() else {
        panic!("the buffer did not come back");
    };
    assert!(buf.iter().all(|&byte| byte == 0));
    // And opening with a length never cuts.
    let again = volume.open("short", Some(BLOCK)).unwrap();
    assert_ne!(again, file);
    assert_eq!(len(), 4 * BLOCK);
    volume.open("short", Some(8 * BLOCK)).unwrap();
    assert_eq!(len(), 8 * BLOCK);
    volume.remove("short").unwrap();
}

fn refusals(volume: &FolderVolume, pool: &Pool) {
    let file = volume.open("refusals", Some(MIB)).unwrap();
    let sealed = || Some(Buf::From(pool.reserve(BLOCK).unwrap().written().seal()));
    let reserved = || Some(Buf::Into(SlotPart::whole(pool.reserve(BLOCK).unwrap())));
    let invalid = vec![
        read(file, 1, BLOCK),
        read(file, 0, BLOCK + 1),
        read(file, 0, 0),
        read(file, u64::MAX - BLOCK + 1, BLOCK),
        read(file, i64::MAX as u64 / BLOCK * BLOCK, BLOCK),
        Ask {
            len: 2 * BLOCK,
            ..read(file, 0, BLOCK)
        },
        Ask {
            buf: sealed(),
            ..read(file, 0, BLOCK)
        },
        Ask {
            buf: None,
            ..read(file, 0, BLOCK)
        },
        Ask {
            buf: reserved(),
            len: 2 * BLOCK,
            ..read(file, 0, BLOCK)
        },
        Ask {
            len: (1 << 30) + BLOCK,
            ..write(file, 0, BLOCK)
        },
        Ask {
            buf: reserved(),
            ..write(file, 0, BLOCK)
        },
        Ask {
            buf: None,
            ..write(file, 0, BLOCK)
        },
        Ask {
            len: BLOCK,
            ..sync(file)
        },
        Ask {
            kind: Kind::Sync,
            len: 0,
            ..write(file, 0, BLOCK)
        },
    ];
    for (i, done) in ask(volume, invalid).into_iter().enumerate() {
        let error = done.result.expect_err("it should be refused");
        assert_eq!(
            error.kind(),
            io::ErrorKind::InvalidInput,
            "number {i}: {error}"
        );
    }
    assert_eq!(pool.usage().used, 0);
    assert_eq!(
        kind_of(ask_one(volume, read(FileId(999), 0, BLOCK))),
        io::ErrorKind::NotFound
    );
    volume.close(file);
    volume.close(file);
    assert_eq!(
        kind_of(ask_one(volume, read(file, 0, BLOCK))),
        io::ErrorKind::NotFound
    );
    volume.remove("refusals").unwrap();
}

fn names(volume: &FolderVolume, dir: &TempFolder) {
    for bad in ["", ".", "..", "a/b", "/tmp/x", "nul\0"] {
        let kind = volume.open(bad, Some(BLOCK)).unwrap_err().kind();
        assert_eq!(kind, io::ErrorKind::InvalidInput, "{bad:?}");
        assert!(volume.rename("x", bad).is_err() && volume.remove(bad).is_err());
    }
    assert_eq!(
        volume.open("none", None).unwrap_err().kind(),
        io::ErrorKind::NotFound
    );
    let file = volume.open("one", Some(MIB)).unwrap();
    ask_one(volume, write(file, BLOCK, BLOCK)).unwrap();
    volume.open("two", Some(0)).unwrap();
    fs::create_dir(dir.join("folder")).unwrap();
    std::os::unix::fs::symlink("one", dir.join("link")).unwrap();
    assert!(volume.open("link", None).is_err(), "links are not followed");
    assert!(volume.open("folder", None).is_err());
    let mut names = volume.list().unwrap();
    names.sort();
    assert_eq!(names, ["one", "two"]);
    volume.rename("one", "two").unwrap();
    volume.sync_names().unwrap();
    assert_eq!(volume.list().unwrap(), ["two"]);
    let file = volume.open("two", None).unwrap();
    let Some(Buf::Own(buf)) = ask_one(volume, read(file, BLOCK, BLOCK)).unwrap() else {
        panic!("the buffer did not come back");
    };
    assert_stamp(&buf, BLOCK);
    let all = volume.read_all("two").unwrap();
    let all: &[u8] = (*all).as_ref();
    assert_eq!(all.len() as u64, MIB);
    assert_stamp(&all[BLOCK as usize..][..BLOCK as usize], BLOCK);
    volume.open("empty", Some(0)).unwrap();
    assert!((*volume.read_all("empty").unwrap()).as_ref().is_empty());
    volume.remove("empty").unwrap();
    for bad in ["none", "folder", "link", "..", ""] {
        assert!(volume.read_all(bad).is_err(), "{bad:?}");
    }
    volume.remove("two").unwrap();
    assert_eq!(volume.list().unwrap(), Vec::<String>::new());
    assert!(volume.free().unwrap() > 0);
}

/// Far more than the depth, with the file closed while they run.
fn many(volume: &FolderVolume) {
    let file = volume.open("many", Some(MIB)).unwrap();
    ask_one(volume, write(file, 0, MIB)).unwrap();
    let reads = (0..800)
        .map(|i| read(file, i * BLOCK % MIB, BLOCK))
        .collect();
    let received = start(volume, reads);
    volume.close(file);
    for _ in 0..800 {
        let (i, done) = received
            .recv_timeout(DEADLINE)
            .expect("an operation did not end");
        done.result.unwrap();
        let Some(Buf::Own(buf)) = done.buf else {
            panic!("the buffer did not come back")
        };
        assert_stamp(&buf, i as u64 * BLOCK % MIB);
    }
    // Many files, of which each has its entry in the ring for a while.
    for i in 0..300 {
        let file = volume.open("many", None).unwrap();
        ask_one(volume, read(file, i % 256 * BLOCK, BLOCK)).unwrap();
        volume.close(file);
    }
    volume.remove("many").unwrap();
}

/// Askers that are gone, panic, ask again, or drop the volume.
fn askers(volume: FolderVolume, pool: &Pool) {
    let file = volume.open("askers", Some(64 * MIB)).unwrap();
    let asks: Vec<_> = (0..40)
        .map(|i| {
            let slot = pool.reserve(MIB).unwrap();
            let buf = Some(Buf::From(slot.written().seal()));
            Ask {
                buf,
                ..write(file, i * MIB, MIB)
            }
        })
        .collect();
    drop(start(&volume, asks));
    until("all slots are back", || pool.usage().used == 0);

    let op = |done: Box<dyn FnOnce(Done) + Send>| {
        let Ask {
            kind,
            file,
            offset,
            len,
            buf,
        } = read(file, 0, BLOCK);
        VolumeOp {
            kind,
            file,
            offset,
            len,
            buf,
            abandoned: None,
            done,
        }
    };
    volume.submit(vec![op(Box::new(|_| {
        panic!("a callback that panics, on purpose")
    }))]);
    ask_one(&volume, read(file, 0, BLOCK)).unwrap();

    let volume = Arc::new(volume);
    let (send, received) = mpsc::channel();
    let asker = Arc::clone(&volume);
    let next = op(Box::new(move |done: Done| {
        send.send(done.result.is_ok()).unwrap()
    }));
    volume.submit(vec![op(Box::new(move |_| asker.submit(vec![next])))]);
    assert!(received.recv_timeout(DEADLINE).unwrap());

    // The last owner is a callback, on the engine's own thread.
    let (send, received) = mpsc::channel();
    let (go, wait) = mpsc::channel();
    let last = Arc::clone(&volume);
    volume.submit(vec![op(Box::new(move |_| {
        wait.recv_timeout(DEADLINE).unwrap();
        drop(last);
        send.send(()).unwrap();
    }))]);
    drop(volume);
    go.send(()).unwrap();
    received
        .recv_timeout(DEADLINE)
        .expect("dropping the volume in a callback hangs");
}

fn stopping(volume: &FolderVolume, pool: &Pool) {
    let file = volume.open("stopping", Some(64 * MIB)).unwrap();
    let asks: Vec<_> = (0..40)
        .map(|i| {
            let buf = Some(Buf::Into(SlotPart::whole(pool.reserve(MIB).unwrap())));
            Ask {
                buf,
                ..read(file, i * MIB, MIB)
            }
        })
        .collect();
    let received = start(volume, asks);
    volume.stop();
    let ends: Vec<_> = (0..40)
        .map(|_| received.recv_timeout(DEADLINE).unwrap())
        .collect();
    let stopped = ends.iter().filter(|(_, done)| done.result.is_err()).count();
    println!("{stopped} of 40 were stopped");
    assert!(
        ends.iter().all(|(_, done)| done.buf.is_some()),
        "a released buffer comes back"
    );
    drop(ends);
    assert_eq!(pool.usage().used, 0);
    // A caller after the stop may hold a lock that its callback takes.
    let lock = Arc::new(Mutex::new(()));
    let held = lock.lock();
    let (send, received) = mpsc::channel();
    let ops = [
        read(file, 0, BLOCK),
        read(FileId(777), 0, BLOCK),
        sync(file),
    ]
    .into_iter()
    .map(
        |Ask {
             kind,
             file,
             offset,
             len,
             buf,
         }| {
            let (send, lock) = (send.clone(), Arc::clone(&lock));
            let done = Box::new(move |done: Done| {
                drop(lock.lock());
                send.send(done.result.is_err()).unwrap();
            });
            VolumeOp {
                kind,
                file,
                offset,
                len,
                buf,
                abandoned: None,
                done,
            }
        },
    );
    volume.submit(ops.collect());
    drop(held);
    for _ in 0..3 {
        assert!(
            received.recv_timeout(DEADLINE).unwrap(),
            "nothing runs after the stop"
        );
    }
    volume.close(file);
    volume.stop();
}

/// An operation that no caller waits for does not begin; its memory comes back.
fn abandoned(volume: &FolderVolume) {
    let file = volume.open("abandoned", Some(BLOCK)).unwrap();
    let (send, received) = mpsc::channel();
    let op = VolumeOp {
        kind: Kind::Write,
        file,
        offset: 0,
        len: BLOCK,
        buf: Some(own(BLOCK, 77 * BLOCK)),
        abandoned: Some(Arc::new(AtomicBool::new(true))),
        done: Box::new(move |done| drop(send.send(done))),
    };
    volume.submit(vec![op]);
    let done: Done = received.recv_timeout(DEADLINE).expect("an end");
    assert!(is_abandoned(&done.result.unwrap_err()));
    assert!(done.buf.is_some());
    let read = ask_one(volume, read(file, 0, BLOCK)).unwrap();
    let Some(Buf::Own(bytes)) = read else {
        panic!("its own memory");
    };
    assert!(bytes.iter().all(|&byte| byte == 0), "nothing was written");
    volume.close(file);
}

/// Runs every check. The volumes are made with little and with much depth, with and without the
/// pool's memory registered.
fn suite(parent: &Path, engine: DiskIo) {
    let (arena, pool) = pool();
    let dir = TempFolder::inside(parent);
    let deep = volume(&dir, engine, 64, Some(Arc::clone(&arena)));
    mixed(&deep, &pool);
    println!("{}", deep.describe());
    ends_of_files(&deep, &dir);
    refusals(&deep, &pool);
    names(&deep, &dir);
    abandoned(&deep);
    many(&deep);
    stopping(&deep, &pool);
    let shallow = volume(&dir, engine, 4, None);
    println!("{}", shallow.describe());
    many(&shallow);
    ends_of_files(&shallow, &dir);
    askers(shallow, &pool);
    stopping(&volume(&dir, engine, 1, None), &pool);
    assert_eq!(pool.usage().quarantined_bytes, 0);
}

/// Returns true if there is io_uring here; prints why the test is skipped if not.
fn has_uring() -> bool {
    match Uring::start(4, None) {
        Ok(_) => true,
        Err(error) => {
            println!("skipped: no io_uring here: {error}");
            false
        }
    }
}

#[test]
fn uring_in_the_temporary_directory() {
    if has_uring() {
        suite(&std::env::temp_dir(), DiskIo::Uring);
    }
}

#[test]
fn uring_in_shared_memory() {
    if has_uring() {
        suite(Path::new("/dev/shm"), DiskIo::Uring);
    }
}

#[test]
fn threads_in_the_temporary_directory() {
    suite(&std::env::temp_dir(), DiskIo::Threads);
}

#[test]
fn threads_in_shared_memory() {
    suite(Path::new("/dev/shm"), DiskIo::Threads);
}

#[test]
fn a_volume_says_how_it_moves_bytes() {
    let dir = TempFolder::temporary();
    let threads = volume(&dir, DiskIo::Threads, 64, None).describe();
    assert!(threads.starts_with("4 threads, "), "{threads}");
    let auto = volume(&dir, DiskIo::Auto, 32, None).describe();
    if has_uring() {
        assert!(
            auto.starts_with("io_uring, ") && auto.ends_with(", depth 32"),
            "{auto}"
        );
        let (arena, _pool) = pool();
        let registered = volume(&dir, DiskIo::Uring, 32, Some(arena));
        let file = registered.open("file", Some(BLOCK)).unwrap();
        ask_one(&registered, write(file, 0, BLOCK)).unwrap();
        let now = registered.describe();
        assert!(now.contains(", pool "), "{now}");
    } else {
        assert!(auto.starts_with("4 threads (io_uring: "), "{auto}");
    }
}

#[test]
fn a_directory_that_is_none_is_refused() {
    let dir = TempFolder::temporary();
    let open = |name: &str| FolderVolume::open(&dir.join(name), FolderConfig::default());
    assert_eq!(open("none").unwrap_err().kind(), io::ErrorKind::NotFound);
    fs::write(dir.join("file"), b"").unwrap();
    assert_eq!(
        open("file").unwrap_err().kind(),
        io::ErrorKind::NotADirectory
    );
}

/// A quick look, not a benchmark: `cargo test --release -- --ignored --nocapture quick_look`.
#[test]
#[ignore = "a measurement"]
fn quick_look() {
    let arena = Arc::new(ArenaConfig::anonymous(64 << 20).build().unwrap());
    let pool = Pool::new(Arc::clone(&arena), PoolConfig::default()).unwrap();
    for engine in [DiskIo::Threads, DiskIo::Uring] {
        let dir = TempFolder::temporary();
        let config = FolderConfig {
            engine,
            threads: 16,
            arena: Some(Arc::clone(&arena)),
            ..FolderConfig::default()
        };
        let volume = FolderVolume::open(&dir, config).unwrap();
        let file = volume.open("look", Some(1 << 30)).unwrap();
        for kind in [Kind::Write, Kind::Write, Kind::Read] {
            let (send, received) = mpsc::channel();
            let begin = Instant::now();
            let cpu = cpu_time();
            let mut free: Vec<_> = (0..16)
                .map(|_| {
                    let slot = pool.reserve(MIB).unwrap();
                    match kind {
                        Kind::Write => Buf::From(slot.written().seal()),
                        _ => Buf::Into(SlotPart::whole(slot)),
                    }
                })
                .collect();
            for i in 0..1024 {
                let buf = free
                    .pop()
                    .or_else(|| received.recv_timeout(DEADLINE).unwrap());
                let send = send.clone();
                let done = Box::new(move |done: Done| {
                    done.result.unwrap();
                    send.send(done.buf).unwrap();
                });
                let op = VolumeOp {
                    kind,
                    file,
                    offset: i * MIB,
                    len: MIB,
                    buf,
                    abandoned: None,
                    done,
                };
                volume.submit(vec![op]);
            }
            for _ in 0..16 {
                drop(received.recv_timeout(DEADLINE).unwrap());
            }
            let took = begin.elapsed().as_secs_f64();
            println!(
                "{}: {kind:?} {:.2} GB/s, {:.1} % of a core per GB/s",
                volume.describe(),
                1.073741824 / took,
                (cpu_time() - cpu) * 100.0 / 1.073741824,
            );
            ask_one(&volume, sync(file)).unwrap();
        }
    }
}

/// Seconds of processor time of this process.
fn cpu_time() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    let after = stat.rsplit(')').next().unwrap();
    let ticks = |i: usize| {
        after
            .split_whitespace()
            .nth(i)
            .unwrap()
            .parse::<f64>()
            .unwrap()
    };
    (ticks(11) + ticks(12)) / 100.0
}
