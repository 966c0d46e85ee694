"""Descriptions of chunks: what is written is read again, and nothing else is believed."""

import os
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvd_proto.descriptions import (
    HEADER_BYTES,
    MAX_DESCRIPTION_BYTES,
    MAX_HASH_BYTES,
    MAX_LOOKAHEAD_TOKENS,
    Description,
    DescriptionsView,
    decode,
    encode,
    max_description_bytes,
    pack_header,
    pack_record,
    record_bytes,
    record_offset,
)
from kvd_proto.errors import DescriptionError
from tests.layouts import flat_layout

RECORD = 1024
SLOTS = 4
HASHES = st.binary(min_size=1, max_size=MAX_HASH_BYTES)
NUMBERS = st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
PLAIN = NUMBERS | st.text() | st.binary()
EXTRA = st.one_of(PLAIN, st.lists(st.one_of(st.none(), PLAIN), max_size=3).map(tuple))


@st.composite
def descriptions(draw: st.DrawFn) -> Description:
    """Any description of up to three blocks."""
    hashes = tuple(draw(st.lists(HASHES, min_size=1, max_size=3)))
    size, blocks = draw(st.integers(1, 4)), len(hashes)
    keys = st.one_of(st.none(), st.lists(EXTRA, max_size=3).map(tuple))
    return Description(
        parent=draw(st.binary(max_size=MAX_HASH_BYTES)),
        hashes=hashes,
        tokens=draw(st.binary(min_size=4 * size * blocks, max_size=4 * size * blocks)),
        block_size=size,
        group=draw(st.integers(0, 1023)),
        kind=draw(st.text()),
        window=draw(st.none() | st.integers(1, 2**31)),
        lora=draw(st.none() | st.text()),
        extra=draw(st.none() | st.lists(keys, min_size=blocks, max_size=blocks).map(tuple)),
        lookahead=bytes(4 * draw(st.integers(0, MAX_LOOKAHEAD_TOKENS))),
    )


def described(blocks: int = 2, size: int = 4, **changes: Any) -> Description:
    """A description of so many blocks of so many tokens."""
    tokens = b"".join(n.to_bytes(4, "little") for n in range(blocks * size))
    hashes = tuple(b"%032d" % n for n in range(blocks))
    plain = Description(parent=b"parent", hashes=hashes, tokens=tokens, block_size=size)
    return msgspec.structs.replace(plain, **changes)


@pytest.fixture(scope="module")
def fd() -> Iterator[int]:
    """A memory file."""
    fd = os.memfd_create("descriptions")
    yield fd
    os.close(fd)


def write(fd: int, *records: tuple[int, int, bytes]) -> DescriptionsView:
    """Make a file of these records: slot, generation and bytes."""
    os.ftruncate(fd, 0)
    os.pwrite(fd, pack_header(RECORD), 0)
    for slot, generation, encoded in records:
        os.pwrite(fd, pack_record(slot, generation, encoded), record_offset(slot, RECORD))
    return DescriptionsView(fd)


@given(descriptions())
def test_a_description_survives(description: Description) -> None:
    """Decoding gives what was encoded."""
    assert decode(encode(description)) == description


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hashes": ()}, "32 bytes of tokens for 0 blocks of 4 tokens"),
        ({"tokens": bytes(31)}, "31 bytes of tokens for 2 blocks of 4 tokens: 4 for each token"),
        ({"hashes": (b"", b"h")}, "hashes of [0, 1] bytes, a parent of 6: 1 to 64"),
        ({"parent": bytes(65)}, "a parent of 65: 1 to 64"),
        ({"extra": (None,)}, "extra has 1 items for 2 blocks"),
        ({"extra": (None, ({},))}, "None or plain values"),
        ({"extra": (None, (((("a",),),),))}, "None or plain values"),
        ({"extra": (None, (2**64,))}, "pass the declared types"),
        ({"lookahead": bytes(6)}, "6 bytes of lookahead: 4 for each token are needed"),
        ({"lookahead": bytes(260)}, "260 bytes of lookahead: 4 for each token are needed, for 64"),
        ({"kind": "k" * MAX_DESCRIPTION_BYTES}, "a description of 1048"),
    ],
)
def test_what_contradicts_itself_is_no_description(changes: dict[str, Any], text: str) -> None:
    """Each field that does not fit is refused with one error that names it."""
    with pytest.raises(DescriptionError) as caught:
        encode(described(**changes))
    assert text in str(caught.value)


@given(st.binary())
@example(b"\x80")
@example(msgspec.msgpack.encode(described())[:-1])
@example(msgspec.msgpack.encode([b"", [b"h"], b"1234", 1, 0, "k", None, None, [[{b"": [{}]}]]]))
@example(msgspec.msgpack.encode([b"", [b"h"], b"1234", 1, 0, "k", None, None, [[[[]]]]]))
@example(b"\x99\xc4\x00\x91\xc4\x01h\xc4\x041234\x01\x00\xa0\xc0\xc0" + b"\x91" * 100_000)
@example(b"\x99\xc4\x00\x91\xc4\x01h\xc4\x041234\x01\x00\xa0\xc0\xc0\x91\x91\x81\x81\x01\x01\x01")
def test_other_bytes_are_no_description(encoded: bytes) -> None:
    """Whatever bytes there are: they are decoded to a valid description, or there is one error."""
    try:
        description = decode(encoded)
    except DescriptionError:
        return
    assert decode(encode(description)) == description


def test_a_description_is_read_for_its_slot_and_generation_alone(fd: int) -> None:
    """Another generation of the slot, and another slot, have none."""
    view = write(fd, (2, 7, encode(described())))
    assert view.record_bytes == RECORD
    assert view.read(2, 7) == described()
    others = [(2, 6), (2, 8), (1, 7), (3, 7), (0, 0), (1, 0), (-1, 7), (2**40, 7), (2, -1)]
    assert not any(view.read(*other) for other in others)


@given(
    st.lists(st.tuples(st.integers(0, HEADER_BYTES + SLOTS * RECORD), st.binary(max_size=64))),
    st.integers(0, HEADER_BYTES + SLOTS * RECORD),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_file_has_is_read_without_an_exception(
    fd: int, writes: list[tuple[int, bytes]], end: int
) -> None:
    """Bytes written anywhere, and a file cut anywhere, give a whole description or none."""
    encoded = encode(described())
    write(fd, *((slot, 5, encoded) for slot in range(SLOTS)))
    for at, junk in writes:
        os.pwrite(fd, junk, at)
    os.ftruncate(fd, end)
    view = DescriptionsView(fd)
    assert {view.read(slot, 5) for slot in range(SLOTS)} <= {None, described()}


@pytest.mark.parametrize("factor", [1, 2, 64])
def test_a_record_has_room_for_what_an_engine_says_of_its_chunk(factor: int) -> None:
    """Hashes of 32 bytes, an adapter's name and an image in each block fit."""
    layout = flat_layout(4096, blocks=64, factor=factor)
    size = layout.groups[0].block_size
    image, lookahead = (("i" * 64, -17),), bytes(4 * MAX_LOOKAHEAD_TOKENS)
    fields = {"parent": bytes(32), "kind": "full_attention", "lora": "a" * 200}
    extra = (image,) * factor
    description = described(factor, size, extra=extra, lookahead=lookahead, **fields)
    record = record_bytes(layout)
    assert record % 64 == 0
    assert len(encode(description)) <= max_description_bytes(record) < record
