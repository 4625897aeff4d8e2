"""Settings in `kv_connector_extra_config`."""

from collections.abc import Mapping
from dataclasses import dataclass

SERVER = "lmc.server"
IDENTITY = "lmc.identity"
HASH_MODE = "lmc.hash_mode"
COPY_THREADS = "lmc.copy_threads"
WEIGHTS = "lmc.weights"
EARLY = "lmc.lookup_on_arrival"
TAILS = "lmc.tails"
MIN_LOAD = "lmc.min_load_tokens"

KNOWN = (SERVER, IDENTITY, WEIGHTS, HASH_MODE, TAILS, MIN_LOAD, EARLY, COPY_THREADS)
# Prefix of the settings of a server that the connector starts.
SERVE = "lmc.serve."


@dataclass(frozen=True, slots=True)
class Settings:
    """Checked settings, with their defaults."""

    # `local` means the server of this host, which is found when connecting.
    endpoint: str = "local"
    # A server is started if none answers.
    starts: bool = True
    # Flags of a server that is started.
    serve_flags: tuple[str, ...] = ()
    # Text that separates the chunks of engines that lmc could not distinguish.
    identity: str = ""
    # Name of the weights, or `@` and the path of a file with the name.
    weights: str = ""
    # Chunks are named by vLLM's block hashes instead of by their tokens.
    hash_mode: bool = True
    # The whole blocks after a request's last whole chunk are kept too.
    tails: bool = True
    # Fewer tokens than this are computed instead of loaded.
    min_load_tokens: int = 64
    # A request is looked up when it arrives instead of when it is scheduled for the first time.
    lookup_on_arrival: bool = False
    copy_threads: int = 1

    @classmethod
    def read(cls, extra: Mapping[str, object]) -> "Settings":
        """Checks the entries that begin with `lmc.`; other entries are not ours.

        Raises `ValueError` with all problems.
        """
        wrong = [
            f"{key} is not a setting of lmc; the settings are {', '.join(KNOWN)}, and {SERVE}NAME "
            "for settings of `lmc serve`"
            for key in extra
            if isinstance(key, str)
            and key.startswith("lmc.")
            and key not in KNOWN
            and not key.startswith(SERVE)
        ]

        def get(key: str, kind: type, default: object) -> object:
            value = extra.get(key, default)
            # A bool is an int in Python, but `"lmc.copy_threads": true` is a mistake.
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                wrong.append(f"{key} must be a {kind.__name__}, found {value!r}")
                return default
            return value

        least = get(MIN_LOAD, int, 64)
        if least < 1:  # type: ignore[operator]
            wrong.append(f"{MIN_LOAD} must be 1 or more, found {least}")
        threads = get(COPY_THREADS, int, 1)
        if not 1 <= threads <= 64:  # type: ignore[operator]
            wrong.append(f"{COPY_THREADS} must be 1 to 64, found {threads}")
        server = str(get(SERVER, str, "auto"))
        flags = [_flag(key, extra[key]) for key in sorted(filter(_is_serve, extra))]
        wrong += [flag for flag in flags if not flag.startswith("--")]
        if flags and server != "auto":
            wrong.append(
                f"{SERVE}… are settings of a server that the connector starts, and {SERVER} is "
                f"{server!r}: set them at that server"
            )
        if server in ("auto", "local"):
            endpoint = "local"
        elif server.startswith("/"):
            endpoint = f"ipc://{server}"
        else:
            endpoint = server
            if not server.startswith(("tcp://", "ipc://")):
                wrong.append(
                    f"{SERVER} must be auto, local, tcp://HOST:PORT or the path of a Unix socket, "
                    f"found {server!r}"
                )
        settings = cls(
            endpoint=endpoint,
            starts=server == "auto",
            serve_flags=tuple(flags),
            identity=str(get(IDENTITY, str, "")),
            weights=str(get(WEIGHTS, str, "")),
            hash_mode=bool(get(HASH_MODE, bool, True)),
            tails=bool(get(TAILS, bool, True)),
            min_load_tokens=least,  # type: ignore[arg-type]
            lookup_on_arrival=bool(get(EARLY, bool, False)),
            copy_threads=threads,  # type: ignore[arg-type]
        )
        if wrong:
            raise ValueError("kv_connector_extra_config: " + "; ".join(wrong))
        return settings


def _is_serve(key: object) -> bool:
    return isinstance(key, str) and key.startswith(SERVE)


def _flag(key: str, value: object) -> str:
    """Returns the flag of `lmc serve`, or a text with the problem."""
    name = key.removeprefix(SERVE)
    if name.startswith("no-"):
        return f'{key}: write "{SERVE}{name.removeprefix("no-")}": false'
    if not name or not isinstance(value, str | int | float):
        return f"{key} must be a text, a number or a bool, found {value!r}"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"--{name}={text}"
