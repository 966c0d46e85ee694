"""The CUDA backend keeps the contract of devices, on a test driver that is no GPU."""

from collections.abc import Iterator

import pytest

from kvd.errors import ImportFailed
from kvd.lane.devices.cuda import driver
from kvd.lane.devices.cuda.backend import Options
from kvd.lane.devices.device import Direction
from kvd_proto.messages import HostHandle, VmmHandle
from tests.fakecuda.cudatensor import GRANULARITY
from tests.lane.cuda_checks import by_kernel, engine_only
from tests.lane.cuda_memory import CudaWorkers
from tests.lane.cuda_rig import CudaRig, TestDriver
from tests.lane.device_contract import DeviceContract, Rig, drain, transfer

pytestmark = pytest.mark.fakecuda

SIZES = DeviceContract.SIZES


# Seed, a switch, whether memory has descriptors, and the backend's options: copies in batches, as
# a driver for CUDA 12.8 has them, and one by one, as without them; short runs by the kernel.
BACKENDS: dict[str, tuple[int, str, bool, Options]] = {
    "batches": (1, "any=random", False, engine_only()),
    "single copies": (2, "fail=cuMemcpyBatchAsync:*:801", True, engine_only()),
    "kernel": (3, "any=late", False, by_kernel(3000)),
    "older batches": (4, "driver_version=12080", False, engine_only()),
}


class TestCudaDevice(DeviceContract):
    """The CUDA backend keeps the contract, under adversarial timing, however it copies."""

    @pytest.fixture(params=BACKENDS)
    def rig(
        self,
        request: pytest.FixtureRequest,
        fake_driver: TestDriver,
        ipc_workers: CudaWorkers,
        vmm_workers: CudaWorkers,
    ) -> Iterator[Rig]:
        """A backend of its own, with a pool that is registered in many pieces."""
        seed, setting, by_descriptor, options = BACKENDS[request.param]
        fake_driver.set(f"seed={seed}")
        fake_driver.set(setting)
        made = CudaRig(fake_driver, vmm_workers if by_descriptor else ipc_workers, options)
        batch = made.cuda.copier.batch
        assert (batch is None) == (request.param == "single copies")
        assert batch is None or batch.tells_index == (request.param == "older batches")
        yield made
        made.close()


@pytest.fixture
def rig(fake_driver: TestDriver, ipc_workers: CudaWorkers) -> Iterator[CudaRig]:
    """A backend with little room."""
    made = CudaRig(fake_driver, ipc_workers, engine_only(bytes_in_flight=10_000))
    yield made
    made.close()


def test_storages_of_one_allocation_are_opened_once(rig: CudaRig) -> None:
    """Two storages in one allocation and a third elsewhere: two handles opened, two closed."""
    before = rig.driver.mark
    memory, _ = rig.attach((4096, 4096, 4096))
    assert rig.driver.calls(before).count("cuIpcOpenMemHandle") == 2
    rig.device.release_memory(memory)
    assert rig.driver.calls(before).count("cuIpcCloseMemHandle") == 2


def test_a_mapping_is_held_against_what_is_claimed(
    rig: CudaRig, vmm_workers: CudaWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that maps less than was asked for does not make the rest usable."""
    source = vmm_workers.make((4096,))
    before = rig.driver.mark
    with monkeypatch.context() as patch:
        patch.setattr(driver, "address_range", lambda address: (address, 4096))
        with pytest.raises(ImportFailed, match=r"2097152 bytes .* claimed, it has 4096"):
            rig.device.import_memory(source.handles, (4096,), source.descriptors)
    assert rig.driver.calls(before).count("cuMemUnmap") == 1


@pytest.mark.parametrize(
    ("nbytes", "words", "reserved"),
    [
        (2**50, "1125899906842624 bytes is claimed, the device has", 0),
        (2 * GRANULARITY, "mapping 4194304 bytes", 1),
    ],
    ids=["the device", "the allocation"],
)
def test_no_more_is_mapped_than_there_is_in(
    rig: CudaRig, vmm_workers: CudaWorkers, nbytes: int, words: str, reserved: int
) -> None:
    """A claim above what the device has, or the allocation: nothing stays mapped or reserved."""
    source = vmm_workers.make((4096,))
    (handle,) = source.handles
    assert isinstance(handle, VmmHandle)
    before = rig.driver.mark
    claim = VmmHandle(handle.fd_index, nbytes, handle.offset)
    with pytest.raises(ImportFailed, match=words):
        rig.device.import_memory((claim,), (4096,), source.descriptors)
    calls = rig.driver.calls(before)
    for name in ("cuMemAddressReserve", "cuMemAddressFree", "cuMemRelease"):
        assert calls.count(name) == reserved


def test_host_memory_is_refused(rig: CudaRig) -> None:
    """A handle of another kind of memory is refused by name."""
    with pytest.raises(ImportFailed, match="HostHandle is host memory"):
        rig.device.import_memory((HostHandle(0),), (1,), (0,))


def test_an_empty_transfer_ends(rig: CudaRig) -> None:
    """A transfer without runs is reported like any other."""
    memory, _ = rig.attach(SIZES)
    rig.device.submit(transfer(1, memory, Direction.LOAD, []))
    assert drain(rig.device)[1].error == ""


def test_the_kernel_is_timed_against_the_copy_engine(
    fake_driver: TestDriver, ipc_workers: CudaWorkers
) -> None:
    """Without a length to go by it is launched more than there and back, to see that it works."""
    before = fake_driver.mark
    CudaRig(fake_driver, ipc_workers, Options(registration_bytes=65536)).close()
    assert fake_driver.calls(before).count("cuLaunchKernel") > 2
