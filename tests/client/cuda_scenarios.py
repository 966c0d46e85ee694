"""What a worker's process does with CUDA memory, each scenario in a process of its own."""

import contextlib
import ctypes
import gc
import itertools
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from cuda.bindings import driver

from kvd_client import (
    CudaError,
    DeviceMemory,
    HostMemory,
    Timeline,
    UnsupportedMemory,
    UsageError,
    Worker,
    cuda_driver,
)
from kvd_client import memory as memory_module
from kvd_client import timeline as timelines
from kvd_client.memory import Descriptors
from kvd_client.registration import WorkerRegistration, register_message
from kvd_client.timeline import ControlPage, StreamSignals
from kvd_proto.messages import (
    MAX_DESCRIPTORS,
    Fingerprint,
    IpcHandle,
    Register,
    VmmHandle,
    VmmSegment,
)
from tests.client.fake_daemon import FakeDaemon
from tests.daemon.engines import make_layout
from tests.descriptors import open_on
from tests.fakecuda import cudatensor as cuda
from tests.fakecuda import harness
from tests.fakecuda.harness import functions_named, switch
from tests.waiting import DEADLINE, eventually

SIZE = 8 * 4096
REMOVE = "remove expandable_segments:True from PYTORCH_CUDA_ALLOC_CONF"


def allocated(nbytes: int = SIZE) -> int:
    """The address of new device memory."""
    return cuda.DeviceMemory(nbytes).address


def held_up(address: int) -> int:
    """A stream with work that does not begin before the kernels are let go, by `hold=`."""
    stream = cuda.new_stream()
    switch("hold=kernels")
    cuda.call("cuMemsetD8Async", address, 1, SIZE, stream)
    return stream


def signalled() -> tuple[ControlPage, Timeline]:
    """A page whose timeline streams signal."""
    page = ControlPage()
    timeline = Timeline(page)
    timeline.set_signals(StreamSignals(0, page))
    return page, timeline


@contextmanager
def refused(kind: type[Exception], *parts: str) -> Iterator[None]:
    """What is done inside is refused, with all of these words."""
    with pytest.raises(kind) as refusal:
        yield
    missing = [part for part in parts if part not in str(refusal.value)]
    assert not missing, f"{missing} not in {refusal.value}"


def ipc_memory_is_its_allocation_and_an_offset() -> None:
    """Two storages of one allocation have one handle and need no descriptor."""
    cuda.use_device()
    base = allocated(3 * SIZE)
    memory = [DeviceMemory.at(base + 512, SIZE), DeviceMemory.at(base + SIZE + 1024, SIZE)]
    message, descriptors = registered(*memory)
    name = memory[0].ipc
    assert len(name) == 64
    assert message.handles == (
        IpcHandle(handle=name, allocation=3 * SIZE, offset=512),
        IpcHandle(handle=name, allocation=3 * SIZE, offset=SIZE + 1024),
    )
    assert message.device == "cuda:fa4ecda0000040008000000000000000"
    assert descriptors.fds == ()
    assert "IPC handle" in repr(memory[0])
    memory[0].close()
    with refused(UsageError, "memory[0]", "open HostMemory or DeviceMemory"):
        registered(*memory)


def registered(*memory: HostMemory | DeviceMemory) -> tuple[Register, Descriptors]:
    """The registration of this memory."""
    return register_message(
        memory,
        make_layout(blocks=8),
        fingerprint=Fingerprint(model="m"),
        rank=0,
        world_size=1,
        stage=0,
        temporary=False,
    )


def register(worker: Worker, address: int) -> None:
    """Two storages from this address on."""
    memory = [DeviceMemory.at(address + n * SIZE, SIZE) for n in (0, 1)]
    assert worker.register(memory, make_layout(blocks=8), Fingerprint(model="m"), required=True)
    for part in memory:
        part.close()


def until(timeline: Timeline, number: int) -> None:
    """Wait until the timeline is there."""
    eventually(lambda: timeline.reached, number.__le__)


def has_marked(timeline: Timeline) -> bool:
    """Whether the event after the last number has happened, too: a page that is closed goes."""
    assert isinstance(timeline._signals, StreamSignals)
    with cuda_driver.beside_captures():
        return cuda_driver.has_happened(timeline._signals._event)


def stays(timeline: Timeline, number: int) -> None:
    """The timeline goes no further; without a rule there is time to see that it does."""
    lacks_a_rule = any(sys.argv[1] == rule.__name__ for rule in RULES)
    end = time.monotonic() + (30 if lacks_a_rule else 0.1)
    while time.monotonic() < end:
        assert timeline.reached == number
        time.sleep(0.001)
    assert timeline.reached == number


# ------------------------------------------------------------------ scenarios


def a_storage_of_several_allocations_is_its_segments() -> None:
    """In order, each with the descriptor of its own memory; a shared one is sent once."""
    cuda.use_device()
    whole = cuda.GRANULARITY
    made = cuda.VirtualMemory(segments=3)
    memory = [
        DeviceMemory.at(made.address + whole - SIZE, whole + 2 * SIZE),
        DeviceMemory.at(made.address + 2 * whole + SIZE, SIZE),
    ]
    message, descriptors = registered(*memory)
    first, second, third = (VmmSegment(fd_index=n, nbytes=whole) for n in (1, 2, 3))
    assert message.handles == (
        VmmHandle(segments=(first, second, third), offset=whole - SIZE),
        VmmHandle(segments=(third,), offset=SIZE),
    )
    for number, fd in enumerate(descriptors.fds):  # a descriptor of the test driver is a file
        made.write(bytes([number + 1]) * 64, number * whole)
        assert os.pread(fd, 64, 0) == bytes([number + 1]) * 64


def no_more_segments_than_a_registration_can_carry() -> None:
    """One descriptor is the control page's; above that, the sentence says how many there are."""
    cuda.use_device()
    made = cuda.VirtualMemory(segments=MAX_DESCRIPTORS)
    fits = DeviceMemory.at(made.address, made.nbytes - cuda.GRANULARITY)
    assert len(registered(fits, fits)[1].fds) == MAX_DESCRIPTORS - 1
    opened = open_files()
    large = DeviceMemory.at(made.address, made.nbytes)
    with refused(UsageError, f"lies in {MAX_DESCRIPTORS} files", "252 at most", "larger", REMOVE):
        registered(large, large)
    large.close()
    assert open_files() == opened


def memory_that_cannot_be_shared_is_refused() -> None:
    """The sentence says what makes such memory and what to change; nothing stays open."""
    cuda.use_device()
    closed, fabric = (cuda.VirtualMemory(kinds=kinds) for kinds in (None, cuda.FABRIC))
    split, page = cuda.VirtualMemory(segments=3), ControlPage()
    opened = open_files()
    with refused(UnsupportedMemory, "without a way", "--enable-sleep-mode", REMOVE):
        DeviceMemory.at(closed.address, SIZE)
    with refused(UnsupportedMemory, "to a fabric only", "NVIDIA_IMEX_CHANNELS"):
        DeviceMemory.at(fabric.address, SIZE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_module, "MAX_SEGMENTS", 2)
        with refused(UnsupportedMemory, "more than 2 CUDA allocations", REMOVE):
            DeviceMemory.at(split.address, split.nbytes)
    with refused(CudaError, "find the allocation of address", "NOT_FOUND"):
        DeviceMemory.at(split.address, split.nbytes + 1)  # ends outside
    with pytest.raises(CudaError) as refusal:
        DeviceMemory.at(page.address, 64)  # the host's
    assert (refusal.value.code, refusal.value.name) == (1, "CUDA_ERROR_INVALID_VALUE")
    assert f"{page.address:#x}" in refusal.value.attempted
    assert open_files() == opened


def a_thread_without_a_context_shares_memory() -> None:
    """It has none afterwards either, and no device that was not in use gets one."""
    cuda.use_device(1)
    address, elsewhere = allocated(), cuda.VirtualMemory(segments=2).address

    def share() -> tuple[str, str, int]:
        names = [DeviceMemory.at(at, SIZE).device for at in (address, elsewhere)]
        return *names, int(cuda.call("cuCtxGetCurrent"))  # type: ignore[return-value]  # a pair

    with ThreadPoolExecutor(1) as other:
        first, second, context = other.submit(share).result()
    assert first == "cuda:fa4ecda0000040008000000000000001"
    assert (second, context) == ("cuda:fa4ecda0000040008000000000000000", 0)
    assert [cuda.call("cuDevicePrimaryCtxGetState", device)[1] for device in (0, 1)] == [0, 1]


def a_process_without_a_device_has_no_device_memory() -> None:
    """It is told so, and no context is made to find out."""
    cuda.call("cuInit", 0)
    with refused(UnsupportedMemory, "uses no CUDA device"):
        DeviceMemory.at(4096, SIZE)
    assert cuda.call("cuDevicePrimaryCtxGetState", 0)[1] == 0


def memory_that_was_taken_back_is_freed() -> None:
    """Once the daemon has let go, this process gives it back and nothing of it is left."""
    cuda.use_device()
    made = cuda.VirtualMemory()
    with (
        tempfile.TemporaryDirectory(prefix="kvd-") as path,
        FakeDaemon(Path(path)),
        Worker(path, "engine", 0, 1, deadline=DEADLINE) as worker,
    ):
        register(worker, made.address)
        mine = os.dup(worker._registration.memory.fds[0])
        assert worker.unregister()
        made.unmap()
        assert open_on(mine) == {mine}
        os.close(mine)
        made.map()
        register(worker, made.address)
        until(worker.timeline, worker.timeline.signal_on(cuda.new_stream()))


def memory_of_one_worker_is_on_one_device() -> None:
    """Host and device memory, or two devices, are not one registration."""
    cuda.use_device(1)
    second = DeviceMemory.at(allocated(), SIZE)
    cuda.use_device(0)
    first = DeviceMemory.at(allocated(), SIZE)
    host = HostMemory.allocate(SIZE)
    assert first.device != second.device
    with refused(UsageError, f"memory[1] is on {second.device}, memory[0] on {first.device}"):
        registered(first, second)
    with refused(UsageError, f"memory[1] is on host, memory[0] on {first.device}"):
        registered(first, host)
    assert registered(host, host)[0].device == "host"
    assert registered(first, first)[0].device == first.device


UNKNOWN_CODE = 12345  # for which the bindings raise ValueError
Failure = int | type[Exception]
FAILURES: tuple[Failure, ...] = (999, UNKNOWN_CODE, ValueError, RuntimeError, AttributeError)
"""How a driver's function fails: with a code, or with what the bindings raise."""


@contextmanager
def failing(name: str, number: int | None, failure: Failure) -> Iterator[None]:
    """A function of the driver fails at its n-th call from now; None: at every call."""
    if isinstance(failure, int):
        switch(f"fail={name}:{number or '*'}:{failure}")
        yield
        switch("fail=")
        return
    # The driver's log has one name for both versions of it, of which bindings before 13 have two.
    newer = f"{name}_v2"
    attribute = newer if name == "cuDeviceGetUuid" and hasattr(driver, newer) else name
    function, calls = getattr(driver, attribute), itertools.count(1)

    def fail(*arguments: object) -> object:
        if number in {None, next(calls)}:
            raise failure(name)
        return function(*arguments)

    setattr(driver, attribute, fail)
    yield
    setattr(driver, attribute, function)


def every_failure_of_the_driver_names_what_was_attempted() -> None:
    """Each call that cuda_driver.py names fails once; errors are typed, nothing is left open."""
    cuda.use_device()
    plain, exported = allocated(), cuda.VirtualMemory().address
    streams = [cuda.new_stream() for _ in range(2)]
    log = Path(os.environ["FAKECUDA_LOG"])
    assert life(plain, exported, streams) == []  # loads the driver
    before = log.stat().st_size
    assert life(plain, exported, streams) == []
    calls = Counter(harness.calls(log, since=before))
    functions = functions_named(cuda_driver)
    assert "cuStreamWriteValue64" in functions
    elsewhere = {
        "cuInit",  # when the driver is loaded
        "cuGetErrorName",  # when another call has failed
        "cuDeviceGetUuid_v2",  # how bindings older than CUDA 13 name the plain one
    }
    unseen = functions - calls.keys()
    assert unseen == elsewhere - calls.keys(), unseen
    opened = open_files()
    for name in sorted(functions & calls.keys()):
        for number, failure in itertools.product(range(1, calls[name] + 1), FAILURES):
            num_open = len(timelines._NOT_CLOSED)
            with failing(name, number, failure):
                errors = life(plain, exported, streams)
            if failure == 999:
                cause = "CUDA_ERROR_UNKNOWN (999)"
            elif failure == UNKNOWN_CODE:
                cause = f"ValueError: {UNKNOWN_CODE} is not a valid CUresult (-1)"
            else:
                cause = f"{getattr(failure, '__name__', '')}: {name} (-1)"
            assert all(text.endswith(cause) for text in errors), (name, errors)
            # A page of which it is not known that nothing writes to it stays, without a word; its
            # mapping holds a descriptor.
            assert errors or name in HARMLESS or len(timelines._NOT_CLOSED) > num_open, name
            assert open_files() <= opened + len(timelines._NOT_CLOSED), name
    assert life(plain, exported, streams) == []


# What the driver then keeps is this process's own, and is let go at its end.
HARMLESS = {
    "cuMemRelease",
    "cuDevicePrimaryCtxRelease",
    "cuEventDestroy",
    "cuMemHostUnregister",
    "cuThreadExchangeStreamCaptureMode",  # of its second call: the thread keeps a right
}


def life(plain: int, exported: int, streams: list[int]) -> list[str]:
    """Memory of both kinds shared, numbers signalled: what went wrong, in words."""
    errors: list[str] = []
    page = ControlPage()
    timeline = Timeline(page)

    def signal() -> None:
        timeline.set_signals(StreamSignals(0, page))
        numbers = list(other.map(timeline.signal_on, streams))
        until(timeline, numbers[-1])

    with ThreadPoolExecutor(1) as other:  # where the device's context is not the current one
        actions: list[Callable[[], None]] = [
            lambda: other.submit(DeviceMemory.at, plain, SIZE).result().close(),
            lambda: other.submit(DeviceMemory.at, exported, SIZE).result().close(),
            copies,
            signal,
        ]
        for action in actions:
            try:
                action()
            except CudaError as error:
                errors.append(str(error))
    cuda.call("cuCtxSynchronize")  # a page is let go when its last event has happened
    timeline.set_signals(None)
    page.close()
    return errors


def a_capture_in_another_thread_goes_on() -> None:
    """A worker that registers, signals and ends breaks no graph that another thread captures."""
    cuda.use_device()
    plain, exported = allocated(2 * SIZE), cuda.VirtualMemory().address
    stream = cuda.new_stream()
    switch("capture=1")
    for address in (plain, exported):
        DeviceMemory.at(address, SIZE).close()
    page, timeline = signalled()
    until(timeline, timeline.signal_on(stream))
    eventually(lambda: has_marked(timeline))
    timeline.set_signals(None)
    page.close()
    assert not timelines._NOT_CLOSED
    calls = harness.calls(Path(os.environ["FAKECUDA_LOG"]))
    assert "cuMemHostUnregister" in calls
    assert "@broken-capture" not in calls
    own_mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    assert cuda.call("cuThreadExchangeStreamCaptureMode", own_mode) == own_mode


def copies() -> None:
    """What the self-test does with memory of its own."""
    assert cuda_driver.count_devices() == 1
    data = ctypes.create_string_buffer(b"bytes", SIZE)
    back = ctypes.create_string_buffer(SIZE)
    address = cuda_driver.allocate(SIZE)
    try:
        cuda_driver.copy_in(address, ctypes.addressof(data), SIZE)
        cuda_driver.copy_out(ctypes.addressof(back), address, SIZE)
        assert back.raw == data.raw
    finally:
        try:
            cuda_driver.free(address)
        except CudaError:
            cuda_driver.free(address)  # else it is the test that leaves something open
            raise


def open_files() -> int:
    """How many descriptors this process has."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def a_driver_that_does_not_start_says_so() -> None:
    """Also where it has no name for its error, and where the bindings do not know its code."""
    code = -1 if f":{UNKNOWN_CODE}" in os.environ["FAKECUDA_FAIL"].split(",")[0] else 999
    with refused(CudaError, "start the CUDA driver", f"({code})"):
        DeviceMemory.at(4096, 1)


def bindings_that_lack_a_constant_are_named() -> None:
    """As a CudaError with the constant's name; the worker serves once they have it."""
    cuda.use_device()
    page = ControlPage()
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(driver, "CUevent_flags")
        with refused(CudaError, "CUevent_flags.CU_EVENT_DISABLE_TIMING failed in cuda-bindings"):
            StreamSignals(0, page)
    StreamSignals(0, page).close()


def numbers_are_reached_when_the_stream_is_there() -> None:
    """Not before its kernels have finished; in order, whichever streams they are asked for on."""
    cuda.use_device()
    _, timeline = signalled()
    idle = cuda.new_stream()
    assert timeline.signal_on(idle) == 1
    until(timeline, 1)
    busy = held_up(allocated())
    assert timeline.signal_on(busy) == 2
    assert timeline.signal_on(idle) == 3
    stays(timeline, 1)
    switch("hold=")
    until(timeline, 3)
    assert timeline.signal_on(0) == 4  # the stream that CUDA calls the default one
    until(timeline, 4)
    with refused(UsageError, "call signal_on(stream)"):
        timeline.signal(4)
    with refused(UsageError, "handle of a CUDA stream"):
        timeline.signal_on(-1)
    timeline.set_signals(None)
    with refused(UsageError, "no memory of a GPU is registered"):
        timeline.signal_on(idle)
    timeline.signal(timeline.reserve())
    assert timeline.reached == 5


def a_page_that_is_written_to_later_stays() -> None:
    """Ending while a stream has yet to write neither waits nor takes the memory away.

    Nor after the event behind the write failed, so that the write's end is not known.
    """
    cuda.use_device()
    for failure in ("", "cuEventRecord:1:999"):
        page, timeline = signalled()
        stream = held_up(allocated())
        switch(f"fail={failure}")
        with refused(CudaError, "record an event") if failure else contextlib.nullcontext():
            timeline.signal_on(stream)
        switch("fail=")
        timeline.set_signals(None)
        page.close()
        switch("hold=")
        cuda.call("cuStreamSynchronize", stream)
        assert page.timeline == 1


def a_number_after_one_that_was_not_marked_waits_for_it() -> None:
    """On another stream too: the timeline never falls back."""
    cuda.use_device()
    _, timeline = signalled()
    idle, busy = cuda.new_stream(), held_up(allocated())
    switch("fail=cuEventRecord:1:999")
    with refused(CudaError, "record an event"):
        timeline.signal_on(busy)
    switch("fail=")
    number = timeline.signal_on(idle)
    stays(timeline, 0)
    switch("hold=")
    until(timeline, number)
    cuda.call("cuStreamSynchronize", busy)
    assert timeline.reached == number


def streams_that_cannot_write_are_refused() -> None:
    """The sentence says what is needed; nothing is left open."""
    cuda.use_device()
    page = ControlPage()
    opened = open_files()
    with refused(UnsupportedMemory, "cannot write 64 bits"):
        StreamSignals(0, page)
    assert open_files() == opened


# ------------------------------------------------------- rules, to be taken away


def a_stream_waits_for_the_last_number_on_another() -> None:
    """Else a number on an idle stream vouches for what a busy one has not done."""
    cuda_driver.stream_waits = lambda stream, event: None  # noqa: ARG005  # as its stand-in


def the_stream_writes_the_number_at_its_turn() -> None:
    """Else it is reached when it is asked for."""

    def write(stream: int, address: int, value: int) -> None:
        del stream
        host = cuda.host_address(address)
        ctypes.c_uint64.from_address(int(host)).value = value

    cuda_driver.write_value = write


def a_write_counts_when_it_is_marked() -> None:
    """Else the event says that nothing will write while a stream has yet to."""
    StreamSignals._is_recorded = property(lambda _: True, lambda _, __: None)  # type: ignore[assignment]  # as its stand-in


def a_page_is_let_go_when_nothing_will_write_to_it() -> None:
    """Else a stream writes where nothing is registered, and the context is lost."""
    cuda_driver.has_happened = lambda event: True  # noqa: ARG005  # as its stand-in


def an_address_is_asked_about_with_a_context_current() -> None:
    """Else CUDA refuses in a thread that has none."""
    cuda_driver.any_context = contextlib.nullcontext  # type: ignore[assignment]  # as its stand-in


def segments_keep_their_order() -> None:
    """Else a block is taken for another."""
    exported = memory_module._export
    memory_module._export = lambda allocations: exported(allocations[::-1])


def memory_that_is_not_wanted_is_let_go() -> None:
    """Else its descriptors keep it, and the engine that sleeps has given nothing back."""
    drop = WorkerRegistration.drop

    def keep(registration: WorkerRegistration) -> None:
        memory = registration.memory
        drop(registration)
        registration.memory = memory

    WorkerRegistration.drop = keep  # type: ignore[assignment,method-assign]  # as its stand-in


RULES: dict[Callable[[], None], Callable[[], None]] = {
    a_stream_waits_for_the_last_number_on_another: numbers_are_reached_when_the_stream_is_there,
    the_stream_writes_the_number_at_its_turn: numbers_are_reached_when_the_stream_is_there,
    a_write_counts_when_it_is_marked: a_number_after_one_that_was_not_marked_waits_for_it,
    a_page_is_let_go_when_nothing_will_write_to_it: a_page_that_is_written_to_later_stays,
    an_address_is_asked_about_with_a_context_current: a_thread_without_a_context_shares_memory,
    segments_keep_their_order: a_storage_of_several_allocations_is_its_segments,
    memory_that_is_not_wanted_is_let_go: memory_that_was_taken_back_is_freed,
}
"""Rules, and the scenario that fails without each."""


def run(*names: str) -> None:
    """Run scenarios one after the other, or one without a rule, which comes before it."""
    for name in names:
        globals()[name]()
        switch("hold=")


def names_its_memory() -> None:
    """Print the device of new memory."""
    cuda.use_device()
    print(DeviceMemory.at(allocated(), SIZE).device)
