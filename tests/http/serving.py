"""Daemons that serve HTTP, and clients of it."""

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tests.daemon.serving import Daemon
from tests.waiting import eventually

SECONDS = 30.0
# How long the broker may take to answer a probe, in tests that are not about that.
PATIENT = "timeout=30"


def port_of(daemon: Daemon) -> int:
    """The TCP port that the kernel chose, from the log."""
    said = daemon.wait_log("http://127.0.0.1:").split("http://127.0.0.1:")[1]
    return int(re.split(r"\D", said, maxsplit=1)[0])


@contextmanager
def over_unix(daemon: Daemon) -> Iterator[httpx.Client]:
    """A client on the Unix socket."""
    transport = httpx.HTTPTransport(uds=str(daemon.runtime_dir / "http.sock"))
    with httpx.Client(transport=transport, base_url="http://kvd", timeout=SECONDS) as client:
        yield client


@contextmanager
def over_tcp(daemon: Daemon) -> Iterator[httpx.Client]:
    """A client on the TCP port; no proxy stands between them."""
    url = f"http://127.0.0.1:{port_of(daemon)}"
    with httpx.Client(base_url=url, timeout=SECONDS, trust_env=False) as client:
        yield client


def report_of(client: httpx.Client) -> dict[str, Any]:
    """/status, as soon as the broker answers in time."""
    answer = eventually(lambda: client.get("/status"), lambda answer: answer.status_code == 200)
    report: dict[str, Any] = answer.json()
    return report


def idle_connection(daemon: Daemon, receive_buffer: int = 0) -> socket.socket:
    """A connection on which nothing is sent; its buffer for answers is small if asked."""
    client = socket.socket()
    if receive_buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(SECONDS)
    client.connect(("127.0.0.1", port_of(daemon)))
    return client
