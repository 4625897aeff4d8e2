//! Keeps unsafe code in small modules named for it, each with its reason here.

use super::Findings;
use super::tree::Tree;

/// Files that may hold unsafe code, and what for.
const EXPECTED: &str = "\
crates/lmc-backend-disk/src/volume/aligned.rs: aligned memory from the allocator
crates/lmc-backend-disk/src/volume/folder.rs: a file that is mapped
crates/lmc-backend-disk/src/volume/part.rs: a slot that is filled in parts
crates/lmc-backend-disk/src/volume/pool_buffers.rs: the pool's memory, registered with a ring
crates/lmc-backend-disk/src/volume/threads.rs: reads and writes between addresses
crates/lmc-backend-disk/src/volume/uring.rs: operations are handed to the kernel
crates/lmc-key/src/bytes.rs: tokens as the bytes that are hashed
crates/lmc-memory/src/arena/map.rs: mlock, mbind, set_mempolicy
crates/lmc-memory/src/arena/tests.rs: looks at memory through the system
crates/lmc-memory/src/checksum.rs: vector instructions, chosen when it runs
crates/lmc-memory/src/copy/stream.rs: stores that go around the cache
crates/lmc-memory/src/copy/team.rs: copies are handed to threads
crates/lmc-memory/src/copy/testing.rs: paged memory for tests
crates/lmc-memory/src/copy/workers.rs: copies between addresses, shared out among threads
crates/lmc-memory/src/cuda/counter.rs: a counter in another process's memory
crates/lmc-memory/src/cuda/counts.rs: a number that a GPU writes into memory of the host
crates/lmc-memory/src/cuda/driver.rs: calls of the CUDA driver
crates/lmc-memory/src/cuda/gpus.rs: memory and streams of an engine that this process is
crates/lmc-memory/src/cuda/lane.rs: runs for a GPU, memory that it writes
crates/lmc-memory/src/cuda/pinned.rs: the pool, registered with the driver
crates/lmc-memory/src/cuda/tests/faults.rs: the default stream of this process
crates/lmc-memory/src/cuda/tests/own.rs: calls of the driver as an engine makes them
crates/lmc-memory/src/pool/slot.rs: a slot is its range of the arena
crates/lmc-memory/src/pool/slot_bytes.rs: a slot's bytes as a slice
crates/lmc-memory/src/segment.rs: another process's memory, mapped
crates/lmc-memory/src/sigbus.rs: a handler for pages that another process took away
crates/lmc-memory/tests/it/sealed.rs: a descriptor is passed over a socket and mapped
crates/lmc-transfer/examples/transfer_speed/nixl.rs: NIXL asks where the arena lies
crates/lmc-transfer/examples/transfer_speed/stream.rs: options of a socket that the standard library does not set
crates/lmc-transfer/src/net/raw.rs: system calls on sockets
crates/lmc-transfer/src/socket/window.rs: sockets receive into the arena and send from it
crates/lmc-transfer/src/nixl/agent.rs: the arena as NIXL asks for it
crates/lmc-transfer/src/nixl/library.rs: dlopen
crates/lmc-memory/examples/copy_speed.rs: memcpy to compare with
crates/lmc-vllm-adapter/src/adapters/mover.rs: slots of the pool as slices, for one copy
crates/lmc-vllm-adapter/src/adapters/tensors.rs: an engine's tensors, by their addresses
crates/lmc-vllm-adapter/src/adapters/worker.rs: a stream of an engine, by its address
crates/lmc-vllm-adapter/src/transport/passing.rs: an option of sockets that libraries do not know
crates/lmc-vllm-adapter/src/transport/pidfd.rs: pidfd_open, poll
crates/lmc-vllm-adapter/tests/it/on_gpu.rs: calls of the driver as an engine makes them
crates/lmc-server/tests/it/containers.rs: tensors of an engine in the test
crates/lmc-vllm-adapter/tests/it/common/engine.rs: tensors of an engine in the test, and fork
crates/lmc-server/src/bench/mapped.rs: shared memory as an engine's worker maps it
crates/lmc-server/src/start/descriptors.rs: descriptors are kept from programs
crates/lmc-server/src/nixl.rs: variables that UCX reads, set before any thread starts
crates/lmc-server/src/pool_size.rs: sysconf and its friends
python/src/worker.rs: tensors whose memory the engine keeps
crates/lmc-testkit/src/cpu.rs: the clock of a thread's CPU time
crates/lmc-testkit/src/process.rs: signals to a program under test
crates/lmc-fake-cuda/src/abi.rs: pointers of programs that call the fake
crates/lmc-fake-cuda/src/driver.rs: bytes of device memory
crates/lmc-fake-cuda/src/memory.rs: copies between addresses, memory of the host that is registered
crates/lmc-fake-cuda/src/shared.rs: atomics in memory that processes share
crates/lmc-fake-cuda/src/stream.rs: copies between addresses, after checks
crates/lmc-fake-cuda/tests/it/cuda.rs: calls of the driver
crates/lmc-backend-local/tests/support/counting_alloc.rs: an allocator that counts
";

const FORMS: [&str; 5] = [
    "unsafe {",
    "unsafe fn ",
    "unsafe impl",
    "unsafe extern",
    "unsafe trait",
];

/// Unsafe code stays where it is expected.
pub(crate) fn expected(tree: &Tree, findings: &mut Findings) {
    let paths = || {
        EXPECTED
            .lines()
            .filter_map(|line| line.split_once(": "))
            .map(|(path, _)| path)
    };
    for file in tree.with_ending("rs") {
        let found = file.text.lines().position(holds);
        let listed = paths().any(|path| path == file.path);
        match (found, listed) {
            (Some(index), false) => findings.faults.push(format!(
                "{}: unsafe code in a file that xtask/src/tidy/unsafe_code.rs does not list",
                file.at(index)
            )),
            (None, true) => findings.faults.push(format!(
                "{} holds no unsafe code any more; take it out of xtask/src/tidy/unsafe_code.rs",
                file.path
            )),
            _ => {}
        }
    }
    for path in paths() {
        if tree.file(path).is_none() {
            findings.faults.push(format!(
                "xtask/src/tidy/unsafe_code.rs lists {path}, which does not exist"
            ));
        }
    }
}

fn holds(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or_default();
    // In a string, as in the list above, it is followed by a quote.
    FORMS.iter().any(|form| {
        code.match_indices(form)
            .any(|(at, _)| !code[..at].ends_with('"'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsafe_code_in_comments_is_left_out() {
        // The word is put together here, or this file would break its own rule.
        let word = "unsafe";
        assert!(holds(&format!("    let x = {word} {{ y }};")));
        assert!(holds(&format!("{word} impl Send for X {{}}")));
        assert!(!holds("// unsafe { }"));
        assert!(!holds("    \"unsafe {\","));
        assert!(!holds("unsafe_op_in_unsafe_fn = 1"));
    }
}
