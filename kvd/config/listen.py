"""Where the daemon listens for HTTP, as an operator writes it."""

import ipaddress
from dataclasses import dataclass

from kvd.errors import ConfigError

OFF = "off"


@dataclass(frozen=True, slots=True)
class Listen:
    """A host and a TCP port; port 0 lets the kernel choose."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_listen(text: str) -> Listen | None:
    """``HOST:PORT`` or ``[IPv6]:PORT``; None for ``off``.

    Raises:
        ConfigError: anything else.
    """
    if text == OFF:
        return None
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or (":" in bare and bare == host):
        raise ConfigError(
            f"http_listen = {text!r}: not an address; give HOST:PORT such as 127.0.0.1:9330,"
            " [::1]:9330, or off"
        )
    if not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise ConfigError(
            f"http_listen = {text!r}: {port!r} is no port; give a number from 0 to 65535"
            " (0 lets the kernel choose)"
        )
    return Listen(bare, int(port))


def is_address(host: str) -> bool:
    """Whether `host` is an IP address and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_everywhere(host: str) -> bool:
    """Whether `host` stands for every interface of the machine."""
    return is_address(host) and ipaddress.ip_address(host).is_unspecified
