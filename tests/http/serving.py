"""Daemons that serve HTTP, and clients of it."""

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.daemon.serving import Daemon

SECONDS = 30.0


def port_of(daemon: Daemon) -> int:
    """The TCP port that the kernel chose, from the log."""
    found = re.search(r"http://127\.0\.0\.1:(\d+)", daemon.log.read_text())
    assert found, daemon.log.read_text()
    return int(found[1])


@contextmanager
def over_unix(daemon: Daemon) -> Iterator[httpx.Client]:
    """A client on the Unix socket."""
    transport = httpx.HTTPTransport(uds=str(daemon.runtime_dir / "http.sock"))
    with httpx.Client(transport=transport, base_url="http://kvd", timeout=SECONDS) as client:
        yield client


@contextmanager
def over_tcp(daemon: Daemon) -> Iterator[httpx.Client]:
    """A client on the TCP port."""
    with httpx.Client(base_url=f"http://127.0.0.1:{port_of(daemon)}", timeout=SECONDS) as client:
        yield client


def idle_connection(daemon: Daemon) -> socket.socket:
    """A connection on which nothing is sent."""
    return socket.create_connection(("127.0.0.1", port_of(daemon)), timeout=SECONDS)
