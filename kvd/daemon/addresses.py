"""Addresses that the broker binds and keeps, for processes that it starts and replaces."""

import contextlib
import errno
import socket
import stat
from pathlib import Path

from kvd.config.values import Listen
from kvd.errors import ConfigError
from kvd.wire.listener import Listener

BACKLOG = 128


def bind_tcp(listen: Listen, setting: str = "http_listen") -> socket.socket:
    """Return a listening socket, not blocking.

    Args:
        listen: the address.
        setting: whose value that is.

    Raises:
        ConfigError: the address cannot be had, with the remedy.
    """
    shown, form, example = f"{listen}", "HOST:PORT", "127.0.0.1:9330"
    if setting != "http_listen":
        shown, form, example = f"tcp://{listen}", "tcp://HOST:PORT", "tcp://127.0.0.1:5557"
    flag = "--" + setting.replace("_", "-")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(
            f"{setting} = {shown}: no such host ({error}); use an address of this machine,"
            f" such as {example}, or off"
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
        raise ConfigError(
            f"{setting} = {shown}: {reason}; choose another with {flag} {form}, or {flag} off"
        ) from error
    listener.setblocking(False)  # the socket API's own form
    return listener


def bind_unix(path: Path, setting: str) -> Listener:
    """Return a listening socket; one that nobody listens at any more is replaced.

    Raises:
        ConfigError: the path cannot be had, with the remedy.
    """
    remedy = f"choose another with --{setting.replace('_', '-')} ipc:///PATH"
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"{setting} = ipc://{path}: what lies there is no socket; {remedy}")
        if _listened_at(path):
            raise ConfigError(
                f"{setting} = ipc://{path}: another process listens there"
                f" (ss -lxp 'src = {path}' shows which); {remedy}"
            )
        path.unlink(missing_ok=True)
    try:
        return Listener(path)
    except ConfigError as error:
        reason = error.__cause__.strerror if isinstance(error.__cause__, OSError) else error
        raise ConfigError(f"{setting} = ipc://{path}: {reason}; {remedy}") from error


def _listened_at(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a queue that is full is somebody's
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True
