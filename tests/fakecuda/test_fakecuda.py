"""The test driver itself: what it keeps of CUDA's rules.

A scenario runs in a process that has the test driver: it takes strings and asserts. What tests
of the lane show as well, because they fail where it is not kept, has none.
"""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cuda.bindings import driver

from tests.fakecuda.cudatensor import (
    GRANULARITY,
    DeviceMemory,
    PinnedBytes,
    VirtualMemory,
    call,
    code_of,
    new_stream,
    use_device,
)
from tests.fakecuda.harness import FakeCuda, calls, mark, switch

pytestmark = pytest.mark.fakecuda

PAGE = 4096
INVALID_VALUE, OUT_OF_MEMORY = 1, 2
INVALID_CONTEXT = 201
NOT_FOUND = 500
ALREADY_REGISTERED, NOT_REGISTERED = 712, 713


def copy_batch(targets: list[int], sources: list[int], sizes: list[int], stream: int) -> None:
    """Enqueue copies in one call."""
    attributes = driver.CUmemcpyAttributes()
    attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    addresses = [list(map(driver.CUdeviceptr, side)) for side in (targets, sources)]
    call("cuMemcpyBatchAsync", *addresses, sizes, len(sizes), [attributes], [0], 1, stream)


def thread_without_context() -> None:
    """Every thread needs a context of its own."""
    use_device()
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(code_of("cuMemAlloc", PAGE)))
    thread.start()
    thread.join()
    assert codes == [INVALID_CONTEXT]


def allocations() -> None:
    """Copies stay inside one allocation, memory runs out, and fresh memory is not zero."""
    use_device()
    memory = DeviceMemory(10_000)
    assert memory.read() != bytes(10_000)
    memory.write(b"kvd", 9_997)
    assert memory.read(3, 9_997) == b"kvd"
    base, nbytes = call("cuMemGetAddressRange", memory.address + 77)
    assert (int(base), nbytes) == (memory.address, 10_000)
    out = ctypes.create_string_buffer(8)
    place = ctypes.addressof(out)
    assert code_of("cuMemcpyDtoH", place, memory.address + 9_993, 8) == INVALID_VALUE
    assert code_of("cuMemcpyDtoH", place, memory.address + 12_000, 8) == INVALID_VALUE
    assert code_of("cuMemAlloc", 2**40) == OUT_OF_MEMORY
    assert code_of("cuMemFree", memory.address + 1) == INVALID_VALUE
    memory.free()
    assert code_of("cuMemFree", memory.address) == INVALID_VALUE


def touched_by_host() -> None:
    """Reads device memory as if it were the host's."""
    use_device()
    ctypes.string_at(DeviceMemory(PAGE).address, 1)


def registration() -> None:
    """Overlaps, and copies that leave a registration or span two, are errors."""
    use_device()
    device, stream = DeviceMemory(64 * PAGE), new_stream()
    host = PinnedBytes(8 * PAGE)
    assert code_of("cuMemHostRegister", host.address + PAGE, PAGE, 0) == ALREADY_REGISTERED
    assert int(call("cuMemHostGetDevicePointer", host.address, 0)) != host.address
    assert code_of("cuMemHostRegister", device.address, PAGE, 0) == INVALID_VALUE
    host.unregister()
    assert code_of("cuMemHostUnregister", host.address) == NOT_REGISTERED
    copy = ("cuMemcpyDtoHAsync", host.address + 3 * PAGE, device.address, 2 * PAGE, stream)
    assert code_of(*copy) == NOT_REGISTERED
    for start in (0, 4 * PAGE):  # two registrations side by side
        call("cuMemHostRegister", host.address + start, 4 * PAGE, 0)
    assert code_of(*copy) == INVALID_VALUE


def short_registrations() -> None:
    """With a limit, a longer registration fails as if there were no memory."""
    use_device()
    host = PinnedBytes(8 * PAGE)
    host.unregister()
    switch(f"max_pin={4 * PAGE}")
    assert code_of("cuMemHostRegister", host.address, 5 * PAGE, 0) == OUT_OF_MEMORY
    assert code_of("cuMemHostRegister", host.address, 4 * PAGE, 0) == 0


def ranges_of_virtual_memory() -> None:
    """A mapping's range is known once it may be reached, and with the switch not even then."""
    use_device()
    memory = VirtualMemory(GRANULARITY)
    base, nbytes = call("cuMemGetAddressRange", memory.address + 77)
    assert (int(base), nbytes) == (memory.address, GRANULARITY)
    switch("vmm_ranges=0")
    assert code_of("cuMemGetAddressRange", memory.address) == NOT_FOUND
    switch("vmm_ranges=1")
    address = int(call("cuMemAddressReserve", GRANULARITY, 0, 0, 0))
    call("cuMemMap", address, GRANULARITY, 0, memory.allocations[0], 0)
    assert code_of("cuMemGetAddressRange", address) == NOT_FOUND


def unmapped_under_a_copy() -> None:
    """Registered shared memory is unmapped by the program while a copy writes to it."""
    use_device()
    device, stream = DeviceMemory(PAGE), new_stream()
    device.write(b"\7" * PAGE)
    fd = os.memfd_create("pool")
    os.ftruncate(fd, 2 * PAGE)
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    arguments = (ctypes.c_size_t(2 * PAGE), 3, 1, fd, ctypes.c_long(0))
    address = libc.mmap(None, *arguments)
    call("cuMemHostRegister", address, 2 * PAGE, 0)
    switch("hold=copies")
    call("cuMemcpyDtoHAsync", address + PAGE, device.address, PAGE, stream)
    assert libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(2 * PAGE)) == 0
    switch("hold=")
    call("cuStreamSynchronize", stream)
    assert os.pread(fd, 2 * PAGE, 0) == bytes(PAGE) + b"\7" * PAGE


def instant_copies() -> None:
    """Copies end at once and move nothing; where they would be is not looked at."""
    use_device()
    memory, stream = DeviceMemory(PAGE), new_stream()
    memory.write(b"kvd")
    switch("copies=instant")
    memory.write(b"new")
    call("cuMemcpyHtoDAsync", memory.address, 12345, PAGE, stream)
    copy_batch([77] * 3, [99] * 3, [PAGE] * 3, stream)
    event = call("cuEventCreate", 0)
    call("cuEventRecord", event, stream)
    call("cuEventQuery", event)
    assert call("cuEventElapsedTime", event, event) == 0.0
    switch("copies=")
    assert memory.read(3) == b"kvd"


def busy_calls() -> None:
    """A call takes this thread's time for each of its copies."""
    use_device()
    stream = new_stream()
    switch("copies=instant")
    switch("call_ns=20000")
    before = time.thread_time_ns()
    copy_batch([77] * 100, [99] * 100, [PAGE] * 100, stream)
    assert time.thread_time_ns() - before >= 2_000_000


@pytest.mark.parametrize("part", ["4", "41", "41 ", "41 cuInit"])
def test_of_the_call_log_only_whole_lines_are_read(tmp_path: Path, part: str) -> None:
    """A line that a process is writing is read when it is there, wherever it was cut."""
    log = tmp_path / "log"
    log.write_text("")
    assert (calls(log), mark(log)) == ([], 0)
    log.write_text(f"41 cuCtxSetCurrent\n{part}", "ascii")
    assert (calls(log), calls(log, 4)) == (["cuCtxSetCurrent"], [])
    place = mark(log)
    log.write_text("41 cuCtxSetCurrent\n41 cuInit\n", "ascii")
    assert calls(log, 41, place) == ["cuInit"]


SCENARIOS: list[Callable[[], None]] = [
    thread_without_context,
    allocations,
    registration,
    short_registrations,
    ranges_of_virtual_memory,
    unmapped_under_a_copy,
    instant_copies,
    busy_calls,
]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_driver_keeps_the_rule(fakecuda: FakeCuda, scenario: Callable[[], None]) -> None:
    """What the scenario's first line says, in a process of its own, under unkind timing."""
    fakecuda.check(scenario, SEED=1)


def test_host_code_cannot_touch_device_memory(fakecuda: FakeCuda) -> None:
    """A device pointer that the host dereferences ends the process, as it would with a GPU."""
    assert fakecuda.run(touched_by_host).returncode == -signal.SIGSEGV
