"""How an operator writes where KV events are published: ZeroMQ endpoints."""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from kvd.config.values import Listen, parse_listen
from kvd.errors import ConfigError

EVENTS_NEED = (
    "tcp://HOST:PORT such as tcp://127.0.0.1:5557, ipc:///PATH, connect: before either for an"
    " indexer that listens itself, or off"
)
REPLAY_NEEDS = "tcp://HOST:PORT such as tcp://127.0.0.1:5558, ipc:///PATH, or off"
_TCP, _IPC, _CONNECT = "tcp://", "ipc://", "connect:"
_MAX_PATH_BYTES = 107  # sockaddr_un holds 108 with the final zero


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where kvd listens, or what it connects to.

    Attributes:
        at: a TCP address, or the path of a Unix socket.
        connects: kvd connects to it; else it listens there.
    """

    at: Listen | Path
    connects: bool = False

    @property
    def address(self) -> str:
        """As ZeroMQ writes it."""
        return f"{_TCP}{self.at}" if isinstance(self.at, Listen) else f"{_IPC}{self.at}"

    def __str__(self) -> str:
        return f"{_CONNECT if self.connects else ''}{self.address}"


Parsed: TypeAlias = Endpoint | None


def parse_events(text: str) -> Parsed:
    """Parse the setting `events`; return None for ``off``.

    Raises:
        ConfigError: it names no endpoint; the text says what does.
    """
    if text == "off":
        return None
    address = text.removeprefix(_CONNECT)
    at = _place(address, EVENTS_NEED)
    connects = address != text
    if connects and isinstance(at, Listen) and (at.everywhere or not at.port):
        raise ConfigError(
            f"{at} is no address to connect to; give the indexer's, such as"
            " connect:tcp://indexer:5557"
        )
    return Endpoint(at, connects)


def parse_replay(text: str) -> Parsed:
    """Parse the setting `events_replay`; return None for ``off``.

    Raises:
        ConfigError: it names no endpoint; the text says what does.
    """
    return None if text == "off" else Endpoint(_place(text, REPLAY_NEEDS))


def _place(address: str, needs: str) -> Listen | Path:
    if address.startswith(_IPC):
        path = Path(address.removeprefix(_IPC))
        if path.is_absolute() and len(bytes(path)) <= _MAX_PATH_BYTES and "\0" not in str(path):
            return path
        raise ConfigError(
            f"a Unix socket needs an absolute path of at most {_MAX_PATH_BYTES} bytes, such as"
            " ipc:///run/kvd/events.sock"
        )
    if address.startswith(_TCP):
        host_port = address.removeprefix(_TCP)
        if host_port.startswith("*:"):  # as vLLM and ZeroMQ write every interface
            host_port = f"0.0.0.0:{host_port[2:]}"
        try:
            listen = parse_listen(host_port)
        except ConfigError:
            listen = None
        if listen is not None:
            return listen
    raise ConfigError(f"not an endpoint; give {needs}")
