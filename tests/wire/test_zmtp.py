"""The decoder of ZMTP: any pieces, any junk, and nothing is kept without need."""

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import BadFrame
from kvd.wire.zmtp import FRAMES_AT_ONCE, MAX_PARTS, MAX_PINGS, Incoming
from kvd_proto.zmtp import frame_header, opening

LIMIT = 4096
HELLO = opening(b"DEALER")


def part(body: bytes, *, more: bool = False) -> bytes:
    """A frame of a message."""
    header = bytearray(frame_header(len(body)))
    header[0] |= more
    return bytes(header) + body


def arrived(incoming: Incoming, data: bytes) -> list[bytes]:
    """All messages that are there when these bytes have come, taken as the router does."""
    if len(incoming) == 0 and data and (only := incoming.only(memoryview(data))) is not None:
        return [only]
    incoming.feed(data)
    return everything(incoming)


def everything(incoming: Incoming) -> list[bytes]:
    """All messages that have arrived."""
    found = []
    while (message := incoming.take()) is not None:
        found.append(message)
    return found


@given(
    messages=st.lists(st.lists(st.binary(max_size=700), min_size=1, max_size=4), max_size=8),
    cuts=st.lists(st.integers(0, 300), min_size=1, max_size=20),
)
def test_messages_of_one_part_arrive_however_they_are_cut(
    messages: list[list[bytes]], cuts: list[int]
) -> None:
    """What has several parts is left out and counted; all else comes whole and in order.

    A cut of 0 is at the end of a frame.
    """
    frames = [HELLO] + [
        part(body, more=index < len(parts) - 1)
        for parts in messages
        for index, body in enumerate(parts)
    ]
    ends = list(itertools.accumulate(map(len, frames)))
    stream, incoming, got, at, turn = b"".join(frames), Incoming(LIMIT), list[bytes](), 0, 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        end = at + size if size else next(end for end in ends if end > at)
        got += arrived(incoming, stream[at:end])
        at, turn = end, turn + 1
    assert got == [parts[0] for parts in messages if len(parts) == 1]
    assert incoming.dropped == sum(len(parts) > 1 for parts in messages)
    assert len(incoming) == 0


@given(junk=st.binary(max_size=400), greeted=st.booleans())
def test_junk_is_an_error_of_ours_or_nothing(junk: bytes, greeted: bool) -> None:
    """Random bytes, before and after a greeting, never raise anything but BadFrame."""
    incoming = Incoming(LIMIT)
    with contextlib.suppress(BadFrame):
        arrived(incoming, HELLO if greeted else b"")
        arrived(incoming, junk)
    assert len(incoming) <= len(HELLO) + len(junk)


def test_a_message_above_the_limit_is_refused_before_its_bytes_come() -> None:
    """The length alone is enough, and the error names both figures and the bound."""
    incoming = Incoming(LIMIT)
    incoming.feed(HELLO + part(bytes(LIMIT)) + frame_header(LIMIT + 1))
    assert incoming.take() == bytes(LIMIT)
    with pytest.raises(BadFrame, match=f"{LIMIT + 1} bytes, the limit is {LIMIT}") as caught:
        incoming.take()
    assert caught.value.limit == "message_bytes"


@pytest.mark.parametrize("size", [0, 100, LIMIT])
def test_a_message_without_an_end_is_refused_and_nothing_of_it_is_kept(size: int) -> None:
    """Endless parts, empty or of the largest size, end in an error after a bounded number."""
    incoming = Incoming(LIMIT)
    incoming.feed(HELLO)
    endless = part(bytes(size), more=True)
    for _ in range(min(MAX_PARTS, LIMIT // size if size else MAX_PARTS)):
        incoming.feed(endless)
        assert incoming.take() is None
        assert len(incoming) == 0
    incoming.feed(endless)
    with pytest.raises(BadFrame, match="no end") as caught:
        incoming.take()
    assert caught.value.limit == "message_parts"


@pytest.mark.parametrize(
    "start", [b"GET / HTTP/1.1", b"\xff" + bytes(8) + b"\x7f\x01", HELLO[:12] + b"CURVE".ljust(52)]
)
def test_other_protocols_are_refused(start: bytes) -> None:
    """HTTP, an old ZMTP and an unknown mechanism end at once."""
    incoming = Incoming(LIMIT)
    incoming.feed(start)
    with pytest.raises(BadFrame, match="greeting"):
        incoming.take()


def command(name: bytes, body: bytes) -> bytes:
    """A command."""
    content = bytes((len(name),)) + name + body
    return bytes((4, len(content))) + content


@pytest.mark.parametrize("context", [b"", b"c", b"0123456789abcdef"])
def test_a_ping_is_owed_a_pong_with_its_context(context: bytes) -> None:
    """The answer repeats what came with it, and messages are whole."""
    incoming = Incoming(LIMIT)
    incoming.feed(
        HELLO + part(b"before") + command(b"PING", b"\x00\x19" + context) + part(b"after")
    )
    assert everything(incoming) == [b"before", b"after"]
    assert incoming.pongs == [command(b"PONG", context)]


def test_pings_are_taken_in_a_bounded_number_at_a_time() -> None:
    """A flood of them waits for its answers to be fetched, and what follows it is not lost."""
    incoming = Incoming(LIMIT)
    incoming.feed(HELLO + command(b"PING", b"\0\0") * (MAX_PINGS + 1) + part(b"after"))
    assert incoming.take() is None
    assert len(incoming.pongs) == MAX_PINGS
    incoming.pongs.clear()
    assert incoming.take() == b"after"
    assert len(incoming.pongs) == 1


@pytest.mark.parametrize("frame", [b"\x04\0", b"\x01\0\0\0"])
def test_what_is_no_message_is_passed_over_in_a_bounded_number_at_a_time(frame: bytes) -> None:
    """Commands without a sense and messages of several parts; what comes after them is there."""
    incoming = Incoming(1000)
    incoming.feed(HELLO + frame * 10 * FRAMES_AT_ONCE + part(b"after"))
    looks = 0
    while (found := incoming.take()) is None:
        assert incoming.more
        looks += 1
    assert found == b"after"
    assert not incoming.more
    assert looks >= 10


@pytest.mark.parametrize("body", [b"", b"\0", bytes(19)])
def test_a_ping_of_another_size_is_refused(body: bytes) -> None:
    """It has a time to live of two bytes and up to sixteen of context."""
    incoming = Incoming(LIMIT)
    incoming.feed(HELLO + command(b"PING", body))
    with pytest.raises(BadFrame, match=f"PING with {len(body)} bytes"):
        incoming.take()


def test_other_commands_are_ignored() -> None:
    """An unexpected PONG and commands of other sockets are skipped."""
    incoming = Incoming(LIMIT)
    strange = command(b"PONG", b"x") + command(b"SUBSCRIBE", b"x") + command(b"", b"")
    incoming.feed(HELLO + strange + part(b"after"))
    assert everything(incoming) == [b"after"]
    assert incoming.pongs == []


def test_traffic_before_ready_is_refused() -> None:
    """A message before the handshake's end, and a command that is not READY, end at once."""
    for early in (part(b"x"), bytes((4, 5)) + b"\x04PING"):
        incoming = Incoming(LIMIT)
        incoming.feed(HELLO[:64] + early)
        with pytest.raises(BadFrame):
            incoming.take()
