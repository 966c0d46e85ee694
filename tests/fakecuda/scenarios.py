"""What tests run in processes that have the test driver: one function each.

A scenario takes strings, asserts, and says what it shows.
"""

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

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
    copy_batch,
    device_name,
    use_device,
)
from tests.fakecuda.harness import switch, write_control

PAGE = 4096
PATIENCE = 30
INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED = 1, 2, 3
INVALID_CONTEXT, INVALID_HANDLE, NOT_READY, ILLEGAL_ADDRESS = 201, 400, 600, 700
ALREADY_REGISTERED, NOT_REGISTERED, NOT_SUPPORTED = 712, 713, 801


def _switch(text: str) -> None:
    switch(ctypes.CDLL("libcuda.so.1"), text)


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# ---------------------------------------------------------------- devices, memory


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


# ---------------------------------------------------------------- handles


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


# ---------------------------------------------------------------- registration


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


# ---------------------------------------------------------------- order in streams


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


def source_access(order: str, sees: str) -> None:
    """What a copy with this order reads that was submitted behind a memset."""
    use_device()
    device, host, stream = DeviceMemory(PAGE), PinnedBytes(PAGE), Stream()
    device.write(b"\1" * PAGE)
    _switch("hold=kernels")
    call("cuMemsetD8Async", device.address, 7, PAGE, stream.handle)
    copy_batch([(host.address, device.address, PAGE)], order, stream)
    _switch("hold=")
    stream.wait()
    assert host.bytes[:] == bytes([int(sees)]) * PAGE


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


def batch_arguments() -> None:
    """Attributes are checked; the null stream is refused."""
    use_device()
    device, host, stream = DeviceMemory(PAGE), PinnedBytes(PAGE), Stream()
    pointers = [driver.CUdeviceptr(host.address)], [driver.CUdeviceptr(device.address)]
    plain = driver.CUmemcpyAttributes()
    plain.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    unset = driver.CUmemcpyAttributes()
    batch = "cuMemcpyBatchAsync"
    assert code_of(batch, *pointers, [8], 1, [plain], [0], 1, stream.handle) == 0
    assert code_of(batch, *pointers, [8], 1, [plain], [0], 1, 0) == INVALID_VALUE
    assert code_of(batch, *pointers, [8], 1, [unset], [0], 1, stream.handle) == INVALID_VALUE
    assert code_of(batch, *pointers, [8], 1, [plain], [1], 1, stream.handle) == INVALID_VALUE


# ---------------------------------------------------------------- faults


def use_after_close(what: str) -> None:
    """Memory let go with a copy in flight: the context is lost and stays lost."""
    use_device()
    device, host, stream = VirtualMemory(), PinnedBytes(PAGE), Stream()
    _switch("hold=copies")
    call("cuMemcpyDtoHAsync", host.address, device.address, PAGE, stream.handle)
    if what == "device":
        device.free()
    else:
        host.unregister()
    _switch("hold=")
    _await(lambda: code_of("cuStreamQuery", stream.handle) != NOT_READY)
    for function, *arguments in (("cuStreamQuery", stream.handle), ("cuMemAlloc", 1)):
        assert code_of(function, *arguments) == ILLEGAL_ADDRESS


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


def half_a_copy(log: str) -> None:
    """A held copy has moved a part of its bytes."""
    use_device()
    device, host, stream = DeviceMemory(PAGE), PinnedBytes(PAGE), Stream()
    device.write(b"\7" * PAGE)
    _switch("hold=copies")
    call("cuMemcpyDtoHAsync", host.address, device.address, PAGE, stream.handle)
    _await(lambda: "@held-copy" in Path(log).read_text(encoding="ascii"))
    assert 0 < host.bytes[:].count(7) < PAGE
    _switch("hold=")
    stream.wait()
    assert host.bytes[:].count(7) == PAGE


def failures() -> None:
    """FAIL=cuMemAlloc:2:2,cuStreamQuery:1:700 fails just these calls, the sticky one all after."""
    use_device()
    stream = Stream()
    assert [code_of("cuMemAlloc", 1) for _ in range(3)] == [0, OUT_OF_MEMORY, 0]
    _switch("fail=cuMemAlloc:*:2")
    assert [code_of("cuMemAlloc", 1) for _ in range(2)] == [OUT_OF_MEMORY] * 2
    _switch("fail=cuStreamQuery:1:700")
    assert code_of("cuMemAlloc", 1) == 0
    assert code_of("cuStreamQuery", stream.handle) == ILLEGAL_ADDRESS
    assert code_of("cuMemAlloc", 1) == ILLEGAL_ADDRESS


def failing_work(work: str) -> None:
    """A failure of the work itself is seen by a later call, which may be the very next."""
    use_device()
    device, host, stream = DeviceMemory(PAGE), PinnedBytes(PAGE), Stream()
    _switch(f"fail={work}:1:719")
    call("cuMemsetD8Async", device.address, 7, PAGE, stream.handle)
    copy = (host.address, device.address, PAGE, stream.handle)
    assert code_of("cuMemcpyDtoHAsync", *copy) in {0, 719}
    assert code_of("cuStreamSynchronize", stream.handle) == 719
    assert host.bytes[:] == bytes(PAGE)


def hang(control: str) -> None:
    """A call that hangs blocks its thread alone, until the control file says otherwise."""
    use_device()
    returned = threading.Event()

    def query() -> None:
        use_device()
        DeviceMemory(1)
        returned.set()

    threading.Thread(target=query, daemon=True).start()
    assert not returned.wait(0.1)
    assert code_of("cuCtxSynchronize") == 0
    write_control(Path(control), "unhang")
    assert returned.wait(PATIENCE)


def hanging_copy() -> None:
    """Work that hangs is never done; the process can still be ended."""
    use_device()
    device, host, stream = DeviceMemory(PAGE), PinnedBytes(PAGE), Stream()
    call("cuMemcpyDtoHAsync", host.address, device.address, PAGE, stream.handle)
    time.sleep(0.05)
    assert not stream.is_idle
    sys.stdout.write("hanging\n")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
