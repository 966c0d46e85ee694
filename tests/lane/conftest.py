from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvd.lane.cuda.backend import CudaOptions
from kvd_proto.directory import SlotState
from tests.fakecuda.harness import FakeCuda
from tests.lane.cuda_rig import CudaRig, CudaWorkers, MakeRig, TestDriver, load, switched
from tests.lane.support import LAYOUT, SLOTS, Directory, FakeWorker, Lane

POOL_BYTES = 8 * 2**20


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[Lane]:
    """A real lane process with an 8 MiB pool."""
    with Lane(tmp_path, POOL_BYTES) as running:
        yield running


@pytest.fixture
def directory() -> Directory:
    """All slots WRITING at generation 1, owned by engine 7."""
    table = Directory(SLOTS)
    table.set(range(SLOTS), SlotState.WRITING)
    return table


@pytest.fixture
def worker(lane: Lane, directory: Directory) -> FakeWorker:
    """A worker with two tensors of 32 pages of 4 KiB, bound."""
    return lane.attach(FakeWorker(LAYOUT), directory)


@pytest.fixture(scope="session")
def loaded_driver(fakecuda: FakeCuda, tmp_path_factory: pytest.TempPathFactory) -> TestDriver:
    """The test driver in this process: what is loaded under the driver's name is found first."""
    return load(fakecuda, tmp_path_factory.mktemp("cuda") / "calls.log")


@pytest.fixture
def fake_driver(loaded_driver: TestDriver) -> Iterator[TestDriver]:
    """The test driver, without delays and failures before and after the test."""
    loaded_driver.reset()
    yield loaded_driver
    loaded_driver.reset()


@pytest.fixture(scope="session")
def process_with_memory(loaded_driver: TestDriver) -> Iterator[CudaWorkers]:
    """Another process, which makes device memory."""
    with switched(loaded_driver.environment):
        workers = CudaWorkers()
    yield workers
    workers.close()


@pytest.fixture
def cuda_workers(process_with_memory: CudaWorkers) -> Iterator[CudaWorkers]:
    """The same; what a test has made is not kept for the tests after it."""
    yield process_with_memory
    process_with_memory.free()


@pytest.fixture
def make_rig(fake_driver: TestDriver, cuda_workers: CudaWorkers) -> Iterator[MakeRig]:
    """Makes backends with these options, which are closed with the test."""
    with ExitStack() as stack:

        def make(options: CudaOptions, **how: Any) -> CudaRig:
            rig = CudaRig(fake_driver, cuda_workers, options, **how)
            stack.callback(rig.close)
            return rig

        yield make
