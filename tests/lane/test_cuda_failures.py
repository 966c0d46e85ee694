"""Every call of the driver fails once: a clear error, nothing left behind, no other byte touched.

The test driver's log of runs without failures says which calls there are.
"""

import logging
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from kvd.errors import ImportFailed, LaneError
from kvd.lane.cuda import copies, driver
from kvd.lane.cuda.backend import CudaOptions
from kvd.lane.device import Direction
from kvd.machine import cuda
from tests.fakecuda.harness import FakeCuda, functions_named
from tests.lane.cuda_checks import SIZES
from tests.lane.cuda_rig import POOL_BYTES, CudaRig, CudaWorkers, MakeRig, TestDriver, load
from tests.lane.device_contract import drain, pattern
from tests.processes import python

pytestmark = pytest.mark.fakecuda

CODE = 801  # CUDA_ERROR_NOT_SUPPORTED
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


def live(fake_driver: TestDriver, workers: CudaWorkers) -> tuple[list[str], int]:
    """A lane's life with one worker of each kind of memory: its errors, and how many jobs moved."""
    errors: list[str] = []
    num_moved = 0
    try:
        rig = CudaRig(fake_driver, workers, OPTIONS)
    except LaneError as error:
        return [str(error)], 0
    for ipc in (True, False):
        rig.ipc = ipc
        source = rig.make_worker(SIZES)
        rig.put(source, 0, 0, pattern(SIZES[0], 1))
        rig.put(source, 1, 0, pattern(SIZES[1], 2))
        rig.put_pool(0, np.full(POOL_BYTES, 0xAB, np.uint8))
        try:
            memory = rig.device.import_memory(source.handles, SIZES, source.descriptors)
        except ImportFailed as error:
            errors.append(str(error))
            continue
        for number, direction in enumerate((Direction.STORE, Direction.LOAD)):
            rig.submit(number, memory, direction, RUNS)
            done = drain(rig.device)[number]
            assert (done.arrived_bytes == 0) == bool(done.error)
            if done.error:
                errors.append(done.error)
                continue
            num_moved += 1
            assert done.nanoseconds > 0
            for storage, offset, at, size in RUNS:
                np.testing.assert_array_equal(
                    rig.get_pool(at, size), rig.get(source, storage, offset, size)
                )
        untouched = rig.get_pool(0, POOL_BYTES)[~STORED]
        assert (untouched == 0xAB).all()
        try:
            rig.device.release_memory(memory)
        except LaneError as error:
            errors.append(str(error))
    try:
        rig.close()
    except LaneError as error:
        errors.append(str(error))
    return errors, num_moved


@pytest.fixture
def lives(fake_driver: TestDriver, cuda_workers: CudaWorkers) -> dict[str, Counter[str]]:
    """By driver: how often a lane's life without failures makes each call."""
    counts = {}
    for setting in DRIVERS:
        fake_driver.set(setting)
        before = fake_driver.mark
        assert live(fake_driver, cuda_workers) == ([], 4)
        counts[setting] = Counter(fake_driver.calls(before))
    return counts


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
    cuda_workers: CudaWorkers,
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
                live_through_a_failure(fake_driver, cuda_workers, name, number, code)
                cuda_workers.free()


def live_through_a_failure(
    fake_driver: TestDriver, workers: CudaWorkers, name: str, number: int, code: int
) -> None:
    """A life in which this call fails."""
    fake_driver.set(f"fail={name}:{number}:{code}")
    before = fake_driver.mark
    try:
        errors, num_moved = live(fake_driver, workers)
    except BaseException as error:
        raise AssertionError(f"call {number} of {name} fails: {error}") from error
    calls = Counter(fake_driver.calls(before))
    fake_driver.set("fail=")
    where = f"call {number} of {name} fails: {errors}"
    assert all(str(code) in text for text in errors), where
    assert errors or num_moved == 4, where
    for made, undone in PAIRS:
        assert calls[made] - (made == name) == calls[undone], f"{where}; {made} {calls}"


def test_a_stream_that_cannot_be_asked_is_asked_again(
    fake_driver: TestDriver, make_rig: MakeRig
) -> None:
    """A transfer whose event failed ends when its stream is idle, also if that is seen late."""
    rig = make_rig(OPTIONS)
    memory, source = rig.attach(SIZES)
    rig.put(source, 0, 0, pattern(4096, 1))
    before = fake_driver.mark
    fake_driver.set(f"fail=cuEventRecord:1:{CODE},cuStreamQuery:1:{CODE}")
    rig.submit(1, memory, Direction.STORE, [(0, 0, 0, 4096)])
    assert "CUDA_ERROR_NOT_SUPPORTED" in drain(rig.device)[1].error
    assert fake_driver.calls(before).count("cuStreamQuery") >= 2
    np.testing.assert_array_equal(rig.get_pool(0, 4096), pattern(4096, 1))


@pytest.mark.parametrize(
    ("switches", "words"),
    [
        ({"DRIVER_VERSION": 12080}, r"^\(\[\], 4\)\n$"),
        (
            {"DRIVER_VERSION": 12000},
            r"for CUDA 12\.0, and only from 12\.8 on \(driver 570\)(.*\n)+\(\[\], 4\)",
        ),
        (
            {"DRIVER_VERSION": 11080},
            r"CudaMissing: .*is too old: it is for CUDA 11\.8.*12\.0 or newer \(driver 525\)",
        ),
        ({"DEVICES": 0}, "CudaMissing: .*the CUDA driver sees no device"),
    ],
    ids=["12.8", "12.0", "too old", "no device"],
)
def test_a_driver_serves_or_is_named_with_the_remedy(
    fakecuda: FakeCuda, tmp_path: Path, switches: dict[str, object], words: str
) -> None:
    """The lowest that has all that kvd uses serves without a word, an older one is named."""
    log = str(tmp_path / "calls.log")
    done = fakecuda.run(live_and_tell, str(fakecuda.library), log, **switches)
    assert done.returncode == int("CudaMissing" in words)
    assert re.search(words, done.stdout + done.stderr)


def live_and_tell(library: str, log: str) -> None:
    """A process of its own: the bindings look for functions once."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout, force=True)
    workers = CudaWorkers(Path(library))
    print(live(load(FakeCuda(Path(library)), Path(log)), workers))


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
