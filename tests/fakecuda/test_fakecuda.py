"""The test driver itself: what it keeps of CUDA's rules.

A scenario runs in a process that has the test driver: it takes strings and asserts. What tests
of the lane show as well, because they fail where it is not kept, has none.
"""

import ctypes
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from cuda.bindings import driver

from tests.fakecuda.cudatensor import (
    GRANULARITY,
    DeviceMemory,
    Failed,
    OpenedMemory,
    PinnedBytes,
    Stream,
    VirtualMemory,
    call,
    code_of,
    device_name,
    use_device,
)
from tests.fakecuda.harness import FakeCuda, calls, mark, switch

pytestmark = pytest.mark.fakecuda

PAGE = 4096
PATIENCE = 30
INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED = 1, 2, 3
INVALID_CONTEXT, INVALID_HANDLE, NOT_READY = 201, 400, 600
ALREADY_REGISTERED, NOT_REGISTERED, NOT_SUPPORTED = 712, 713, 801

FIRST = "cuda:fa4ecda0000040008000000000000000"
SECOND = "cuda:fa4ecda0000040008000000000000001"


def _switch(text: str) -> None:
    switch(ctypes.CDLL("libcuda.so.1"), text)


def devices(*names: str) -> None:
    """The devices that are seen have these names."""
    if not names:
        assert code_of("cuInit", 0) == 100
        return
    use_device()
    count = call("cuDeviceGetCount")
    assert tuple(device_name(ordinal) for ordinal in range(count)) == names


def thread_without_context() -> None:
    """Every thread needs a context of its own."""
    use_device()
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(code_of("cuMemAlloc", PAGE)))
    thread.start()
    thread.join()
    assert codes == [INVALID_CONTEXT]


def forked() -> None:
    """A forked child cannot use the driver."""
    use_device()
    child = os.fork()
    if child == 0:
        os._exit(0 if code_of("cuMemAlloc", PAGE) == NOT_INITIALIZED else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


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


def _export(pipe: Connection) -> None:
    use_device()
    memory = DeviceMemory(PAGE)
    memory.write(b"exported")
    pipe.send(memory.handle())
    while pipe.recv() != "end":
        pipe.send(memory.read(8))


def ipc() -> None:
    """A handle opens in another process, once, and not when its memory is gone."""
    use_device()
    assert code_of("cuIpcOpenMemHandle", call("cuIpcGetMemHandle", DeviceMemory(1).address), 1) == (
        INVALID_CONTEXT
    )
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_export, args=(theirs,), daemon=True)
    process.start()
    handle = ours.recv()
    opened, again = OpenedMemory(handle), OpenedMemory(handle)
    assert (opened.nbytes, opened.address) == (PAGE, again.address)
    assert opened.read(8) == b"exported"
    opened.write(b"imported")
    ours.send("read")
    assert ours.recv() == b"imported"
    opened.close()
    assert again.read(8) == b"imported"
    ours.send("end")
    process.join(PATIENCE)
    assert again.read(8) == b"imported"
    again.close()
    assert code_of("cuIpcCloseMemHandle", again.address) == INVALID_VALUE
    try:
        OpenedMemory(handle)
    except Failed as error:
        assert error.code == INVALID_HANDLE  # noqa: PT017  # plain asserts: no pytest in here
    else:
        raise AssertionError("a dead process's handle was opened")


def virtual_memory() -> None:
    """Exported as a descriptor, imported, mapped twice; legacy handles are refused."""
    use_device()
    memory = VirtualMemory()
    legacy = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
    assert not call("cuPointerGetAttribute", legacy, memory.address)
    assert call("cuPointerGetAttribute", legacy, DeviceMemory(1).address)
    assert code_of("cuIpcGetMemHandle", memory.address) == INVALID_VALUE
    ours, theirs = socket.socketpair()
    fd = memory.descriptor()
    socket.send_fds(ours, [b"."], [fd])
    os.close(fd)
    received = socket.recv_fds(theirs, 1, 1)[1][0]
    other = VirtualMemory(GRANULARITY, received)
    memory.write(b"virtual", 100)
    assert other.read(7, 100) == b"virtual"
    memory.free()
    assert other.read(7, 100) == b"virtual"
    other.free()
    assert code_of("cuMemcpyDtoH", 0, other.address, 1) == INVALID_VALUE
    private = VirtualMemory(exportable=False)
    try:
        private.descriptor()
    except Failed as error:
        assert error.code == NOT_SUPPORTED  # noqa: PT017  # the same
    else:
        raise AssertionError("memory that is not exportable was exported")


def registration() -> None:
    """Overlaps, and copies that leave a registration or span two, are errors."""
    use_device()
    device, stream = DeviceMemory(64 * PAGE), Stream()
    host = PinnedBytes(8 * PAGE)
    assert code_of("cuMemHostRegister", host.address + PAGE, PAGE, 0) == ALREADY_REGISTERED
    assert int(call("cuMemHostGetDevicePointer", host.address, 0)) == host.address
    assert code_of("cuMemHostRegister", device.address, PAGE, 0) == INVALID_VALUE
    host.unregister()
    assert code_of("cuMemHostUnregister", host.address) == NOT_REGISTERED
    copy = ("cuMemcpyDtoHAsync", host.address + 3 * PAGE, device.address, 2 * PAGE, stream.handle)
    assert code_of(*copy) == NOT_REGISTERED
    for start in (0, 4 * PAGE):  # two registrations side by side
        call("cuMemHostRegister", host.address + start, 4 * PAGE, 0)
    assert code_of(*copy) == INVALID_VALUE


def stream_order() -> None:
    """Copy and word wait for the work before them; events show it, also to other streams."""
    use_device()
    device, host, stream, other = DeviceMemory(PAGE), PinnedBytes(4 * PAGE), Stream(), Stream()
    device.write(bytes(PAGE))
    before, after = call("cuEventCreate", 0), call("cuEventCreate", 0)
    assert code_of("cuEventQuery", after) == 0  # never recorded
    _switch("hold=kernels")
    call("cuEventRecord", before, stream.handle)
    call("cuMemsetD8Async", device.address, 7, PAGE, stream.handle)
    call("cuMemcpyDtoHAsync", host.address, device.address, PAGE, stream.handle)
    call("cuStreamWriteValue64", stream.handle, host.address + PAGE, 42, 0)
    call("cuEventRecord", after, stream.handle)
    call("cuStreamWaitEvent", other.handle, after, 0)
    call("cuMemcpyDtoHAsync", host.address + 2 * PAGE, device.address, PAGE, other.handle)
    call("cuEventSynchronize", before)
    assert code_of("cuEventQuery", after) == NOT_READY
    assert not other.is_idle
    assert (host.word(), host.word(PAGE), host.word(2 * PAGE)) == (0, 0, 0)
    _switch("hold=")
    call("cuEventSynchronize", after)
    assert host.bytes[:PAGE] == b"\7" * PAGE
    assert host.word(PAGE) == 42
    assert call("cuEventElapsedTime", before, after) >= 0
    other.wait()
    assert host.bytes[2 * PAGE : 3 * PAGE] == b"\7" * PAGE


def legacy_stream() -> None:
    """The null stream and blocking streams wait for each other; non-blocking ones do not."""
    use_device()
    device, host, free, ordered = (
        DeviceMemory(PAGE),
        PinnedBytes(PAGE),
        Stream(),
        Stream(blocking=True),
    )
    _switch("hold=kernels")
    call("cuMemsetD8Async", device.address, 7, PAGE, ordered.handle)
    call("cuStreamWriteValue64", 0, host.address, 1, 0)
    call("cuStreamWriteValue64", free.handle, host.address + 8, 2, 0)
    free.wait()
    assert (host.word(), host.word(8)) == (0, 2)
    _switch("hold=")
    call("cuStreamSynchronize", 0)
    assert host.word() == 1


def unmapped_under_a_copy() -> None:
    """Registered shared memory is unmapped by the program while a copy writes to it."""
    use_device()
    device, stream = DeviceMemory(PAGE), Stream()
    device.write(b"\7" * PAGE)
    fd = os.memfd_create("pool")
    os.ftruncate(fd, 2 * PAGE)
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    arguments = (ctypes.c_size_t(2 * PAGE), 3, 1, fd, ctypes.c_long(0))
    address = libc.mmap(None, *arguments)
    call("cuMemHostRegister", address, 2 * PAGE, 0)
    _switch("hold=copies")
    call("cuMemcpyDtoHAsync", address + PAGE, device.address, PAGE, stream.handle)
    assert libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(2 * PAGE)) == 0
    _switch("hold=")
    stream.wait()
    assert os.pread(fd, 2 * PAGE, 0) == bytes(PAGE) + b"\7" * PAGE


def test_devices_are_named_and_hidden(fakecuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices have UUIDs, and CUDA_VISIBLE_DEVICES chooses and orders them by UUID or number."""
    fakecuda.check(devices, FIRST, SECOND, DEVICES=2)
    fakecuda.check(devices, DEVICES=0)
    environment = fakecuda.environment(DEVICES=2)

    def visible(text: str, *names: str) -> None:
        monkeypatch.setattr(
            FakeCuda, "environment", lambda _: environment | {"CUDA_VISIBLE_DEVICES": text}
        )
        fakecuda.check(devices, *names)

    visible("GPU-fa4ecda0-0000-4000-8000-000000000001,0", SECOND, FIRST)
    visible("0,7,1", FIRST)


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
    forked,
    allocations,
    ipc,
    virtual_memory,
    registration,
    stream_order,
    legacy_stream,
    unmapped_under_a_copy,
]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_driver_keeps_the_rule(fakecuda: FakeCuda, scenario: Callable[[], None]) -> None:
    """What the scenario's first line says, in a process of its own, under unkind timing."""
    fakecuda.check(scenario, SEED=1)


def test_host_code_cannot_touch_device_memory(fakecuda: FakeCuda) -> None:
    """A device pointer that the host dereferences ends the process, as it would with a GPU."""
    assert fakecuda.run(touched_by_host).returncode == -signal.SIGSEGV
