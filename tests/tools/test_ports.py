"""The port on which an engine of a demo will serve."""

import socket
from pathlib import Path

import pytest

from kvd_tools.sglang_engine import PORTS, free_port

GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_nobody_is_given_the_port_before_the_server_takes_it() -> None:
    """It is free, and none of those that the system gives to connections and other servers."""
    lowest_given = int(GIVEN.read_text(encoding="ascii").split()[0])
    assert max(PORTS) < lowest_given
    port = free_port()
    assert port in PORTS
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))


def test_a_port_that_is_taken_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one is, of those that are left."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        port = taken.getsockname()[1]
        monkeypatch.setattr("kvd_tools.sglang_engine.PORTS", range(port, port + 10))
        assert port not in {free_port() for _ in range(100)}
