"""ZMTP as the daemon hears it: any pieces, any junk, nothing kept that nobody needs."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import BadFrame
from kvd.zmtp import MAX_PARTS, Incoming, frame_header, opening

LIMIT = 4096
HELLO = opening(b"DEALER")


def part(body: bytes, *, more: bool = False) -> bytes:
    """A frame of a message."""
    header = bytearray(frame_header(len(body)))
    header[0] |= more
    return bytes(header) + body


def everything(incoming: Incoming) -> list[bytes]:
    """All messages that have arrived."""
    found = []
    while (message := incoming.take()) is not None:
        found.append(message)
    return found


@given(
    messages=st.lists(st.lists(st.binary(max_size=700), min_size=1, max_size=4), max_size=8),
    cuts=st.lists(st.integers(1, 300), min_size=1, max_size=20),
)
def test_messages_of_one_part_arrive_however_they_are_cut(
    messages: list[list[bytes]], cuts: list[int]
) -> None:
    """What has several parts is left out and counted; all else comes whole and in order."""
    stream = HELLO + b"".join(
        part(body, more=index < len(parts) - 1)
        for parts in messages
        for index, body in enumerate(parts)
    )
    incoming, got, at, turn = Incoming(LIMIT), [], 0, 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        incoming.feed(stream[at : at + size])
        got += everything(incoming)
        at, turn = at + size, turn + 1
    assert got == [parts[0] for parts in messages if len(parts) == 1]
    assert incoming.dropped == sum(len(parts) > 1 for parts in messages)
    assert len(incoming) == 0


@given(junk=st.binary(max_size=400), greeted=st.booleans())
def test_junk_is_an_error_of_ours_or_nothing(junk: bytes, greeted: bool) -> None:
    """Random bytes, before and after a greeting, never raise anything but BadFrame."""
    incoming = Incoming(LIMIT)
    incoming.feed(HELLO if greeted else b"")
    incoming.feed(junk)
    with contextlib.suppress(BadFrame):
        everything(incoming)
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
def test_a_message_without_an_end_is_given_up_and_nothing_of_it_is_kept(size: int) -> None:
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
    """HTTP, an old ZMTP and a mechanism that is not spoken here end at once."""
    incoming = Incoming(LIMIT)
    incoming.feed(start)
    with pytest.raises(BadFrame, match="greeting"):
        incoming.take()


def test_traffic_before_ready_is_refused() -> None:
    """A message before the handshake's end, and a command that is not READY, end at once."""
    for early in (part(b"x"), bytes((4, 5)) + b"\x04PING"):
        incoming = Incoming(LIMIT)
        incoming.feed(HELLO[:64] + early)
        with pytest.raises(BadFrame):
            incoming.take()
