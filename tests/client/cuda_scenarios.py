"""What a worker's process does with CUDA memory, each scenario in a process of its own."""

import ctypes
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvd_client import (
    CudaError,
    DeviceMemory,
    HostMemory,
    Timeline,
    UnsupportedMemory,
    UsageError,
    cuda_driver,
)
from kvd_client import (
    timeline as timelines,
)
from kvd_client.memory import ControlPage, Memory
from kvd_client.registration import registration
from kvd_client.timeline import StreamSignals
from kvd_proto.messages import Fingerprint, IpcHandle, Register, VmmHandle
from tests.daemon.engines import make_layout
from tests.fakecuda import cudatensor as cuda
from tests.fakecuda import harness
from tests.fakecuda.harness import functions_named, switch
from tests.waiting import eventually

SIZE = 8 * 4096

# ---------------------------------------------------------------------- tools


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
    timeline.follow(StreamSignals(0, page))
    return page, timeline


@contextmanager
def refused(kind: type[Exception], *parts: str) -> Iterator[None]:
    """What is done inside is refused, with all of these words."""
    with pytest.raises(kind) as refusal:
        yield
    missing = [part for part in parts if part not in str(refusal.value)]
    assert not missing, f"{missing} not in {refusal.value}"


def registered(*memory: HostMemory | DeviceMemory) -> tuple[Register, list[Memory]]:
    """The registration of this memory."""
    return registration(
        memory,
        make_layout(blocks=8),
        Fingerprint(model="m"),
        rank=0,
        world_size=1,
        stage=0,
        temporary=False,
    )


def until(timeline: Timeline, number: int) -> None:
    """Wait until the timeline is there."""
    eventually(lambda: timeline.reached, number.__le__)


def stays(timeline: Timeline, number: int) -> None:
    """The timeline goes no further; without a rule there is time to see that it does."""
    end = time.monotonic() + (30 if len(sys.argv) > 2 else 0.1)
    while time.monotonic() < end:
        assert timeline.reached == number
        time.sleep(0.001)
    assert timeline.reached == number


# ------------------------------------------------------------------ scenarios


def ipc_memory_is_its_allocation_and_an_offset() -> None:
    """Two storages of one allocation have one handle and need no descriptor."""
    cuda.use_device()
    base = allocated(3 * SIZE)
    memory = [DeviceMemory.at(base + 512, SIZE), DeviceMemory.at(base + SIZE + 1024, SIZE)]
    message, kept = registered(*memory)
    name = memory[0].ipc
    assert len(name) == 64
    assert message.handles == (
        IpcHandle(handle=name, allocation=3 * SIZE, offset=512),
        IpcHandle(handle=name, allocation=3 * SIZE, offset=SIZE + 1024),
    )
    assert message.device == "cuda:fa4ecda0000040008000000000000000"
    assert kept == []
    assert "IPC handle" in repr(memory[0])
    memory[0].close()
    with refused(UsageError, "memory[0]", "open HostMemory or DeviceMemory"):
        registered(*memory)


def virtual_memory_is_a_descriptor_for_each_allocation() -> None:
    """Storages of one allocation share a descriptor, which outlives what the caller closes."""
    cuda.use_device()
    base = cuda.VirtualMemory().address
    memory = [DeviceMemory.at(base + at, SIZE) for at in (0, SIZE)]
    message, kept = registered(*memory)
    assert message.handles == (
        VmmHandle(fd_index=1, allocation=cuda.GRANULARITY, offset=0),
        VmmHandle(fd_index=1, allocation=cuda.GRANULARITY, offset=SIZE),
    )
    for part in memory:
        part.close()
        part.close()
    assert len(kept) == 1
    assert os.fstat(kept[0].fd)


def memory_across_allocations_is_refused() -> None:
    """A storage that several allocations make up has no one handle."""
    cuda.use_device()
    base = cuda.VirtualMemory().address
    assert DeviceMemory.at(base + cuda.GRANULARITY - SIZE, SIZE).offset == cuda.GRANULARITY - SIZE
    with refused(UnsupportedMemory, "several CUDA allocations", "ends after 4096", "sleep mode"):
        DeviceMemory.at(base + cuda.GRANULARITY - 4096, SIZE)


def memory_that_is_not_exportable_is_refused() -> None:
    """The sentence says what makes such memory and what to change."""
    cuda.use_device()
    with refused(UnsupportedMemory, "no other process can map", "expandable_segments:True from"):
        DeviceMemory.at(cuda.VirtualMemory(exportable=False).address, SIZE)


def what_is_no_device_memory_is_refused() -> None:
    """Host addresses, and numbers that are no address or size."""
    cuda.use_device()
    page = ControlPage()
    with pytest.raises(CudaError) as refusal:
        DeviceMemory.at(page.address, 64)
    assert (refusal.value.code, refusal.value.name) == (1, "CUDA_ERROR_INVALID_VALUE")
    assert f"{page.address:#x}" in refusal.value.attempted


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
        for number in range(1, calls[name] + 1):
            switch(f"fail={name}:{number}:999")
            kept = len(timelines._KEPT)
            errors = life(plain, exported, streams)
            switch("fail=")
            assert all("CUDA_ERROR_UNKNOWN (999)" in text for text in errors), (name, errors)
            # A page of which it is not known that nothing writes to it stays, without a word; its
            # mapping holds a descriptor.
            assert errors or name in HARMLESS or len(timelines._KEPT) > kept, name
            assert open_files() <= opened + len(timelines._KEPT), name
    assert life(plain, exported, streams) == []


# What the driver then keeps is this process's own, and is let go at its end.
HARMLESS = {"cuMemRelease", "cuDevicePrimaryCtxRelease", "cuEventDestroy", "cuMemHostUnregister"}


def life(plain: int, exported: int, streams: list[int]) -> list[str]:
    """Memory of both kinds shared, numbers signalled: what went wrong, in words."""
    errors: list[str] = []
    for address in (plain, exported):
        try:
            DeviceMemory.at(address, SIZE).close()
        except CudaError as error:
            errors.append(str(error))
    try:
        copies()
    except CudaError as error:
        errors.append(str(error))
    page = ControlPage()
    timeline = Timeline(page)
    try:
        timeline.follow(StreamSignals(0, page))
        with ThreadPoolExecutor(1) as other:  # where the device's context is not the current one
            numbers = list(other.map(timeline.signal_on, streams))
    except CudaError as error:
        errors.append(str(error))
    else:
        until(timeline, numbers[-1])
    cuda.call("cuCtxSynchronize")  # a page is let go when its last event has happened
    timeline.follow(None)
    page.close()
    return errors


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
    """Also where it has no name for its error."""
    with refused(CudaError, "start the CUDA driver", "(999)"):
        DeviceMemory.at(4096, 1)


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
    timeline.follow(None)
    with refused(UsageError, "no CUDA memory is registered"):
        timeline.signal_on(idle)
    timeline.signal(timeline.reserve())
    assert timeline.reached == 5


def a_page_that_is_written_to_later_stays() -> None:
    """Ending while a stream has yet to write neither waits nor takes the memory away."""
    cuda.use_device()
    page, timeline = signalled()
    stream = held_up(allocated())
    number = timeline.signal_on(stream)
    timeline.follow(None)
    page.close()
    switch("hold=")
    cuda.call("cuStreamSynchronize", stream)
    assert page.timeline == number


def a_page_stays_when_a_write_is_not_marked() -> None:
    """The stream writes, but the event after it failed: that nothing will write is not known."""
    cuda.use_device()
    page, timeline = signalled()
    stream = held_up(allocated())
    switch("fail=cuEventRecord:1:999")
    with refused(CudaError, "record an event"):
        timeline.signal_on(stream)
    switch("fail=")
    timeline.follow(None)
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


def a_failed_signal_raises_and_the_next_one_counts() -> None:
    """A number that the driver did not take is skipped over by the next."""
    cuda.use_device()
    _, timeline = signalled()
    stream = cuda.new_stream()
    switch("fail=cuStreamWriteValue64:1:999")
    with refused(CudaError, "write 1 from a stream"):
        timeline.signal_on(stream)
    until(timeline, timeline.signal_on(stream))
    assert timeline.reached == 2


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
        ctypes.c_uint64.from_address(address).value = value

    cuda_driver.write_value = write


def a_write_counts_when_it_is_marked() -> None:
    """Else the event says that nothing will write while a stream has yet to."""
    StreamSignals._marked = property(lambda _: True, lambda _, __: None)  # type: ignore[assignment]  # as its stand-in


def a_page_is_let_go_when_nothing_will_write_to_it() -> None:
    """Else a stream writes where nothing is registered, and the context is lost."""
    cuda_driver.has_happened = lambda event: True  # noqa: ARG005  # as its stand-in


def without(rule: str, scenario: str) -> None:
    """Run a scenario without a rule; it should not succeed."""
    globals()[rule]()
    globals()[scenario]()


def names_its_memory() -> None:
    """Print the device of new memory."""
    cuda.use_device()
    print(DeviceMemory.at(allocated(), SIZE).device)
