"""Fixtures of the client's tests: a fake daemon, a scheduler, a registered worker."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd_client import (
    Fingerprint,
    GroupSpec,
    HostMemory,
    RankLayout,
    Scheduler,
    TensorRef,
    TensorSpec,
    Worker,
)
from tests.client.fake_daemon import FakeDaemon
from tests.waiting import DEADLINE, eventually

LAYOUT = RankLayout(
    num_blocks=8,
    blocks_per_chunk=2,
    hash_block_size=16,
    storages=(8 * 512,),
    tensors=(TensorSpec(storage=0, offset=0, page_bytes=512, block_stride=512),),
    groups=(GroupSpec(refs=(TensorRef(tensor=0, page_bytes=512),), block_size=16),),
)
FINGERPRINT = Fingerprint(model="tiny")


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
def hasty(daemon: FakeDaemon) -> Iterator[Scheduler]:
    """A connected scheduler with a short deadline, for a daemon that is about to freeze."""
    with Scheduler(daemon.runtime_dir, "engine", deadline=0.5) as one:
        eventually(lambda: one.connected)
        yield one


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
