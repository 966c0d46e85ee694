"""Daemons that serve HTTP on a port of their own."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.serving import Daemon, started_daemons


@pytest.fixture(scope="module")
def web() -> Iterator[Daemon]:
    """A ready daemon with HTTP on a free port, shared by tests that only read."""
    with (
        tempfile.TemporaryDirectory(prefix="kvd-", dir="/tmp") as path,
        started_daemons(Path(path) / "run") as start,
    ):
        yield start("--http-listen", "127.0.0.1:0")
