"""The codec: every message survives, every malformed one is named."""

import contextlib
import re
import traceback
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from docs import generate_protocol
from docs.generate_protocol import EXAMPLES, vector
from kvd_proto.codec import (
    HEADER_BYTES,
    MAGIC,
    MAX_MESSAGE_BYTES,
    MAX_REGISTER_BYTES,
    REQUESTS,
    WIRE,
)
from kvd_proto.errors import (
    DecodeError,
    Oversize,
    VersionMismatch,
)
from kvd_proto.jobs import MAX_ARRAY_ITEMS
from kvd_proto.messages import (
    PROTOCOL_VERSION,
    REPLY_OF,
    TAGS,
    Message,
    Ping,
    Register,
    Step,
    Store,
)
from tests.daemon.hidden import assert_hidden


def frame_of(tag: int, body: object, version: int = PROTOCOL_VERSION) -> bytes:
    """A frame with a chosen body, valid or not."""
    header = WIRE.encode(Ping(), 9)[:HEADER_BYTES]
    raw = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    return header[:4] + version.to_bytes(2, "little") + tag.to_bytes(2, "little") + header[8:] + raw


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: type(e).__name__)
def test_the_msgpack_package_speaks_for_any_client(example: Message) -> None:
    """It decodes every message to a map of its fields, and encodes that to the same message."""
    frame = vector(example)
    fields = msgpack.unpackb(frame[HEADER_BYTES:])
    assert fields.keys() <= set(type(example).__struct_encode_fields__)
    again = frame[:HEADER_BYTES] + msgpack.packb(fields)
    assert WIRE.decode(again) == WIRE.decode(frame)


def test_generated_documentation_is_current() -> None:
    """docs/protocol.md is what `make docs` would write."""
    written = generate_protocol.FILE.read_text(encoding="utf-8")
    generated = written.split(generate_protocol.MARKER)[1]
    assert generated.strip() == generate_protocol.generated().strip()


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"xyz\0" + bytes(60),
        WIRE.encode(Ping())[: HEADER_BYTES - 1],
        frame_of(0x30, {}, version=PROTOCOL_VERSION - 1),
        frame_of(0x30, {}, version=PROTOCOL_VERSION + 1),
        frame_of(0x7777, {}),
        *(frame_of(0x30, body) for body in (b"", b"\xc1", [1, 2], {1: 2}, {"more": 1})),
        frame_of(0x30, msgspec.msgpack.encode({}) + b"\0"),
        frame_of(0x30, msgspec.msgpack.Ext(4, b"x")),
        frame_of(0x20, {}),
        *(frame_of(0x10, {"keys": keys}) for keys in (3, ["text"], [b""], [bytes(49)])),
        frame_of(0x10, {"keys": [b"k"] * (MAX_ARRAY_ITEMS + 1)}),
        frame_of(0x30, {"x": bytes(MAX_MESSAGE_BYTES)}),
        frame_of(0x42, b"\x81\xa6reason\xa1\xff"),
        *(frame_of(0x10, {"unpinned": [lease]}) for lease in (-1, 2**63, 1.0)),
        frame_of(0x10, {"refused": 2**32}),
        frame_of(0x33, b"\x81\xa6status\x81\xa1a" + b"\x91" * 5000 + b"\xc0"),
    ],
)
def test_a_malformed_frame_is_refused(frame: bytes) -> None:
    """Whatever is wrong is a DecodeError with a text; another version one of its own."""
    with pytest.raises(DecodeError) as caught:
        WIRE.decode(frame)
    assert str(caught.value)
    other_version = frame[:4] == MAGIC and frame[4:6] != PROTOCOL_VERSION.to_bytes(2, "little")
    assert isinstance(caught.value, VersionMismatch) == other_version


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: type(e).__name__)
def test_the_daemon_decodes_requests_alone(example: Message) -> None:
    """Replies and notices, whose bodies may be large trees, are refused by their tag."""
    refused = pytest.raises(DecodeError, match="names no message here")
    with contextlib.nullcontext() if type(example) in REPLY_OF else refused:
        assert REQUESTS.decode(vector(example))[1] == example


@given(st.binary(max_size=300))
def test_random_bytes_never_crash_the_codec(junk: bytes) -> None:
    """Any bytes either decode or raise DecodeError."""
    for frame in (junk, WIRE.encode(Ping())[:HEADER_BYTES] + junk):
        with contextlib.suppress(DecodeError):
            WIRE.decode(frame)


KEY = "SECRETKEY"
HELLO = {
    "kind": "tool",
    "engine": "e",
    "pid": 1,
    "protocol_min": 1,
    "protocol_max": 1,
    "client": "c",
}


@pytest.mark.parametrize(
    ("tag", "body", "place"),
    [
        (0x10, {KEY: 1}, "Step: Object contains unknown field"),
        (0x10, {f"a` - at `$.{KEY}": 1}, "unknown field"),
        (0x10, {"pins": [{f"a` - at `$.{KEY}": 1}]}, "unknown field"),
        (0x10, {KEY.encode(): 1}, "Expected `str`, got `bytes`"),
        (0x10, {"used": [KEY]}, "Expected `bytes`, got `str` - at `$.used[0]`"),
        (0x10, {"slots": [KEY, b""]}, "unknown value - at `$.slots[0]`"),
        (0x10, {"slots": ["u4", KEY.encode()]}, "9 bytes are no whole number of u4 items"),
        (0x10, b"\x81\xa4used\x91\xc4\x09" + KEY.encode() + b"x", "malformed"),
        (0x10, b"\x81\xaa" + KEY.encode() + b"\xff\x01", "malformed"),
        (0x01, HELLO | {"kind": f"{KEY}' - at `$.{KEY}`"}, "unknown value - at `$.kind`"),
        (0x03, {"handles": [{"type": KEY}]}, "unknown value - at `$.handles[0].type`"),
        (0x22, {"job": 1, "status": KEY}, "unknown value - at `$.status`"),
        (0x33, {"status": {KEY: {KEY: b"\xff"}, 1: 1}}, "Expected `str`, got `int`"),
    ],
)
def test_an_error_repeats_nothing_that_the_sender_chose(tag: int, body: object, place: str) -> None:
    """Be it a field's name, a value or text; where the fault is, is said as far as we named it."""
    with pytest.raises(DecodeError, match=re.escape(place)) as caught:
        WIRE.decode(frame_of(tag, body))
    trace = "".join(traceback.format_exception(caught.value))
    assert_hidden([str(caught.value), trace], KEY.encode())


def test_a_frame_without_a_header_is_not_repeated() -> None:
    """Its first bytes may be those of a key."""
    with pytest.raises(DecodeError, match="does not begin with") as caught:
        WIRE.decode(KEY.encode() * 4)
    assert_hidden([str(caught.value)], KEY[:2].encode())


def test_too_large_a_message_is_not_sent() -> None:
    """Encoding stops at the limit that the other side would refuse."""
    keys = tuple(bytes(48) for _ in range(400_000))
    with pytest.raises(Oversize, match="16777216"):
        WIRE.encode(Step(keys=keys))


def test_an_array_above_the_documented_number_of_items_is_refused() -> None:
    """A job with 400,000 of anything is too large, and the error names both figures."""
    job = next(example for example in EXAMPLES if isinstance(example, Store))
    fields = msgspec.to_builtins(job, builtin_types=(bytes,))
    for field in ("block_ids", "group_sizes", "block_indices", "slots"):
        most, more = (
            fields | {"blocks": fields["blocks"] | {field: ["u4", bytes(4 * items)]}}
            for items in (MAX_ARRAY_ITEMS, 400_000)
        )
        WIRE.decode(frame_of(0x20, most))
        with pytest.raises(DecodeError, match=r"400000 items, at most 65536"):
            WIRE.decode(frame_of(0x20, more))


def structs_of_the_wire() -> set[type[msgspec.Struct]]:
    """Messages, and the maps inside of them."""
    structs, new = set[type[msgspec.Struct]](), list[Any](TAGS.values())
    while new:
        hint = new.pop()
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct) and hint not in structs:
            structs.add(hint)
            new += get_type_hints(hint, include_extras=True).values()
        new += get_args(hint)
    return structs


def test_every_array_has_a_documented_bound() -> None:
    """No array field of any message takes more items than the page says that an array has."""
    bounds = {}
    for kind in structs_of_the_wire():
        for field, hint in get_type_hints(kind, include_extras=True).items():
            if get_origin(get_args(hint)[0] if get_origin(hint) is Annotated else hint) is tuple:
                metas = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
                bounds[f"{kind.__name__}.{field}"] = max((m.max_length for m in metas), default=0)
    assert {name: most for name, most in bounds.items() if not 0 < most <= MAX_ARRAY_ITEMS} == {}
    assert {"RankLayout.storages", "Step.keys"} <= bounds.keys()
    text = " ".join(generate_protocol.FILE.read_text(encoding="utf-8").split())
    assert f"an integer array at most {MAX_ARRAY_ITEMS:,} items" in text
    assert f"how many items other arrays have, {MAX_ARRAY_ITEMS:,} at most" in text
    assert f"| 4 | 2 | protocol version ({PROTOCOL_VERSION}) |" in text


def test_a_registration_above_its_bounds_is_refused_before_it_is_looked_at() -> None:
    """By its bytes without a look into them, by its lists before a layout is made of them."""
    frame = WIRE.encode(next(example for example in EXAMPLES if isinstance(example, Register)))
    with pytest.raises(DecodeError, match=f"a Register of {MAX_REGISTER_BYTES + 1} bytes"):
        WIRE.decode(frame[:HEADER_BYTES] + b"\xc1" * (MAX_REGISTER_BYTES + 1 - HEADER_BYTES))
    fields = msgspec.msgpack.decode(frame[HEADER_BYTES:])
    for name, most in (("groups", 1024), ("tensors", 8192), ("storages", 4096)):
        layout = fields["layout"] | {name: fields["layout"][name][:1] * (most + 1)}
        body = msgspec.msgpack.encode(fields | {"layout": layout})
        with pytest.raises(DecodeError, match=rf"length <= {most} .*layout.{name}"):
            WIRE.decode(frame[:HEADER_BYTES] + body)
