//! A server that stands still in the middle of a copy, as under `docker pause` or a debugger.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use lmc_testkit::{in_lab, soon, until};
use lmc_vllm_adapter::{Client, Operation, Reply, Request};

use crate::common::{Server, registration, worker_key};

/// Time after which a stock worker that has heard nothing gives its blocks to other requests.
const WORKER_TIMEOUT: Duration = Duration::from_secs(10);
/// Chances to stop the server between the first and the last block of a copy.
const ATTEMPTS: u32 = 50;

const CHUNK: u64 = 256;
/// One block each, of 2 MiB.
const CHUNKS: u64 = 128;
/// The first is vLLM's null block, which holds no chunk.
const BLOCKS: u64 = CHUNKS + 1;
const BLOCK_BYTES: usize = 2 << 20;
/// Bytes that a copy thread writes between two looks at whether it may go on, at most.
const SHARE: usize = 1 << 20;

/// Bytes of the stored chunks, of the engine's blocks before a retrieve, and of what the engine
/// put there after it had given up.
const STORED: u8 = 0x11;
const BEFORE: u8 = 0x22;
const NEW: u8 = 0x33;

/// The engine's KV memory: one layer of MLA, a block to a chunk.
struct Memory {
    path: PathBuf,
    file: File,
}

impl Memory {
    fn new() -> Self {
        let name = format!("lmcache_kv_frozen_{}", std::process::id());
        let path = PathBuf::from("/dev/shm").join(name);
        let mut options = File::options();
        options.read(true).write(true).create_new(true);
        let file = options.open(&path).expect("space in /dev/shm");
        file.set_len(BLOCKS * BLOCK_BYTES as u64).expect("space");
        Self { path, file }
    }

    fn fill(&self, byte: u8) {
        let block = vec![byte; BLOCK_BYTES];
        for number in 0..BLOCKS {
            let written = self.file.write_all_at(&block, number * BLOCK_BYTES as u64);
            written.expect("its own memory");
        }
    }

    fn byte(&self, at: u64) -> u8 {
        let mut byte = [0];
        self.file.read_exact_at(&mut byte, at).expect("inside");
        byte[0]
    }

    /// Counts the bytes of all blocks that are `byte`.
    fn count(&self, byte: u8) -> usize {
        let mut block = vec![0; BLOCK_BYTES];
        let of_block = |number: u64| {
            let read = self
                .file
                .read_exact_at(&mut block, number * BLOCK_BYTES as u64);
            read.expect("inside");
            block.iter().filter(|&&found| found == byte).count()
        };
        (0..BLOCKS).map(of_block).sum()
    }

    fn register(&self, client: &mut Client) {
        let name = self.path.file_name().expect("a name").to_string_lossy();
        let elements = BLOCK_BYTES as u64 / CHUNK;
        let shape = [BLOCKS, CHUNK, elements / 2];
        let name = format!("/{name}");
        let registered = client.ask(&registration(1, "m", &name, ("float16", 2), shape));
        assert_eq!(registered.expect("an answer"), Reply::None);
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

fn blocks() -> Vec<Vec<u32>> {
    vec![(1..BLOCKS as u32).collect()]
}

/// A server is stopped (SIGSTOP) while it copies 256 MiB into an engine's blocks. The engine
/// hears nothing, gives the blocks to other requests and fills them. When the server goes on, it
/// stops that copy: each copy thread ends the share that it was stopped in, and no more.
#[test]
fn a_server_that_is_stopped_in_the_middle_of_a_copy_does_not_go_on_with_it() {
    if !in_lab("a server stands still for 10 s in the middle of a copy of 256 MiB") {
        return;
    }
    let server = Server::start(&["--l1-size-gb", "384MiB"]);
    let mut client = server.client();
    let memory = Memory::new();
    memory.fill(STORED);
    memory.register(&mut client);
    let store = Request::Store {
        key: worker_key(CHUNKS * CHUNK),
        instance_id: 1,
        block_ids: blocks(),
        event: Vec::new(),
    };
    assert_eq!(
        client.ask(&store).expect("an answer"),
        Reply::Transferred(true)
    );
    let retrieve = Request::Retrieve {
        key: worker_key(CHUNKS * CHUNK),
        instance_id: 1,
        block_ids: blocks(),
        event: Vec::new(),
        skip_first_n_tokens: 0,
    };
    let threads = std::thread::available_parallelism()
        .expect("a number")
        .get();
    let window = threads * SHARE;
    let all = BLOCKS as usize * BLOCK_BYTES;
    let mut attempt = 0;
    let uid = loop {
        attempt += 1;
        memory.fill(BEFORE);
        let uid = client.send(&retrieve).expect("sent");
        let deadline = soon();
        while memory.byte(BLOCK_BYTES as u64) != STORED {
            assert!(Instant::now() < deadline, "the copy never begins");
        }
        server.stop();
        // Far more is left than may be written once the server goes on.
        if memory.count(BEFORE) > 2 * window {
            break uid;
        }
        assert!(
            attempt < ATTEMPTS,
            "the copy was over before the server stood still"
        );
        server.signal(libc::SIGCONT);
        client.receive(uid, Operation::Retrieve).expect("an answer");
    };
    std::thread::sleep(WORKER_TIMEOUT);
    memory.fill(NEW);
    server.signal(libc::SIGCONT);
    let reply = client.receive(uid, Operation::Retrieve).expect("an answer");
    let overwritten = all - memory.count(NEW);
    assert!(
        overwritten <= window,
        "{overwritten} bytes of the engine's new data were overwritten, answered {reply:?}"
    );
    assert_eq!(reply, Reply::Transferred(false));

    until("it copies again", || {
        client.ask(&retrieve).expect("an answer") == Reply::Transferred(true)
    });
    assert_eq!(memory.count(STORED), CHUNKS as usize * BLOCK_BYTES);
}
