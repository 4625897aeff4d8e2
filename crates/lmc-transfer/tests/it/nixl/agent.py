"""An agent of NIXL's own Python package, for the test in scenarios.rs.

Prints `NAME ADDRESS BYTES METADATA` of its memory (metadata in hex), and reads
`NAME OBJECT TARGET METADATA` of the other's: reads 100,000 bytes there into its own first 100,000,
and writes its next 100,000 to the target. Then it reads the bytes, in hex, that the other has
written to its memory from byte 3 on.
"""

import os
import sys
import time

os.environ.setdefault("UCX_MODULES", "^efa")

import numpy as np
from nixl_cu12 import nixl_agent, nixl_agent_config

SIZE = 100_000


def main():
    agent = nixl_agent("a-python-agent", nixl_agent_config())
    memory = np.zeros(2 * SIZE, dtype=np.uint8)
    memory[SIZE:] = np.arange(SIZE) * 7 % 251
    base = memory.ctypes.data
    agent.register_memory([(base, memory.nbytes, 0, "")], "DRAM")
    metadata = agent.get_agent_metadata().hex()
    print("a-python-agent", base, memory.nbytes, metadata, flush=True)

    name, source, target, metadata = sys.stdin.readline().split()
    found = agent.add_remote_agent(bytes.fromhex(metadata))
    found = found.decode() if isinstance(found, bytes) else found
    assert found == name, (found, name)
    move(agent, "READ", base, int(source), name)
    move(agent, "WRITE", base + SIZE, int(target), name)
    print("moved", flush=True)

    written = bytes.fromhex(sys.stdin.readline())
    arrived = memory[3 : 3 + len(written)].tobytes()
    print("right" if written and arrived == written else "wrong", flush=True)
    # Until the other side has said what it has to say.
    sys.stdin.read()


def move(agent, operation, local, remote, name):
    ours = agent.get_xfer_descs([(local, SIZE, 0)], "DRAM")
    theirs = agent.get_xfer_descs([(remote, SIZE, 0)], "DRAM")
    handle = agent.initialize_xfer(operation, ours, theirs, name)
    state = agent.transfer(handle)
    deadline = time.monotonic() + 30
    while state == "PROC":
        assert time.monotonic() < deadline, f"{operation} did not end"
        time.sleep(0.001)
        state = agent.check_xfer_state(handle)
    assert state == "DONE", state
    agent.release_xfer_handle(handle)


main()
