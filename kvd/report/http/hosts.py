"""Which Host headers are answered.

A web page from elsewhere can point a name of its own at this machine (DNS
rebinding); the browser would then let it read what is served here. The Host
header gives it away: it carries that name.
"""

import ipaddress
import socket

from kvd.config.values import Listen

_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})


class Hosts:
    """The Host headers that a TCP listener answers.

    Args:
        host: what the operator told kvd to listen on. For every interface, the
            machine's name is answered, and each address in figures: those
            cannot be rebound.
    """

    def __init__(self, host: str) -> None:
        self._any_address = Listen(host, 0).everywhere
        self._names = _LOCAL | {host.lower()}
        if self._any_address:
            self._names |= {socket.gethostname().lower()}

    def allow(self, header: str) -> bool:
        """Whether a Host header, with or without a port, is one of ours."""
        name = header.strip().lower()
        if name.startswith("["):
            name = name[1:].partition("]")[0]
        elif name.count(":") == 1:
            name = name.partition(":")[0]
        return name in self._names or (self._any_address and _is_address(name))

    def __repr__(self) -> str:
        more = " and every address" if self._any_address else ""
        return f"<Hosts {', '.join(sorted(self._names))}{more}>"


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
