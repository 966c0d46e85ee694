"""Daemons that serve HTTP on a port of their own."""

from collections.abc import Iterator

import pytest

from tests.daemon.serving import Daemon, daemon_left_clean


@pytest.fixture(scope="module")
def web() -> Iterator[Daemon]:
    """A ready daemon with HTTP on a free port, shared by tests that break nothing."""
    with daemon_left_clean("--http-listen", "127.0.0.1:0") as daemon:
        yield daemon
