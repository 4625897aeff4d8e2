"""Settings in `kv_connector_extra_config`."""

from collections.abc import Mapping
from dataclasses import dataclass

HOST = "lmc.host"
PORT = "lmc.port"
SOCKET = "lmc.socket"
IDENTITY = "lmc.identity"
HASH_MODE = "lmc.hash_mode"
COPY_THREADS = "lmc.copy_threads"

KNOWN = (HOST, PORT, SOCKET, IDENTITY, HASH_MODE, COPY_THREADS)


@dataclass(frozen=True, slots=True)
class Settings:
    """Checked settings, with their defaults."""

    # `local`: /run/lmc/lmc.sock where it is there, else 127.0.0.1:5555; looked at when connecting.
    endpoint: str = "local"
    # Text that keeps chunks of engines apart that lmc could not tell from each other.
    identity: str = ""
    # Chunks are named by vLLM's block hashes instead of by their tokens.
    hash_mode: bool = True
    copy_threads: int = 1

    @classmethod
    def read(cls, extra: Mapping[str, object]) -> "Settings":
        """Checks the entries that begin with `lmc.`; others are not ours.

        Raises `ValueError` with all that is wrong.
        """
        wrong = [
            f"{key} is not a setting of lmc; the settings are {', '.join(KNOWN)}"
            for key in extra
            if isinstance(key, str) and key.startswith("lmc.") and key not in KNOWN
        ]
        if SOCKET in extra and (HOST in extra or PORT in extra):
            wrong.append(f"{SOCKET} excludes {HOST} and {PORT}")

        def get(key: str, kind: type, default: object) -> object:
            value = extra.get(key, default)
            # A bool is an int in Python, but `"lmc.port": true` is a mistake.
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                wrong.append(f"{key} must be a {kind.__name__}, found {value!r}")
                return default
            return value

        host, port = get(HOST, str, "127.0.0.1"), get(PORT, int, 5555)
        threads = get(COPY_THREADS, int, 1)
        if not 1 <= port <= 65535:  # type: ignore[operator]
            wrong.append(f"{PORT} must be 1 to 65535, found {port}")
        if not 1 <= threads <= 64:  # type: ignore[operator]
            wrong.append(f"{COPY_THREADS} must be 1 to 64, found {threads}")
        socket = get(SOCKET, str, "")
        host = str(host).removeprefix("tcp://")
        if socket:
            endpoint = f"ipc://{socket}"
        elif HOST in extra or PORT in extra:
            endpoint = f"tcp://{host}:{port}"
        else:
            endpoint = "local"
        settings = cls(
            endpoint=endpoint,
            identity=str(get(IDENTITY, str, "")),
            hash_mode=bool(get(HASH_MODE, bool, True)),
            copy_threads=threads,  # type: ignore[arg-type]
        )
        if wrong:
            raise ValueError("kv_connector_extra_config: " + "; ".join(wrong))
        return settings
