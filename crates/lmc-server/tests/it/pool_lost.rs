//! The pool's memory is taken away while the server works, with the real binary: it ends in order
//! with its own exit code, and neither an engine nor the disk gets a byte of what came after.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use lmc_vllm_adapter::{CacheKey, Client, Reply, Request};

use crate::common::{Server, registration};
use lmc_testkit::{DEADLINE, Folder, until, with_own_shm};

/// Exit code of a server whose pool was lost.
const POOL_LOST: i32 = 3;
/// The pool's segment, in a /dev/shm of the test's own.
const POOL: &str = "lmc_pool_to_lose";
const CHUNK: usize = 256;
const CHUNKS: usize = 4;
/// A block of the engine is a chunk of one layer; block 0 stands for absent data.
const BLOCK_BYTES: usize = CHUNK * 512 * 4;
const BLOCKS: usize = 1 + 2 * CHUNKS;
/// First of the blocks to store from, and of those to retrieve into.
const FROM: usize = 1;
const TO: usize = FROM + CHUNKS;

fn start(disk: &Folder) -> Server {
    Server::start(&[
        "--l1-size-gb",
        "32MiB",
        "--disk-size",
        "512MiB",
        "--shm-name",
        POOL,
        "--disk-keep-free",
        "0",
        "--log-level",
        "warn",
        "--state-dir",
        "none",
        "--disk-create",
        "--disk",
        disk.text(),
    ])
}

/// An engine whose memory the server copies from and to: one block per chunk.
struct Engine {
    client: Client,
    memory: File,
}

impl Engine {
    fn new(port: u16, name: &str) -> Self {
        let path = Path::new("/dev/shm").join(name);
        let memory = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&path)
            .expect("space for the engine");
        memory
            .write_all_at(&vec![1; BLOCKS * BLOCK_BYTES], 0)
            .expect("space for the engine");
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let mut client = Client::connect(address, DEADLINE).expect("a connection");
        let shape = [BLOCKS as u64, CHUNK as u64, 512];
        let registered = client.ask(&registration(1, "m", name, ("float32", 4), shape));
        assert_eq!(registered.expect("an answer"), Reply::None);
        Self { client, memory }
    }

    /// Stores a prompt from its blocks. Whether it was; an error when the
    /// server is gone.
    fn store(&mut self, prompt: usize) -> Result<bool, String> {
        for chunk in 0..CHUNKS {
            let at = ((FROM + chunk) * BLOCK_BYTES) as u64;
            let bytes = bytes_of(prompt, chunk);
            self.memory.write_all_at(&bytes, at).expect("its own");
        }
        let request = Request::Store {
            key: key(prompt, CHUNKS, Some(0), "store"),
            instance_id: 1,
            block_ids: vec![(FROM as u32..(FROM + CHUNKS) as u32).collect()],
            event: Vec::new(),
        };
        let reply = self
            .client
            .ask(&request)
            .map_err(|error| error.to_string())?;
        Ok(reply == Reply::Transferred(true))
    }

    /// Retrieves as much of a prompt as there is into other blocks, and checks
    /// every byte of what the server calls a success. How many chunks there were.
    fn retrieve(&mut self, prompt: usize) -> Result<usize, String> {
        let client = &mut self.client;
        let mut ask = |request| client.ask(&request).map_err(|error| error.to_string());
        ask(Request::Lookup(key(prompt, CHUNKS, None, "retrieve")))?;
        let wait = Request::WaitPrefetchStatus {
            request_id: "retrieve".to_owned(),
            timeout: DEADLINE.as_secs_f64(),
        };
        let Reply::Int(hits) = ask(wait)? else {
            return Ok(0);
        };
        let hits = hits as usize;
        if hits > 0 {
            let at = (TO * BLOCK_BYTES) as u64;
            let old = vec![0xee; CHUNKS * BLOCK_BYTES];
            self.memory.write_all_at(&old, at).expect("its own");
            let reply = ask(Request::Retrieve {
                key: key(prompt, hits, Some(0), "retrieve"),
                instance_id: 1,
                block_ids: vec![(TO as u32..(TO + hits) as u32).collect()],
                event: Vec::new(),
                skip_first_n_tokens: 0,
            })?;
            if reply != Reply::Transferred(true) {
                return Ok(0);
            }
            let mut found = vec![0; BLOCK_BYTES];
            for chunk in 0..hits {
                let at = at + (chunk * BLOCK_BYTES) as u64;
                self.memory.read_exact_at(&mut found, at).expect("its own");
                let right = found == bytes_of(prompt, chunk);
                assert!(right, "prompt {prompt}, chunk {chunk}: {:?}", &found[..8]);
            }
        }
        ask(Request::EndSession {
            request_id: "retrieve".to_owned(),
        })?;
        Ok(hits)
    }
}

fn key(prompt: usize, chunks: usize, worker_id: Option<u32>, request: &str) -> CacheKey {
    CacheKey {
        model_name: "m".to_owned(),
        world_size: 1,
        worker_id,
        token_ids: (0..(CHUNK * CHUNKS) as u32)
            .map(|token| token + (prompt * 100_000) as u32)
            .collect(),
        end: (CHUNK * chunks) as u64,
        request_id: request.to_owned(),
        num_kv_readers: 1,
        ..CacheKey::default()
    }
}

/// Never zero, which is what memory that was taken away reads as.
fn bytes_of(prompt: usize, chunk: usize) -> Vec<u8> {
    let byte = |at: usize| ((at * 31 + chunk * 7 + prompt * 13) % 255) as u8 + 1;
    (0..BLOCK_BYTES).map(byte).collect()
}

/// Stores and retrieves until the server has gone, takes its pool away meanwhile, and looks
/// whether what a new server finds on the drive is right. How many chunks that were.
fn lose_the_pool(disk: &Folder, take_away: fn(&Server)) -> usize {
    let mut server = start(disk);
    let mut engine = Engine::new(server.port, "lmcache_kv_first");
    for prompt in 0..4 {
        assert_eq!(engine.store(prompt), Ok(true));
        assert_eq!(engine.retrieve(prompt), Ok(CHUNKS));
    }
    let rounds = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&rounds);
    let load = thread::spawn(move || {
        let mut prompts = 4..;
        for prompt in &mut prompts {
            counted.fetch_add(1, Ordering::Relaxed);
            let stored = engine.store(prompt);
            let found = [prompt, prompt % 4].map(|prompt| engine.retrieve(prompt));
            if stored.is_err() || found.iter().any(Result::is_err) {
                break;
            }
        }
        prompts.start
    });
    until("the load is under way", || {
        rounds.load(Ordering::Relaxed) > 3
    });
    take_away(&server);
    let status = server.process.wait();
    assert_eq!(status.code(), Some(POOL_LOST), "{status}");
    let prompts = load.join().expect("every byte was right");
    let _ = std::fs::remove_file("/dev/shm/filler");
    assert!(!pool().exists(), "the name is removed");

    let server = start(disk);
    let mut engine = Engine::new(server.port, "lmcache_kv_second");
    (0..prompts)
        .map(|prompt| engine.retrieve(prompt).expect("it serves"))
        .sum()
}

fn pool() -> PathBuf {
    Path::new("/dev/shm").join(POOL)
}

/// Finding 7 of the review: `truncate` of the pool killed the server by SIGBUS.
#[test]
fn a_pool_that_is_cut_short_ends_the_server_in_order_and_spoils_nothing() {
    with_own_shm(
        "size=128m",
        a_pool_that_is_cut_short_ends_the_server_in_order_and_spoils_nothing,
        || {
            for cut_to in [0, 1] {
                let disk = Folder::inside(env!("CARGO_TARGET_TMPDIR"));
                let found = match cut_to {
                    0 => lose_the_pool(&disk, |_| cut(0)),
                    _ => lose_the_pool(&disk, |_| cut(1 << 20)),
                };
                assert!(found > 0, "nothing was on the drive");
            }
        },
    );
}

fn cut(to: u64) {
    let pool = OpenOptions::new().write(true).open(pool());
    pool.expect("the pool")
        .set_len(to)
        .expect("it is not sealed");
}

/// The other half of finding 7: pages were thought to be there for good, so a hole in a full
/// `/dev/shm` killed the server as well.
#[test]
fn holes_in_a_full_dev_shm_end_the_server_in_order_and_spoil_nothing() {
    with_own_shm(
        "size=128m",
        holes_in_a_full_dev_shm_end_the_server_in_order_and_spoil_nothing,
        || {
            let disk = Folder::inside(env!("CARGO_TARGET_TMPDIR"));
            let found = lose_the_pool(&disk, |server| {
                // Until /dev/shm is full again a hole reads as zeroes, as if a process had written them.
                server.signal(libc::SIGSTOP);
                let punched = Command::new("fallocate")
                    .args(["--punch-hole", "--length", "32MiB"])
                    .arg(pool())
                    .status();
                assert!(punched.expect("util-linux is there").success());
                let mut filler = File::create("/dev/shm/filler").expect("a name");
                while filler.write_all(&[1; 4096]).is_ok() {}
                server.signal(libc::SIGCONT);
            });
            assert!(found > 0, "nothing was on the drive");
        },
    );
}
