"""The payloads that docs/events.md shows."""

import re
from array import array
from pathlib import Path

import msgspec

from kvd.publisher.wire import CLEARED, encode_event, payloads
from kvd_proto.announcements import RemovedBlocks, StoredBlocks
from tests.routers.vectors import PAYLOADS

PAGE = Path(__file__).parents[2] / "docs" / "events.md"
TIME = 1764000000.0


def _hash(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_the_page_shows_what_kvd_and_vllm_encode() -> None:
    """Each vector is what the daemon's publisher writes, and what vLLM wrote of the same."""
    stored = StoredBlocks(
        hashes=(_hash(11), _hash(12)),
        parent=b"",
        tokens=array("I", range(1, 9)).tobytes(),
        block_size=4,
        group=0,
        kind="full_attention",
        window=None,
        lora=None,
        extra=None,
    )
    removed = RemovedBlocks((_hash(12),), 0)
    events = [encode_event(stored), encode_event(removed), CLEARED]
    written = [payload.hex() for event in events for payload in payloads([event], TIME)]
    shown = re.findall(r"```hex\n([0-9a-f\n]+)```", PAGE.read_text(encoding="utf-8"))
    assert [each.replace("\n", "") for each in shown] == written
    assert written == [PAYLOADS[name] for name in ("stored 11 12", "removed 12", "cleared")]


def test_the_page_names_every_field() -> None:
    """Whatever a payload has is in the page's tables."""
    page = PAGE.read_text(encoding="utf-8")
    for payload in PAYLOADS.values():
        for event in msgspec.msgpack.decode(bytes.fromhex(payload))[1]:
            assert {field for field in event if f"`{field}`" not in page} == set()
