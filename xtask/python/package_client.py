"""A stock client of a packaged server: real vLLM with LMCache's connector, next to the server.

Its processes, its network and its /dev/shm are those of the machine, and its files are those of the
environment of setup.sh. It runs as root, as vLLM does in its image: only root and the server's user can
map the pool.
"""

import contextlib
import itertools
import os
import threading

from checks import check
from harness import LENGTHS, Engine, eventually, expected_hits, prompts, script_folder

PORT = 5555
# A mount of one namespace cannot be mounted in another; a link into it can be followed.
INSIDE = """
mount -t proc proc /proc
mount -t tmpfs tmpfs /mnt
for device in null zero full random urandom tty; do
    touch "/mnt/$device"
    mount --bind "/dev/$device" "/mnt/$device"
done
ln -s /proc/self/fd /mnt/fd
ln -s /proc/1/root/dev/shm /mnt/shm
mount --move /mnt /dev
exec "$@"
"""


@contextlib.contextmanager
def client(machine):
    """A vLLM that starts; `None` where it cannot be had."""
    folder = script_folder("setup.sh", "a stock client is served")
    if folder is None:
        yield None
        return
    Engine.python = os.path.join(folder, "bin", "python")
    engine = Engine("stock", os.path.join(folder, "model"), port=PORT, prefix=[
        "nsenter", "--target", str(machine.process), "--net", "--ipc", "--pid", "unshare", "--mount",
        "sh", "-euc", INSIDE, "client"])
    try:
        yield engine
    finally:
        engine.kill()


def served(engine, what, seed):
    """Prompts that are computed, and then loaded. Returns what was answered."""
    computed, cached = engine.generate(prompts(seed, *LENGTHS))
    check(f"{what}: vLLM computes prompts that are not stored", cached == [0] * len(LENGTHS),
          str(cached))
    found(engine, what, seed, computed)
    return computed


def found(engine, what, seed, computed):
    """Prompts that were computed before are loaded, and the answers are the same."""
    loaded, cached = engine.generate(prompts(seed, *LENGTHS))
    check(f"{what}: vLLM loads them, whole chunks at a time", cached == expected_hits(*LENGTHS),
          str(cached))
    check(f"{what}: its greedy answers are those that it computed", loaded == computed)


class Work:
    """Requests without a pause: prompts that are new, and prompts whose answers are known."""

    def __init__(self, engine, seed, known):
        self.engine, self.seed, self.known = engine, seed, known
        self.answers, self.wrong = {}, 0
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        for seed in itertools.count(100):
            if self.stopping.is_set():
                return
            self.answers[seed], _ = self.engine.generate(prompts(seed, *LENGTHS), settle=False)
            again, _ = self.engine.generate(prompts(self.seed, *LENGTHS), settle=False)
            self.wrong += again != self.known

    def await_batches(self, count):
        """Waits until this number of further batches is answered. Returns true if they were."""
        wanted = len(self.answers) + count
        return eventually(lambda: len(self.answers) >= wanted or not self.thread.is_alive()) \
            and self.thread.is_alive()

    def end(self):
        """Ends the requests, and computes the new prompts of all batches again."""
        self.stopping.set()
        self.thread.join()
        check("every answer to a known prompt was right", not self.wrong,
              f"{self.wrong} of {len(self.answers)} batches")
        # The engine notices that the server is another by what it stores next.
        again = eventually(lambda: any(self.engine.generate(prompts(99, *LENGTHS))[1]))
        check("the client goes on: it stores and loads", again)
        same = [self.engine.generate(prompts(seed, *LENGTHS))[0] == ids
                for seed, ids in self.answers.items()]
        check("prompts from before, during and after get the same answers again", all(same),
              f"{sum(same)} of {len(same)} batches")
