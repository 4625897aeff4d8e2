"""A TCP proxy between an engine and the server that can kill the server at a chosen message."""

import contextlib
import socket
import threading

GREETING = 64
MORE, LONG, COMMAND = 1, 2, 4

# LMCache's numbers of the two operations that begin a retrieve.
RETRIEVE, PREPARE_RETRIEVE = b"\x07", b"\x12"


def messages(sock):
    """The parts of one side of a ZMTP 3 stream, as they come: bytes to forward, and the
    operation where the part ends a message of an engine, otherwise None."""
    buffer = bytearray()

    def take(size):
        while len(buffer) < size:
            more = sock.recv(1 << 16)
            if not more:
                raise EOFError
            buffer.extend(more)
        taken = bytes(buffer[:size])
        del buffer[:size]
        return taken

    yield take(GREETING), None
    raw, frames = b"", []
    while True:
        flags = take(1)
        length = take(8 if flags[0] & LONG else 1)
        body = take(int.from_bytes(length, "big"))
        raw += flags + length + body
        if flags[0] & COMMAND:
            yield raw, None
        else:
            frames.append(body)
            if flags[0] & MORE:
                continue
            yield raw, frames[1] if len(frames) > 1 else None
        raw, frames = b"", []


class Proxy:
    """Forwards connections to `upstream`. Once armed, calls `strike` at the first message that
    begins a retrieve, and neither forwards that message nor keeps any connection."""

    def __init__(self, port, upstream, strike):
        self.port = port
        self.upstream = upstream
        self.strike = strike
        self.armed = False
        self.struck = None
        self.pairs = []
        self.listener = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.upstream), 5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            self.pairs.append((client, server))
            for work in (self.requests, self.replies):
                threading.Thread(target=work, args=(client, server), daemon=True).start()

    def requests(self, client, server):
        with contextlib.suppress(OSError, EOFError):
            for raw, operation in messages(client):
                if self.armed and operation in (RETRIEVE, PREPARE_RETRIEVE):
                    self.armed = False
                    self.strike()
                    self.struck = operation
                    self.cut()
                    return
                server.sendall(raw)
        self.close(client, server)

    def replies(self, client, server):
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                client.sendall(data)
        self.close(client, server)

    def cut(self):
        for pair in self.pairs:
            self.close(*pair)

    def close(self, *sockets):
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def stop(self):
        self.listener.close()
        self.cut()


class CutShort(Proxy):
    """Forwards bytes as they are. Once `left` is a number, forwards that many bytes of the
    upstream's, calls `strike`, and keeps no connection."""

    def __init__(self, port, upstream, strike):
        self.left = None
        self.lock = threading.Lock()
        super().__init__(port, upstream, strike)

    def requests(self, client, server):
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                server.sendall(data)
        self.close(client, server)

    def replies(self, client, server):
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 12):
                with self.lock:
                    if self.struck:
                        break
                    if self.left is not None:
                        self.left -= len(data)
                        if self.left < 0:
                            self.strike()
                            self.struck = True
                            self.cut()
                            break
                client.sendall(data)
        self.close(client, server)
