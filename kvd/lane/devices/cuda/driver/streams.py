"""Streams and events."""

from typing import NewType

from kvd.lane.devices.cuda.driver.calls import NOT_READY, bindings, call, call_for_code, check

Stream = NewType("Stream", object)
Event = NewType("Event", object)


def priorities() -> tuple[int, int]:
    """The numbers of the least and of the greatest priority; equal where there is only one."""
    least, greatest = call("asking for priorities", "cuCtxGetStreamPriorityRange")
    return int(least), int(greatest)


def create_stream(priority: int) -> Stream:
    """A stream that waits for no other."""
    cuda = bindings()
    flags = cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
    return Stream(call("creating a stream", "cuStreamCreateWithPriority", flags, priority))


def destroy_stream(stream: Stream) -> None:
    """Destroy it; nothing may be in flight there."""
    call("destroying a stream", "cuStreamDestroy", stream)


def wait_for_stream(stream: Stream) -> None:
    """Wait for everything that was enqueued there."""
    call("waiting for a stream", "cuStreamSynchronize", stream)


def is_idle(stream: Stream) -> bool:
    """Whether everything enqueued there has ended."""
    return _reached("asking whether a stream is idle", "cuStreamQuery", stream)


def create_event() -> Event:
    """An event that keeps its time."""
    flags = bindings().CUevent_flags.CU_EVENT_DEFAULT
    return Event(call("creating an event", "cuEventCreate", flags))


def destroy_event(event: Event) -> None:
    """Destroy it."""
    call("destroying an event", "cuEventDestroy", event)


def record(event: Event, stream: Stream) -> None:
    """Let the event mark all that was enqueued on the stream until now."""
    call("recording an event", "cuEventRecord", event, stream)


def is_reached(event: Event) -> bool:
    """Whether all that the event marks has ended."""
    return _reached("asking whether copies have ended", "cuEventQuery", event)


def nanoseconds_between(start_event: Event, end_event: Event) -> int:
    """Time on the device between two events that were reached."""
    milliseconds = call("timing copies", "cuEventElapsedTime", start_event, end_event)
    return int(milliseconds * 1e6)


def _reached(attempted: str, name: str, what: object) -> bool:
    code = call_for_code(attempted, name, what)
    if code == NOT_READY:  # the usual answer, which is no error
        return False
    check(code, attempted)
    return True
