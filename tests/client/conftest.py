"""Fixtures of the client's tests: a fake daemon, a scheduler, a registered worker."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvd_client import (
    Fingerprint,
    HostMemory,
    Scheduler,
    Worker,
    attachment,
    connection,
    session,
)
from tests.client.fake_daemon import SECONDS, FakeDaemon
from tests.layouts import flat_layout
from tests.waiting import DEADLINE

LAYOUT = flat_layout(512, factor=2, null_block=0)
FINGERPRINT = Fingerprint(model="tiny")


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    """A test that stands still is not taken for a daemon or an engine that does."""
    with pytest.MonkeyPatch.context() as patch:  # a test's own patches are taken back first
        patch.setattr(connection, "HANDSHAKE_SECONDS", SECONDS)
        patch.setattr(attachment, "OVERDUE_SECONDS", 3600.0)
        yield


@pytest.fixture
def runtime_dir(runtime_dir: Path) -> Path:
    """The runtime directory, made already: no daemon of these tests' makes it."""
    runtime_dir.mkdir(mode=0o700)
    return runtime_dir


@pytest.fixture
def daemon(runtime_dir: Path) -> Iterator[FakeDaemon]:
    """A fake daemon that serves."""
    with FakeDaemon(runtime_dir) as fake:
        yield fake


@pytest.fixture
def scheduler(daemon: FakeDaemon) -> Iterator[Scheduler]:
    """A connected scheduler."""
    with Scheduler(daemon.runtime_dir, "engine", deadline=DEADLINE) as one:
        yield one


@pytest.fixture
def stepping(daemon: FakeDaemon) -> Iterator[Scheduler]:
    """A connected scheduler that tells what it has decided at the end of a step."""
    with Scheduler(daemon.runtime_dir, "engine", deadline=DEADLINE, steps=True) as one:
        yield one


@pytest.fixture
def quiet(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scheduler]:
    """A connected scheduler that says nothing by itself, for a daemon that is about to freeze."""
    monkeypatch.setattr(session, "REPORT_SECONDS", 3600.0)
    with Scheduler(daemon.runtime_dir, "engine", deadline=DEADLINE) as one:
        assert one.connected
        yield one


@contextmanager
def frozen(daemon: FakeDaemon, scheduler: Scheduler) -> Iterator[None]:
    """In here the daemon answers nothing, and the scheduler does not wait for it for long."""
    daemon.freeze()
    scheduler.deadline = 0.2
    try:
        yield
    finally:
        scheduler.deadline = DEADLINE
        daemon.thaw()


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    """The storage of `LAYOUT`."""
    one = HostMemory.allocate(LAYOUT.storages[0])
    yield one
    one.close()


@pytest.fixture
def worker(daemon: FakeDaemon, memory: HostMemory) -> Iterator[Worker]:
    """A registered worker."""
    with Worker(daemon.runtime_dir, "engine", 0, 1, deadline=DEADLINE) as one:
        assert one.register([memory], LAYOUT, FINGERPRINT)
        yield one
