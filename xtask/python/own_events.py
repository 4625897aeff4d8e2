"""KV events of lmc's own connector: what vLLM publishes of the chunks that ranks have stored."""

import threading

from checks import check, free_port
from harness import CHUNK, eventually, prompts

MEDIUM = "CPU"


class Subscriber:
    """Takes the events that an engine with `--events PORT` publishes."""

    def __init__(self):
        self.port = free_port()
        # Of chunks in lmc's server, and of blocks in vLLM's prefix cache; in the order they came.
        self.stored, self.own = [], []
        # That vLLM has taken the subscription: what it published before is lost.
        self.joined = threading.Event()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.listen, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()

    def listen(self):
        import msgspec
        import zmq

        with zmq.Context() as context, context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            socket.connect(f"tcp://127.0.0.1:{self.port}")
            while not self.ended.is_set():
                if not self.joined.is_set() and monitor.poll(0):
                    self.joined.set()
                if not socket.poll(100):
                    continue
                *_, batch = socket.recv_multipart()
                for event in msgspec.msgpack.decode(batch)[1]:
                    if event["type"] == "BlockStored":
                        (self.stored if event.get("medium") == MEDIUM else self.own).append(event)
            socket.disable_monitor()
            monitor.close(0)

    def join(self):
        if not self.joined.wait(30):
            raise RuntimeError(f"no publisher of events at port {self.port}")

    def check(self, name, engine, batch):
        """Checks that each chunk of these prompts, which the engine has computed, is published
        once. Returns the events."""
        wanted = [ids[at : at + CHUNK]
                  for ids in batch for at in range(0, len(ids) - CHUNK + 1, CHUNK)]

        def all_came():
            # vLLM publishes in its steps; this prompt is too short to be stored.
            engine.generate([[1] * 20])
            return len(self.stored) >= len(wanted)

        eventually(all_came)
        published = list(self.stored)
        check(f"{name}: each stored chunk is published once, with its tokens",
              sorted(event["token_ids"] for event in published) == sorted(wanted),
              str([len(event["token_ids"]) for event in published]))
        check(f"{name}: they name vLLM's blocks",
              all(len(event["block_hashes"]) * event["block_size"] == CHUNK
                  for event in published))
        last = {event["block_hashes"][-1] for event in published}
        starts = [event for event in published if event["parent_block_hash"] is None]
        check(f"{name}: each but the first of a prompt follows another's last block",
              len(starts) == len(batch) and all(event["parent_block_hash"] in last
                                                for event in published if event not in starts))
        return published


def events(run):
    """Each chunk that was stored is published once, by its blocks."""
    if run.args.peer or not run.args.package:
        return
    batch = prompts(60, 700, 300)
    with Subscriber() as subscriber:
        engine = run.engine("events", connector="lmc", prefix_caching=True,
                            events=subscriber.port).ready()
        subscriber.join()
        for ids in batch * 2:
            engine.generate([ids])
        published = subscriber.check("events", engine, batch)
        own = {hash for event in subscriber.own for hash in event["block_hashes"]}
        check("events: block hashes are spelled as vLLM's own events do",
              bool(own) and own >= {hash for event in published for hash in event["block_hashes"]})
        engine.kill()
    run.nothing_held("events")
