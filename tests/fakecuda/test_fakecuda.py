"""The test driver itself: what it keeps of CUDA's rules.

A scenario runs in a process that has the test driver: it takes strings and asserts. What tests
of the lane show as well, because they fail where it is not kept, has none.
"""

import contextlib
import ctypes
import fcntl
import os
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cuda.bindings import driver

from tests.asked import Asked
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
from tests.fakecuda.harness import FakeCuda, switch
from tests.waiting import PATIENCE, eventually

pytestmark = pytest.mark.fakecuda

PAGE = 4096
INVALID_VALUE, OUT_OF_MEMORY = 1, 2
INVALID_CONTEXT = 201
NOT_FOUND = 500
ALREADY_REGISTERED, NOT_REGISTERED = 712, 713
LAUNCH_FAILED = 719
CAPTURE_UNSUPPORTED = 900
DRIVER_LOCK = 8  # a byte of the library's file
RELAXED = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


def thread_without_context() -> None:
    """Every thread needs a context of its own."""
    use_device()
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(code_of("cuMemAlloc", PAGE)))
    thread.start()
    thread.join(PATIENCE)
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


class Exporter:
    """Another process's memory."""

    def __init__(self) -> None:
        use_device()
        self._memory = DeviceMemory(PAGE)

    def handle(self) -> bytes:
        """Of the memory."""
        return self._memory.handle()

    switch = staticmethod(switch)

    def close(self) -> None:
        """Nothing to do: the process ends."""


def handles_that_cannot_be_opened() -> None:
    """A failure costs the context by its code, unless the rule says otherwise.

    The rule is a switch of this process or, for its handles, of the exporter.
    """
    use_device()
    exporter, handle = Asked(Exporter), driver.CUipcMemHandle()
    for rule, after in (("999", 0), ("719~", 0), ("719", LAUNCH_FAILED)):
        if not after:
            switch(f"fail=cuIpcOpenMemHandle:1:{rule}")
            assert code_of("cuIpcOpenMemHandle", handle, 1) == int(rule.rstrip("~"))
        exporter.ask("switch", f"handles={rule}")
        ctypes.memmove(handle.getPtr(), exporter.ask("handle"), 64)
        assert code_of("cuIpcOpenMemHandle", handle, 1) == int(rule.rstrip("~"))
        assert code_of("cuCtxSynchronize") == after
    exporter.close()


def closing_waits() -> None:
    """A handle is closed when earlier work of the context has ended."""
    use_device()
    exporter, stream, memory = Asked(Exporter), new_stream(), DeviceMemory(PAGE)
    handle = driver.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), exporter.ask("handle"), 64)
    address = call("cuIpcOpenMemHandle", handle, 1)
    switch("hold=copies")
    call("cuMemcpyDtoDAsync", memory.address, address, PAGE, stream)
    context = call("cuCtxGetCurrent")
    with in_thread(lambda: call("cuIpcCloseMemHandle", address), context) as closing:
        closing.join(0.1)
        assert closing.is_alive()
        switch("hold=")
    exporter.close()


@contextlib.contextmanager
def in_thread(action: Callable[[], object], context: object) -> Iterator[threading.Thread]:
    """A thread with this context that does something; it ends, and well, at the end of the body."""
    done = threading.Event()

    def run() -> None:
        call("cuCtxSetCurrent", context)
        action()
        done.set()

    thread = threading.Thread(target=run)
    thread.start()
    yield thread
    thread.join(PATIENCE)
    assert done.is_set()


def lock_file() -> int:
    """The test driver's file, opened as another process would."""
    (path,) = {
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text("ascii").splitlines()
        if "libcuda.so.1" in line
    }
    return os.open(path, os.O_RDWR)


def set_lock(file: int, kind: int) -> bool:
    """Lock or unlock the driver's byte of that file; False where another holder has it."""
    try:
        fcntl.fcntl(
            file, fcntl.F_OFD_SETLK, struct.pack("hhqqi", kind, os.SEEK_SET, DRIVER_LOCK, 1, 0)
        )
    except OSError:
        return False
    return True


def pinning_keeps_others_from_the_driver() -> None:
    """Registering and its end take time under a lock of all processes, and work waits for it."""
    use_device()
    device, host, file = DeviceMemory(PAGE), PinnedBytes(64 * PAGE), lock_file()
    context = call("cuCtxGetCurrent")

    def is_locked() -> bool:
        return not (set_lock(file, fcntl.F_WRLCK) and set_lock(file, fcntl.F_UNLCK))

    switch("pin_ns=1000000")  # 0.256 s
    switch("unpin_ns=1000000")
    with in_thread(host.unregister, context):
        eventually(is_locked)
    register = lambda: call("cuMemHostRegister", host.address, 64 * PAGE, 0)  # noqa: E731
    with in_thread(register, context):
        eventually(is_locked)
    assert set_lock(file, fcntl.F_WRLCK)
    with in_thread(lambda: device.write(b"kvd"), context) as copying:
        copying.join(0.1)
        assert copying.is_alive()
        set_lock(file, fcntl.F_UNLCK)


def capture_in_another_thread() -> None:
    """Unsafe calls fail and are logged; with the relaxed mode they work, and others always do."""
    use_device()
    switch("capture=1")
    assert code_of("cuMemAlloc", PAGE) == CAPTURE_UNSUPPORTED
    event = call("cuEventCreate", 0)
    assert code_of("cuEventQuery", event) == CAPTURE_UNSUPPORTED
    before = call("cuThreadExchangeStreamCaptureMode", RELAXED)
    assert (code_of("cuMemAlloc", PAGE), code_of("cuEventQuery", event)) == (0, 0)
    assert call("cuThreadExchangeStreamCaptureMode", before) == RELAXED
    assert code_of("cuEventQuery", event) == CAPTURE_UNSUPPORTED


SCENARIOS: list[Callable[[], None]] = [
    thread_without_context,
    allocations,
    registration,
    ranges_of_virtual_memory,
    unmapped_under_a_copy,
    handles_that_cannot_be_opened,
    closing_waits,
    pinning_keeps_others_from_the_driver,
    capture_in_another_thread,
]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_driver_keeps_the_rule(fakecuda: FakeCuda, scenario: Callable[[], None]) -> None:
    """What the scenario's first line says, in a process of its own, under unkind timing."""
    fakecuda.check(scenario, SEED=1)


def test_host_code_cannot_touch_device_memory(fakecuda: FakeCuda) -> None:
    """A device pointer that the host dereferences ends the process, as it would with a GPU."""
    assert fakecuda.run(touched_by_host).returncode == -signal.SIGSEGV
