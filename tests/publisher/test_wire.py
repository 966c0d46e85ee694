"""The bytes of KV events: those of vLLM's own encoder, and what routers read from them."""

from array import array
from typing import Any

import msgspec
import pytest

from kvd.publisher.wire import (
    CLEARED,
    MAX_BATCH_BYTES,
    Message,
    encode_event,
    hash_number,
    payloads,
    topic,
)
from kvd_proto.announcements import RemovedBlocks, StoredBlocks
from tests.publisher.vectors import BLOCKS, PAYLOADS, TIME
from tests.routers.wire import decode


@pytest.mark.parametrize("name", BLOCKS)
def test_the_bytes_are_those_of_vllm(name: str) -> None:
    """Field for field, defaults left out, hashes as numbers."""
    events = map(encode_event, BLOCKS[name])
    assert [payload.hex() for payload in payloads(events, TIME)] == [PAYLOADS[name]]


def test_everything_taken_back_is_one_event() -> None:
    """As vLLM writes it."""
    assert [payload.hex() for payload in payloads([CLEARED], TIME)] == [PAYLOADS["cleared"]]


def test_a_message_has_three_frames() -> None:
    """Topic, sequence number, payload."""
    payload = bytes.fromhex(PAYLOADS["cleared"])
    message = Message(b"kv@a@b", 258, payload)
    assert message.frames == (b"kv@a@b", b"\0\0\0\0\0\0\1\2", payload)
    assert decode(message.frames).sequence == 258


def test_batches_are_bounded_and_in_order() -> None:
    """As many events as fit, an event that is larger alone; none is lost."""
    small = encode_event(RemovedBlocks((b"h" * 32,) * 8, 0))
    tokens = array("I", range(MAX_BATCH_BYTES)).tobytes()
    large = encode_event(StoredBlocks((b"h" * 32,), b"", tokens, MAX_BATCH_BYTES, 0, "", None))
    events = [small] * 300 + [large] + [small] * 3
    made = list(payloads(events, TIME))
    decoded = [
        msgspec.msgpack.decode(payload, type=tuple[float, list[Any], int]) for payload in made
    ]
    kinds = [event["type"] for _, batch, _ in decoded for event in batch]
    assert kinds == ["BlockRemoved"] * 300 + ["BlockStored"] + ["BlockRemoved"] * 3
    assert all(len(payload) < MAX_BATCH_BYTES + 64 for payload in made if len(payload) < len(large))
    assert list(payloads([], TIME)) == []


@pytest.mark.parametrize(
    ("engine", "model", "name"),
    [
        ("pod-1", "Qwen/Qwen3-32B", b"kv@pod-1@Qwen/Qwen3-32B"),
        ("a@b", "m", b"kv@a%40b@m"),
        ("a%40b", "m@1", b"kv@a%2540b@m%401"),
        ("é", "m", "kv@é@m".encode()),
    ],
)
def test_topics_have_three_parts_whatever_the_names_are(
    engine: str, model: str, name: bytes
) -> None:
    """llm-d splits at every @; no two engines share a topic."""
    assert topic(engine, model) == name
    assert name.count(b"@") == 2


def test_hashes_are_their_last_eight_bytes() -> None:
    """Big-endian, as vLLM makes numbers of them; shorter ones are whole."""
    assert hash_number(bytes(range(32))) == int.from_bytes(bytes(range(24, 32)), "big")
    assert hash_number(b"\1\2") == 258
