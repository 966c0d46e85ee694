"""The decoder of ZMTP: any pieces, any junk, and nothing is kept without need."""

import contextlib
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd_proto.errors import BadFrame
from kvd_proto.zmtp import MAX_COMMANDS, Decoder, command, frame_header, opening

LIMIT = 4096
HELLO = opening(b"DEALER")


def message(body: bytes) -> bytes:
    """A message as it is sent."""
    return frame_header(len(body)) + body


def decoded(decoder: Decoder, data: bytes) -> list[bytes]:
    """All messages that are there when these bytes have come, taken as a `Channel` does."""
    only = decoder.only_message(memoryview(data), len(data)) if data else None
    if only is not None:
        return [only]
    decoder.feed(data)
    messages = []
    while (body := decoder.next_message()) is not None:
        messages.append(body)
    return messages


@given(
    bodies=st.lists(st.binary(max_size=700), max_size=12),
    cuts=st.lists(st.integers(0, 300), min_size=1, max_size=20),
)
def test_messages_arrive_whole_and_in_order_however_they_are_cut(
    bodies: list[bytes], cuts: list[int]
) -> None:
    """A cut of 0 is at the end of a frame; then nothing is kept of what came before."""
    stream, ends = HELLO, [len(HELLO)]
    for body in bodies:
        stream += message(body)
        ends.append(len(stream))
    decoder, got, at, turn = Decoder(LIMIT), list[bytes](), 0, 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        end = at + size if size else next(end for end in ends if end > at)
        got += decoded(decoder, stream[at:end])
        at, turn = end, turn + 1
        if at in ends:
            assert (len(decoder), decoder.consumed) == (0, at)
    assert got == bodies


@given(junk=st.binary(max_size=400), greeted=st.booleans())
def test_random_bytes_raise_nothing_but_bad_frame(junk: bytes, greeted: bool) -> None:
    """Random bytes, before and after a greeting, never raise anything but BadFrame."""
    decoder = Decoder(LIMIT)
    with contextlib.suppress(BadFrame):
        decoded(decoder, HELLO if greeted else b"")
        decoded(decoder, junk)
    assert len(decoder) <= len(HELLO) + len(junk)


@pytest.mark.parametrize("whole", [False, True])
def test_a_message_above_the_limit_is_refused_before_its_bytes_come(whole: bool) -> None:
    """The length alone is enough, and the error names both figures and the bound."""
    decoder = Decoder(LIMIT)
    assert decoded(decoder, HELLO + message(bytes(LIMIT))) == [bytes(LIMIT)]
    with pytest.raises(BadFrame, match=f"{LIMIT + 1} bytes, the limit is {LIMIT}") as caught:
        decoded(decoder, message(bytes(LIMIT + 1)) if whole else frame_header(LIMIT + 1))
    assert caught.value.limit == "message_bytes"


REFUSED = {
    "HTTP": b"GET / HTTP/1.1",
    "an old ZMTP": b"\xff" + bytes(8) + b"\x7f\x01",
    "an unknown mechanism": HELLO[:12] + b"CURVE".ljust(52),
    "a message before READY": HELLO[:64] + message(b"x"),
    "a command before READY": HELLO[:64] + command(b"PING", b"\0\0"),
    "a message of several parts": HELLO + b"\x01\0\0\0",
    "a large part": HELLO + b"\x03" + (2**40).to_bytes(8, "big"),
    "a flag that has no meaning": HELLO + b"\x08\0",
    "a command of several parts": HELLO + b"\x05\0",
    "an endless command": HELLO + b"\x06" + (2**20).to_bytes(8, "big"),
    "a PING without a time to live": HELLO + command(b"PING", b"\0"),
    "a PING with a long context": HELLO + command(b"PING", bytes(19)),
}


@pytest.mark.parametrize("start", REFUSED.values(), ids=REFUSED)
def test_what_is_no_message_is_refused_at_once(start: bytes) -> None:
    """Other protocols, early traffic, several parts and commands out of bounds."""
    with pytest.raises(BadFrame):
        decoded(Decoder(LIMIT), start)


def test_pings_are_taken_in_a_bounded_number_at_a_time() -> None:
    """A flood of them waits for its answers to be fetched, and what follows it is not lost."""
    decoder = Decoder(LIMIT)
    assert decoded(decoder, HELLO) == []
    flood = command(b"PING", b"\0\0") * (MAX_COMMANDS + 1)
    assert decoded(decoder, flood + message(b"after")) == []
    assert decoder.take_pongs() == command(b"PONG", b"") * MAX_COMMANDS
    assert decoder.next_message() == b"after"
    assert decoder.take_pongs() == command(b"PONG", b"")


def test_a_message_that_was_returned_is_not_kept() -> None:
    """Also where the beginning of the next one has come with it."""
    large = 8 * 2**20
    decoder = Decoder(large)
    tracemalloc.start()
    try:
        assert decoded(decoder, HELLO + message(bytes(large)) + b"\0") == [bytes(large)]
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(decoder) == 1
    assert kept < large // 8
