"""The TCP address that the broker binds and keeps for the HTTP process, which it may replace."""

import errno
import socket

from kvd.config.values import Listen
from kvd.errors import AddressUnavailable, ConfigError

BACKLOG = 128


def bind_tcp(listen: Listen) -> socket.socket:
    """Return a non-blocking listening socket for the setting `http_listen`.

    Raises:
        ConfigError: the address cannot be bound; the text has the remedy.
        AddressUnavailable: likewise, and it may be free or there later.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(
            f"http_listen = {listen}: no such host ({error}); use an address of this machine,"
            " such as 127.0.0.1:9330, or off"
        ) from error
    listener = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror
        if error.errno == errno.EADDRINUSE:
            reason = f"the port is in use (ss -ltnp 'sport = :{listen.port}' shows by whom)"
        passes = error.errno in {errno.EADDRINUSE, errno.EADDRNOTAVAIL}
        raise (AddressUnavailable if passes else ConfigError)(
            f"http_listen = {listen}: {reason}; choose another with --http-listen HOST:PORT, or"
            " --http-listen off"
        ) from error
    listener.setblocking(False)  # the socket API's own form
    return listener
