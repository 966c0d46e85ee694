"""Every call of the driver fails once: a clear error, nothing left behind, no other byte touched.

Which calls there are is read from the test driver's log of runs without failures; that these
make every call that the driver's module names is a test too.
"""

import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvd.errors import DeviceLost, ImportFailed, LaneError
from kvd.lane.cuda import copies, driver
from kvd.lane.cuda.backend import CudaOptions
from kvd.lane.device import Direction
from kvd.machine import cuda
from tests.fakecuda.harness import FakeCuda, functions_named
from tests.lane.cuda_checks import SIZES, options
from tests.lane.cuda_memory import CudaWorkers
from tests.lane.cuda_rig import POOL_BYTES, CudaRig, TestDriver, load
from tests.lane.device_contract import drain, pattern
from tests.processes import python

pytestmark = pytest.mark.fakecuda

INJECTED = "CUDA_ERROR_NOT_SUPPORTED"
CODE = 801
UNKNOWN = 99999  # of which the bindings raise ValueError
OPTIONS = CudaOptions(registration_bytes=2**19)
# What the driver's module may call and the lives below do not, and why that is no gap.
ELSEWHERE = {
    "cuStreamQuery": "test_a_stream_that_cannot_be_asked_is_asked_again",
    "cuDeviceGetUuid_v2": "the same call, as bindings older than CUDA 13 name it",
}
# A driver with all that kvd uses, and one without batches.
DRIVERS = ("driver_version=13000", "driver_version=12040")
# What is made by the one is undone by the other; for device memory also the mapping.
PAIRS = [
    ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease"),
    ("cuMemHostRegister", "cuMemHostUnregister"),
    ("cuStreamCreateWithPriority", "cuStreamDestroy"),
    ("cuEventCreate", "cuEventDestroy"),
    ("cuMemAlloc", "cuMemFree"),
    ("cuIpcOpenMemHandle", "cuIpcCloseMemHandle"),
    ("cuMemImportFromShareableHandle", "cuMemRelease"),
    ("cuMemAddressReserve", "cuMemAddressFree"),
    ("cuMemMap", "cuMemUnmap"),
]
# Asked again and again until something has happened.
POLLED = {"cuEventQuery"}
RUNS = [(0, 0, 8192, 4096), (1, 64, 20000, 1000)]
STORED = np.zeros(POOL_BYTES, np.bool_)
for _, _, at, size in RUNS:
    STORED[at : at + size] = True


class Life:
    """A lane's life with one worker of each kind of memory: what went wrong, in words."""

    def __init__(self, fake_driver: TestDriver, workers: list[CudaWorkers]) -> None:
        self.errors: list[str] = []
        self.moved = 0
        try:
            rig = CudaRig(fake_driver, workers[0], OPTIONS)
        except LaneError as error:
            self.errors.append(str(error))
            return
        for each in workers:
            rig.workers = each
            self._serve(rig)
        self._try(rig.close)

    def _serve(self, rig: CudaRig) -> None:
        source = rig.make_worker(SIZES)
        rig.put(source, 0, 0, pattern(SIZES[0], 1))
        rig.put(source, 1, 0, pattern(SIZES[1], 2))
        rig.put_pool(0, np.full(POOL_BYTES, 0xAB, np.uint8))
        try:
            memory = rig.device.import_memory(source.handles, SIZES, source.descriptors)
        except ImportFailed as error:
            self.errors.append(str(error))
            return
        for number, direction in enumerate((Direction.STORE, Direction.LOAD)):
            rig.submit(number, memory, direction, RUNS)
            done = drain(rig.device)[number]
            assert (done.arrived_bytes == 0) == bool(done.error)
            if done.error:
                self.errors.append(done.error)
                continue
            self.moved += 1
            assert done.nanoseconds > 0
            for storage, offset, at, size in RUNS:
                np.testing.assert_array_equal(
                    rig.get_pool(at, size), rig.get(source, storage, offset, size)
                )
        untouched = rig.get_pool(0, POOL_BYTES)[~STORED]
        assert (untouched == 0xAB).all()
        self._try(lambda: rig.device.release_memory(memory))

    def _try(self, what: Callable[[], None]) -> None:
        try:
            what()
        except LaneError as error:
            self.errors.append(str(error))


@pytest.fixture
def lives(
    fake_driver: TestDriver, ipc_workers: CudaWorkers, vmm_workers: CudaWorkers
) -> dict[str, Counter[str]]:
    """By driver: how often a lane's life without failures makes each call."""
    made = {}
    for setting in DRIVERS:
        fake_driver.set(setting)
        before = fake_driver.mark
        life = Life(fake_driver, [ipc_workers, vmm_workers])
        assert (life.errors, life.moved) == ([], 4)
        made[setting] = Counter(fake_driver.calls(before))
    return made


def test_every_function_that_is_named_is_made_to_fail(lives: dict[str, Counter[str]]) -> None:
    """A call that is new in the driver's module is in a life, as below, or is explained."""
    functions = set().union(*map(functions_named, (cuda, driver, copies)))
    assert {"cuInit", "cuMemAlloc"} <= functions  # they are found at all
    # Called by address and not by name.
    assert ["cuMemcpyBatchAsync" in lives[setting] for setting in DRIVERS] == [True, False]
    assert "cuMemcpyAsync" in lives[DRIVERS[1]]
    called = set().union(*lives.values())
    assert functions - called == ELSEWHERE.keys() - called


@pytest.mark.parametrize("code", [CODE, UNKNOWN])
def test_every_call_may_fail_once(
    fake_driver: TestDriver,
    ipc_workers: CudaWorkers,
    vmm_workers: CudaWorkers,
    lives: dict[str, Counter[str]],
    code: int,
) -> None:
    """Whichever call fails, bytes are right or their transfer failed, and all is undone."""
    whole, plain = (lives[setting] for setting in DRIVERS)
    assert all(made in whole and undone in whole for made, undone in PAIRS)
    # The lives differ in how they copy.
    for setting, calls in ((DRIVERS[0], whole), (DRIVERS[1], plain - whole)):
        for name, count in calls.items():
            if name.startswith("@"):
                continue
            for number in range(1, 1 + (1 if name in POLLED else count)):
                fake_driver.reset()
                fake_driver.set(setting)
                fail(fake_driver, [ipc_workers, vmm_workers], name, number, code)
                for workers in (ipc_workers, vmm_workers):
                    workers.forget()


def fail(
    fake_driver: TestDriver, workers: list[CudaWorkers], name: str, number: int, code: int
) -> None:
    """A life in which this call fails."""
    fake_driver.set(f"fail={name}:{number}:{code}")
    before = fake_driver.mark
    try:
        life = Life(fake_driver, workers)
    except BaseException as error:
        raise AssertionError(f"call {number} of {name} fails: {error}") from error
    seen = Counter(fake_driver.calls(before))
    fake_driver.set("fail=")
    where = f"call {number} of {name} fails: {life.errors}"
    assert all(str(code) in text for text in life.errors), where
    assert life.errors or life.moved == 4, where
    for made, undone in PAIRS:
        assert seen[made] - (made == name) == seen[undone], f"{where}; {made} {seen}"


def test_a_stream_that_cannot_be_asked_is_asked_again(
    fake_driver: TestDriver, ipc_workers: CudaWorkers
) -> None:
    """A transfer whose event failed ends when its stream is idle, also if that is told late."""
    rig = CudaRig(fake_driver, ipc_workers, options())
    try:
        memory, source = rig.attach(SIZES)
        rig.put(source, 0, 0, pattern(4096, 1))
        before = fake_driver.mark
        fake_driver.set(f"fail=cuEventRecord:1:{CODE},cuStreamQuery:1:{CODE}")
        rig.submit(1, memory, Direction.STORE, [(0, 0, 0, 4096)])
        assert INJECTED in drain(rig.device)[1].error
        assert fake_driver.calls(before).count("cuStreamQuery") >= 2
        np.testing.assert_array_equal(rig.get_pool(0, 4096), pattern(4096, 1))
    finally:
        rig.close()


def test_a_lost_device_ends_the_lane(fakecuda: FakeCuda, tmp_path: Path) -> None:
    """A copy that cost the context is an error of the lane, not of its transfer alone."""
    fakecuda.check(lose_the_device, str(fakecuda.library), str(tmp_path / "log"))


def lose_the_device(library: str, log: str) -> None:
    """A process of its own: nothing works in it afterwards."""
    workers = CudaWorkers(ipc=True, library=Path(library))
    fake_driver = load(FakeCuda(Path(library)), Path(log))
    rig = CudaRig(fake_driver, workers, options())
    memory, source = rig.attach(SIZES)
    fake_driver.set("fail=@copy:1:700")
    rig.submit(1, memory, Direction.STORE, [(0, 0, 0, 4096)])
    with pytest.raises(DeviceLost):
        drain(rig.device)
    with pytest.raises(DeviceLost):
        rig.device.import_memory(source.handles, SIZES, source.descriptors)
    os._exit(0)


def test_a_driver_that_is_older_than_the_bindings_serves_and_is_named(
    fakecuda: FakeCuda, tmp_path: Path
) -> None:
    """CUDA 12.0 to 12.7: copies go one by one, and a line names the driver to install."""
    said = fakecuda.check(
        live_on_an_old_driver, str(fakecuda.library), str(tmp_path / "log"), DRIVER_VERSION=12000
    )
    assert "it is for CUDA 12.0, and only from 12.8 on" in said
    assert "(driver 570) are many fragments copied in one call" in said


def test_a_driver_from_12_8_on_lacks_nothing(fakecuda: FakeCuda) -> None:
    """The lowest driver that has all that kvd uses starts without a word."""
    assert fakecuda.check(start_and_tell, DRIVER_VERSION=12080) == "12080 ''\n"


def start_and_tell() -> None:
    """A process of its own: the version, and what is missing."""
    cuda.start()
    print(cuda.version(), repr(cuda.version_warning()))


def live_on_an_old_driver(library: str, log: str) -> None:
    """A process of its own: the bindings look for functions once."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout, force=True)
    workers = CudaWorkers(ipc=True, library=Path(library))
    life = Life(load(FakeCuda(Path(library)), Path(log)), [workers])
    assert (life.errors, life.moved) == ([], 2)


@pytest.mark.parametrize(
    ("switches", "words"),
    [
        (
            {"DRIVER_VERSION": 11080},
            r"is too old: it is for CUDA 11\.8.*12\.0 or newer \(driver 525\)",
        ),
        ({"DEVICES": 0}, "the CUDA driver sees no device"),
    ],
    ids=["too old", "no device"],
)
def test_a_driver_that_cannot_serve_is_named_with_the_remedy(
    fakecuda: FakeCuda, switches: dict[str, object], words: str
) -> None:
    """The lane does not start, and says which driver to install or where to look."""
    done = fakecuda.run(start_and_tell, **switches)
    assert done.returncode
    assert re.search(f"CudaMissing: .*{words}", done.stderr)


def test_a_daemon_without_the_bindings_names_the_package() -> None:
    """Without cuda-bindings the modules load all the same, and a device's lane says what to do."""
    code = (
        "import sys; sys.modules['cuda'] = None\n"
        "import kvd.lane.loop, kvd.lane.cuda.backend\n"
        "from kvd.machine import cuda\n"
        "cuda.start()"
    )
    done = python("-c", code)
    assert "CudaMissing: a CUDA device needs the package cuda-bindings" in done.stderr
    assert "pip install cuda-bindings" in done.stderr
