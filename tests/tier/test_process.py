"""A tier's process, started as the broker starts it."""

import fcntl
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from kvd.wire.tiering import TIERING, BeginTier, StopTier, TierFailed, TierPing, TierPong, TierReady
from kvd_proto.channel import Channel
from kvd_proto.messages import Message
from tests.daemon.serving import finding_doubles
from tests.processes import python
from tests.tier.kills import run
from tests.waiting import PATIENCE

POOL_BYTES = 2**20


class Process:
    """`python -m kvd.tier` and the broker's end of its link."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        with theirs:
            number = theirs.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvd.tier", str(number)],
                pass_fds=[number],
                env=finding_doubles(),
                stderr=subprocess.PIPE,
                text=True,
            )
        self.link = Channel(ours, b"ROUTER")
        self.pool = os.memfd_create("kvd-test-pool")
        os.ftruncate(self.pool, POOL_BYTES)

    def begin(self, setting: str) -> Message:
        """Say what it is; its first message."""
        order = BeginTier(
            index=1, setting=setting, pool_bytes=POOL_BYTES, log_level="info", log_style="json"
        )
        self.link.send(TIERING.encode(order), (self.pool,))
        return self.receive()

    def receive(self) -> Message:
        """The next message."""
        while (received := self.link.receive()) is None:
            assert self.link.more or select.select([self.link], [], [], PATIENCE)[0]
        return TIERING.decode(received[0])[1]

    def locked(self) -> bool:
        """Whether the next daemon would wait for the pool."""
        with Path(f"/proc/self/fd/{self.pool}").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def end(self) -> tuple[int, str]:
        """Its exit status and its log, once it has ended."""
        _, log = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, log

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.end()
        self.link.close()
        os.close(self.pool)


@pytest.fixture
def process() -> Iterator[Process]:
    """A process that has no order yet."""
    with Process() as started:
        yield started


def test_its_life(process: Process) -> None:
    """It serves, holds the pool's lock as long as it lives, and ends with status 0 when told."""
    ready = process.begin("memory:,size=1MiB,keep=all")
    assert isinstance(ready, TierReady), ready
    assert (ready.pid, ready.total_bytes) == (process.process.pid, 2**20)
    assert process.locked()
    process.link.send(TIERING.encode(TierPing()))
    assert isinstance(process.receive(), TierPong)
    process.link.send(TIERING.encode(StopTier()))
    code, log = process.end()
    assert code == 0
    assert "test double" in log
    assert not process.locked()


def test_the_brokers_end(process: Process) -> None:
    """It ends when the broker closes its link, with and without an order before."""
    process.begin("memory:,size=1MiB")
    process.link.close()
    assert process.end()[0] == 0
    with Process() as other:
        other.link.close()
        assert other.end()[0] == 0


@pytest.mark.parametrize(
    ("setting", "needle"),
    [
        ("memory:,size=much", "size=much"),
        ("cloud:here", "no tier is called cloud"),
        ("nothing", "is no tier"),
    ],
)
def test_a_setting_that_cannot_work(process: Process, setting: str, needle: str) -> None:
    """It says why it does not serve, and ends with status 1."""
    failed = process.begin(setting)
    assert isinstance(failed, TierFailed)
    assert needle in failed.error
    assert process.end()[0] == 1


def test_what_it_imports() -> None:
    """The process with a disk behind it imports no torch, click, zmq or HTTP server."""
    code = (
        "import sys, kvd.tier.service, kvd.tier.disk\n"
        "print(sorted({'torch', 'click', 'zmq', 'uvicorn', 'mooncake'} & set(sys.modules)))"
    )
    done = python("-c", code)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize("kills", [2, pytest.param(8, marks=pytest.mark.nightly)])
def test_what_was_acknowledged_survives_kills(kills: int) -> None:
    """Kills of daemon and tier: no wrong byte, no kept chunk is lost, no cleared one comes back."""
    tally = run(kills, seed=17)
    assert not tally.violations
    assert tally.daemon_kills + tally.tier_kills == kills
    assert tally.found_again >= tally.acknowledged > 0
    assert tally.corrupt == 0
