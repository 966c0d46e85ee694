"""Every call of the driver fails once: a clear error, nothing left behind, no other byte touched.

Which calls there are is read from the test driver's log of a run without failures.
"""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvd.errors import CudaError, ImportFailed, LaneError
from kvd.lane.cuda import driver
from kvd.lane.cuda.binding import is_lost
from kvd.lane.cuda.copier import Thresholds
from kvd.lane.cuda.device import Options
from kvd.lane.device import Direction
from tests.fakecuda.harness import FakeCuda
from tests.lane.cuda_checks import SIZES, engine_only, submit
from tests.lane.cuda_memory import CudaWorkers
from tests.lane.cuda_rig import POOL_BYTES, CudaRig, TestDriver, load
from tests.lane.device_contract import drain, pattern

pytestmark = pytest.mark.fakecuda

INJECTED = "CUDA_ERROR_NOT_SUPPORTED"
CODE = 801
OPTIONS = Options(registration_bytes=2**19, thresholds=Thresholds(3000, 3000))
# What is made by the one is undone by the other; for device memory also the mapping.
PAIRS = [
    ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease"),
    ("cuMemHostRegister", "cuMemHostUnregister"),
    ("cuStreamCreateWithPriority", "cuStreamDestroy"),
    ("cuEventCreate", "cuEventDestroy"),
    ("cuMemAlloc", "cuMemFree"),
    ("cuModuleLoadData", "cuModuleUnload"),
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
            rig.use(each)
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
            submit(rig, number, memory, direction, RUNS)
            done = drain(rig.device)[number]
            assert (done.nbytes == 0) == bool(done.error)
            if done.error:
                self.errors.append(done.error)
                continue
            self.moved += 1
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


def test_every_call_may_fail_once(
    fake_driver: TestDriver, ipc_workers: CudaWorkers, vmm_workers: CudaWorkers
) -> None:
    """Whichever call fails, bytes are right or their transfer failed, and all is undone."""
    workers = [ipc_workers, vmm_workers]
    before = fake_driver.mark
    life = Life(fake_driver, workers)
    assert (life.errors, life.moved) == ([], 4)
    calls = Counter(fake_driver.calls(before))
    assert all(made in calls and undone in calls for made, undone in PAIRS)
    for name, count in calls.items():
        if name.startswith("@"):
            continue
        for number in range(1, 1 + (1 if name in POLLED else count)):
            fake_driver.reset()
            fake_driver.set(f"fail={name}:{number}:{CODE}")
            before = fake_driver.mark
            try:
                life = Life(fake_driver, workers)
            except BaseException as error:
                raise AssertionError(f"call {number} of {name} fails: {error}") from error
            seen = Counter(fake_driver.calls(before))
            fake_driver.set("fail=")
            where = f"call {number} of {name} fails: {life.errors}"
            assert all(INJECTED in text for text in life.errors), where
            assert life.errors or life.moved == 4, where
            for made, undone in PAIRS:
                assert seen[made] - (made == name) == seen[undone], f"{where}; {made} {seen}"


def test_a_lost_device_ends_the_lane(fakecuda: FakeCuda, tmp_path: Path) -> None:
    """An error that cost the context is raised, where others would be a transfer's own."""
    for setting in (
        "fail=@copy:1:700",
        "fail=cuMemcpyBatchAsync:1:719",
        "fail=cuEventRecord:2:700",
    ):
        fakecuda.check(lose_the_device, str(fakecuda.library), str(tmp_path / "log"), setting)


def lose_the_device(library: str, log: str, setting: str) -> None:
    """A process of its own: nothing works in it afterwards."""
    fake_driver = load(FakeCuda(Path(library)), Path(log))
    rig = CudaRig(fake_driver, CudaWorkers(ipc=True), engine_only())
    memory, source = rig.attach(SIZES)
    fake_driver.set(setting)
    submit(rig, 1, memory, Direction.STORE, [(0, 0, 0, 4096)])
    with pytest.raises(CudaError) as lost:
        drain(rig.device)
    assert is_lost(lost.value)
    with pytest.raises(CudaError):
        rig.device.import_memory(source.handles, SIZES, source.descriptors)
    os._exit(0)


def test_a_machine_without_a_driver_is_told_what_to_do(fakecuda: FakeCuda) -> None:
    """Without libcuda.so.1 the error names it and the remedy."""
    environment = fakecuda.environment()
    del environment["LD_LIBRARY_PATH"]
    code = "from kvd.lane.cuda import driver; driver.start()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if done.returncode == 0:
        pytest.skip("this machine has a driver")
    assert "CudaMissing: libcuda.so.1 cannot be loaded" in done.stderr
    assert "install the NVIDIA driver" in done.stderr


def test_a_machine_without_devices_is_told_where_to_look(fakecuda: FakeCuda) -> None:
    """A driver that sees no device: the error names the variables that hide devices."""
    done = fakecuda.run(see_nothing, DEVICES=0)
    assert "CudaMissing: the CUDA driver sees no device" in done.stderr


def see_nothing() -> None:
    """Start the driver."""
    driver.start()


def test_a_daemon_without_the_bindings_names_the_package() -> None:
    """Without cuda-bindings the modules load all the same, and a device's lane says what to do."""
    code = (
        "import sys; sys.modules['cuda'] = None\n"
        "import kvd.lane.__main__, kvd.lane.cuda.device\n"
        "from kvd.lane.cuda import driver\n"
        "driver.start()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert "CudaMissing: a CUDA device needs the package cuda-bindings" in done.stderr
    assert "kvd-offload[cuda]" in done.stderr
