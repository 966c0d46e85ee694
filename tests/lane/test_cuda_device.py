"""The CUDA backend keeps the contract of devices, on a test driver that is no GPU."""

import os
import pwd
import random
from pathlib import Path

import numpy as np
import pytest

from kvd.errors import CudaMissing, ImportFailed
from kvd.lane.cuda import driver
from kvd.lane.cuda.backend import (
    MAX_IN_FLIGHT,
    CudaOptions,
    bind_near_device,
    show_mig_slice,
)
from kvd.lane.cuda.copies import BatchCopy
from kvd.lane.device import Direction
from kvd.lane.workers import WorkerTable
from kvd.pool.geometry import FillOrder
from kvd_proto.jobs import CONTROL_BYTES
from kvd_proto.messages import HostHandle, VmmHandle, VmmSegment
from tests.fakecuda.cudatensor import GRANULARITY
from tests.lane.cuda_checks import PAGE, options
from tests.lane.cuda_rig import POOL_BYTES, WHOLE_POOL, CudaRig, MakeRig, TestDriver
from tests.lane.device_contract import DeviceContract, Rig, Run, pattern
from tests.lane.support import Memory, import_message
from tests.layouts import flat_layout
from tests.waiting import eventually

pytestmark = pytest.mark.fakecuda

SIZES = DeviceContract.SIZES


# Seed, a switch, whether memory has descriptors, and the backend's options: copies in batches, as
# a driver for CUDA 12.8 has them, and one by one, as without them; by the directions' threads.
BACKENDS: dict[str, tuple[int, str, bool, CudaOptions]] = {
    "batches": (1, "any=random", False, options()),
    "single copies": (2, "fail=cuMemcpyBatchAsync:*:801", True, options()),
    "an old driver": (3, "driver_version=12000", False, options()),
    "older batches": (4, "driver_version=12080", False, options()),
    "plain batches": (5, "fail=cuMemcpyBatchAsync:1:1", False, options()),
    "the host's addresses": (7, "elsewhere=0", False, options()),
    "threads": (6, "any=random", False, options(inline_runs=0)),
}


class TestCudaDevice(DeviceContract):
    """The CUDA backend keeps the contract, under adversarial timing, however it copies."""

    @pytest.fixture(params=BACKENDS)
    def rig(
        self,
        request: pytest.FixtureRequest,
        fake_driver: TestDriver,
        make_rig: MakeRig,
    ) -> Rig:
        """A backend of its own, with a pool that is registered in many pieces."""
        seed, setting, by_descriptor, chosen = BACKENDS[request.param]
        fake_driver.set(f"seed={seed}")
        fake_driver.set(setting)
        if by_descriptor:  # not every driver says how far virtual memory goes
            fake_driver.set("vmm_ranges=0")
        rig = make_rig(chosen, ipc=not by_descriptor)
        copier, name = rig.cuda.copier, request.param
        assert isinstance(copier, BatchCopy) == (name not in {"single copies", "an old driver"})
        if isinstance(copier, BatchCopy):
            assert copier.returns_index == (name == "older batches")
            assert copier.overlap == (name != "plain batches")
        return rig


@pytest.fixture
def rig(make_rig: MakeRig) -> CudaRig:
    """A backend with little room."""
    return make_rig(options(bytes_in_flight=10_000))


@pytest.mark.parametrize(
    ("nbytes", "words", "undone"),
    [
        (2**50, "of 1125899908939776 bytes is claimed, .* the device has", 0),
        (2 * GRANULARITY, "mapping 4194304 bytes", 1),
        (GRANULARITY + 1, "reserving 4194305 bytes", 0),
        (GRANULARITY, "importing a worker's memory", 1),
    ],
    ids=["the device", "the allocation", "whole pages", "no device memory"],
)
def test_no_more_is_mapped_than_there_is_in(
    rig: CudaRig, nbytes: int, words: str, undone: int
) -> None:
    """A claim about a second segment that is not so: nothing stays mapped or reserved."""
    rig.ipc = False
    source = rig.make_worker((4096,))
    (handle,) = source.handles
    assert isinstance(handle, VmmHandle)
    rig.driver.set("vmm_ranges=0")
    before = rig.driver.mark
    first, second = handle.segments
    index = 0 if "importing" in words else second.fd_index  # the control page
    claim = VmmHandle((first, VmmSegment(index, nbytes)), handle.offset)
    with pytest.raises(ImportFailed, match=words):
        rig.device.import_memory((claim,), (4096,), source.descriptors)
    calls = rig.driver.calls(before)
    assert calls.count("cuMemAddressFree") == calls.count("cuMemUnmap") == undone
    assert calls.count("cuMemImportFromShareableHandle") - calls.count("cuMemRelease") == (
        "importing" in words  # the one that failed
    )


def test_a_worker_cannot_have_its_memory_mapped_again_and_again(rig: CudaRig) -> None:
    """Segments in another order are another range; there is an end to how many are mapped."""
    rig.ipc = False
    source = rig.make_worker((4096,))
    (handle,) = source.handles
    assert isinstance(handle, VmmHandle)
    first, second = handle.segments
    half = 2**30 // 2 // GRANULARITY  # of the test driver's device
    claims = [VmmHandle((first,) * (half + turn) + (second,)) for turn in range(8)]
    before = rig.driver.mark
    with pytest.raises(ImportFailed, match="bytes in all; the device has 1073741824"):
        rig.device.import_memory(claims, (1,) * 8, source.descriptors)
    calls = rig.driver.calls(before)
    assert 0 < calls.count("cuMemMap") == calls.count("cuMemUnmap")


def test_an_error_names_the_users_where_they_differ(rig: CudaRig) -> None:
    """A driver may keep memory from other users; with one user nothing is said of users."""
    source = rig.make_worker((65536,))
    page = Memory(CONTROL_BYTES)
    own = f"{os.geteuid()} ({pwd.getpwuid(os.geteuid()).pw_name})"
    for uid in (os.geteuid() + 54321, os.geteuid()):
        order = import_message(flat_layout(4096, blocks=16), source.handles, uid=uid)
        rig.driver.set("fail=cuIpcOpenMemHandle:1:801")
        with pytest.raises(ImportFailed, match=r"NOT_SUPPORTED.*pid must differ") as failed:
            WorkerTable(rig.device).import_worker(order, [page.fd, *source.descriptors[1:]])
        users = f"the worker's user is {uid}, the lane's is {own}, "
        assert (users in str(failed.value)) == (uid != os.geteuid())
    page.close()


def test_host_memory_is_refused(rig: CudaRig) -> None:
    """A handle of another kind of memory is refused by name."""
    with pytest.raises(ImportFailed, match="HostHandle is host memory"):
        rig.device.import_memory((HostHandle(0),), (1,), (0,))


@pytest.mark.parametrize(("nbytes", "accepted"), [(8, MAX_IN_FLIGHT), (4096, 3)])
def test_transfers_in_flight_are_bounded_however_short_or_long(
    rig: CudaRig, nbytes: int, accepted: int
) -> None:
    """Of one direction there are no more transfers or bytes, and one piece; the other is open."""
    memory, _ = rig.attach(SIZES)
    rig.driver.set("hold=copies")
    for number in range(accepted):
        assert rig.device.has_room(Direction.STORE)
        rig.submit(number, memory, Direction.STORE, [(0, 0, number * nbytes, nbytes)])
    assert not rig.device.has_room(Direction.STORE)
    assert rig.device.has_room(Direction.LOAD)


def test_loads_go_before_stores_on_the_device(rig: CudaRig) -> None:
    """The streams of loads have the greatest priority that there is, those of stores the least."""
    least, greatest = driver.priorities()
    assert greatest < least
    assert (rig.priority(Direction.STORE), rig.priority(Direction.LOAD)) == (least, greatest)


def test_a_device_without_room_for_a_second_process_is_refused(
    fake_driver: TestDriver, make_rig: MakeRig
) -> None:
    """The compute mode is asked for before a context is made, and named with the remedy."""
    before = fake_driver.mark
    for mode, words in ((2, "PROHIBITED"), (3, "EXCLUSIVE_PROCESS: .* the engine or kvd")):
        fake_driver.set(f"compute_mode={mode}")
        with pytest.raises(CudaMissing, match=f"mode is {words}; nvidia-smi -c DEFAULT"):
            make_rig(options())
    assert "cuDevicePrimaryCtxRetain" not in fake_driver.calls(before)
    fake_driver.set("mps=1")
    make_rig(options())


TRANSFERS = 120
AT_A_TIME = 12
PAGES, POOL_PAGES = 128, 240
LENGTHS = (100, 2048, 4000)


@pytest.mark.parametrize("seed", range(4))
def test_memory_and_pool_are_as_a_model_says(
    fake_driver: TestDriver, make_rig: MakeRig, seed: int
) -> None:
    """Whatever the order in which transfers end, each has moved its bytes when it is reported."""
    rng = random.Random(seed)
    fake_driver.set(f"seed={seed}")
    fake_driver.set("any=random")
    # 2: both threads enqueue in turn.
    rig = make_rig(options(inline_runs=rng.choice([0, 2, 64])))
    memory, source = rig.attach((PAGES * PAGE,))
    device, pool = pattern(PAGES * PAGE, seed), pattern(POOL_BYTES, seed + 100)
    rig.put(source, 0, 0, device)
    rig.put_pool(0, pool)
    device, pool = device.copy(), pool.copy()
    free, free_in_pool = set(range(PAGES)), set(range(POOL_PAGES))
    flying: dict[int, tuple[Direction, list[Run]]] = {}
    for number in range(TRANSFERS):
        pages = rng.sample(sorted(free), rng.randint(1, 6))
        slots = rng.sample(sorted(free_in_pool), len(pages))
        runs = [
            (0, page * PAGE + skew, slot * PAGE + rng.choice([0, skew]), rng.choice(LENGTHS))
            for page, slot, skew in (
                (*pair, rng.randint(0, 40)) for pair in zip(pages, slots, strict=True)
            )
        ]
        direction = rng.choice(list(Direction))
        rig.submit(number, memory, direction, runs)
        flying[number] = (direction, runs)
        free -= set(pages)
        free_in_pool -= set(slots)
        while len(flying) >= AT_A_TIME or (number == TRANSFERS - 1 and flying):
            for finished in rig.device.progress():
                assert finished.error == ""
                direction, runs = flying.pop(finished.transfer.job)
                for _, offset, at, size in runs:
                    if direction is Direction.STORE:
                        pool[at : at + size] = device[offset : offset + size]
                    else:
                        device[offset : offset + size] = pool[at : at + size]
                    free.add(offset // PAGE)
                    free_in_pool.add(at // PAGE)
    np.testing.assert_array_equal(rig.get_pool(0, POOL_BYTES), pool)
    np.testing.assert_array_equal(rig.get(source, 0, 0, PAGES * PAGE), device)


HUGE = 2 * 2**20
# On hugetlbfs the file is whole pages long, the pool need not be.
FILE_BYTES, HUGE_POOL_BYTES = 4 * HUGE, 3 * HUGE + 8192


def test_a_pool_in_huge_pages_is_pinned_as_it_is_allocated(make_rig: MakeRig) -> None:
    """Pages that are not there yet are not touched, which would end in SIGBUS; then all serves."""
    try:
        pool = Memory(FILE_BYTES, os.MFD_HUGETLB)
        os.posix_fallocate(pool.fd, 0, FILE_BYTES)
        pool.close()
        pool = Memory(FILE_BYTES, os.MFD_HUGETLB)  # none of its pages is there
    except OSError as error:
        pytest.skip(f"four huge pages are not to be had (vm.nr_hugepages): {error}")
    nbytes = HUGE_POOL_BYTES
    chosen = CudaOptions(registration_bytes=HUGE)
    rig = make_rig(chosen, pinned=False, pool=pool, pool_bytes=nbytes)
    rig.device.pin_arena(WHOLE_POOL, 0, nbytes)
    os.posix_fallocate(pool.fd, nbytes, FILE_BYTES - nbytes)
    memory, source = rig.attach((65536,))
    rig.put(source, 0, 0, pattern(65536, 1))
    fill = FillOrder(nbytes, HUGE)
    filled = 0
    for piece in fill.order:
        assert rig.cuda.usable_bytes == filled
        begin, end = fill.span(piece)
        os.posix_fallocate(pool.fd, begin, end - begin)
        filled += end - begin
        eventually(lambda: (rig.cuda.pool_error, rig.cuda.usable_bytes), ("", filled).__eq__)
    edge = HUGE - 4096
    rig.move(memory, Direction.STORE, [(0, 0, edge, 8192), (0, 0, 3 * HUGE, 8192)])
    for at in (edge, 3 * HUGE):
        np.testing.assert_array_equal(rig.get_pool(at, 8192), pattern(65536, 1)[:8192])


def test_a_slice_is_shown_to_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A MIG slice is chosen by the environment before the driver starts; a whole device is not."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "untouched")
    show_mig_slice("cuda:0123456789abcdef0123456789abcdef")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "untouched"
    show_mig_slice("cuda:MIG-0123456789abcdef0123456789abcdef")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-01234567-89ab-cdef-0123-456789abcdef"


@pytest.mark.parametrize(
    ("near", "allowed", "bound"),
    [
        ("2-3,6\n", {0, 1, 2, 6}, [{2, 6}]),
        ("0-7\n", {0, 1}, []),  # one node, or a device without a node
        ("8-9\n", {0, 1}, []),  # which this process may not use
        ("", {0, 1}, []),
    ],
)
def test_a_lane_stays_near_its_device(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    near: str,
    allowed: set[int],
    bound: list[set[int]],
) -> None:
    """On a machine with several nodes the process is bound to the device's processors."""
    cpus_of_device = tmp_path / "bus/pci/devices/0000:17:00.0/local_cpulist"
    cpus_of_device.parent.mkdir(parents=True)
    cpus_of_device.write_text(near, "ascii")
    calls: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: allowed)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _pid, cpus: calls.append(cpus))
    bind_near_device("0000:17:00.0", tmp_path)
    assert calls == bound
