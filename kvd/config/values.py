"""How an operator writes an address to listen on, and a list of users or groups."""

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvd.errors import ConfigError

_MAX_ID = 2**32 - 2


@dataclass(frozen=True, slots=True)
class Listen:
    """A host and a TCP port; port 0 lets the kernel choose."""

    host: str
    port: int

    @property
    def everywhere(self) -> bool:
        """Whether the host stands for every interface of the machine."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:  # a name
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_listen(text: str) -> Listen | None:
    """Parse ``HOST:PORT`` or ``[IPv6]:PORT``; return None for ``off``.

    Raises:
        ConfigError: anything else.
    """
    if text == "off":
        return None
    try:
        parts = urlsplit(f"//{text}")
        if parts.netloc == text and parts.hostname and parts.port is not None and "@" not in text:
            return Listen(parts.hostname, parts.port)
    except ValueError:  # brackets around no address, or no port
        pass
    raise ConfigError(
        "not an address; give HOST:PORT such as 127.0.0.1:9330 or [::1]:9330 (port 0 lets the"
        " kernel choose, 65535 is the highest), or off"
    )


def names_in(text: str) -> list[str]:
    """Return the items of a list of names or numbers with commas between; none for no text.

    Whether the names exist is asked where the daemon runs.

    Raises:
        ConfigError: an item is empty, or a number out of range.
    """
    if not text.strip():
        return []
    items = [item.strip() for item in text.split(",")]
    for item in items:
        if not item or (item.isdecimal() and int(item) > _MAX_ID):
            raise ConfigError(
                f"{item!r} is neither a name nor a number; give names or numbers with commas"
                " between, or nothing"
            )
    return items
