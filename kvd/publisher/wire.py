"""The wire format of KV events, which is vLLM's: structures, bytes, topics.

A message has three frames: the topic, a sequence number of 8 bytes big-endian, and the payload: a
msgpack array of a time, events and the data-parallel rank. An event is a map whose `type` names
it. Fields that have a default and hold it are left out. Hashes are numbers of 64 bits, as vLLM
writes them unless it is told otherwise: the last 8 bytes, big-endian.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from kvd_proto.announcements import Announcement, RemovedBlocks

MEDIUM, LOCALITY, OWNERSHIP = "CPU", "LOCAL", "kvd"
MEDIUM_BELOW = "STORAGE"
MAX_BATCH_BYTES = 16 * 1024  # of events, where a batch has several
MAX_HASHES = 512  # of a removal
END = (-1).to_bytes(8, "big", signed=True)
"""The sequence number that ends an answer to a request for replay."""


class BlockStored(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Blocks are there from now on, each the child of the one before; fields as vLLM has them."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: Sequence[Sequence[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Blocks are there no more."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """No block is there any more, in no medium."""


class Message(NamedTuple):
    """What subscribers receive, as frames; see `frames`."""

    topic: bytes
    sequence: int
    payload: bytes

    @property
    def frames(self) -> tuple[bytes, bytes, bytes]:
        """The three frames."""
        return self.topic, self.sequence.to_bytes(8, "big"), self.payload


_encode = msgspec.msgpack.Encoder().encode


def topic(engine: str, model: str) -> bytes:
    """Return the topic of an engine, in llm-d's form: ``kv@ENGINE@MODEL``.

    llm-d takes it apart at every ``@``, so one that is in a name is written ``%40``, and ``%``
    as ``%25``: no two engines have the same topic.
    """
    names = (name.replace("%", "%25").replace("@", "%40") for name in (engine, model))
    return "@".join(("kv", *names)).encode()


def hash_number(block_hash: bytes) -> int:
    """Return a block's hash as the events have it."""
    return int.from_bytes(block_hash[-8:], "big")


def encode_event(blocks: Announcement, locality_below: str | None = LOCALITY) -> bytes:
    """Return the event that says this; `locality_below` is that of blocks in tiers."""
    medium, locality = (MEDIUM_BELOW, locality_below) if blocks.below else (MEDIUM, LOCALITY)
    hashes = [hash_number(each) for each in blocks.hashes]
    event: BlockStored | BlockRemoved
    if isinstance(blocks, RemovedBlocks):
        event = BlockRemoved(hashes, medium, blocks.group, locality, OWNERSHIP)
    else:
        event = BlockStored(
            block_hashes=hashes,
            parent_block_hash=hash_number(blocks.parent) if blocks.parent else None,
            token_ids=array("I", blocks.tokens).tolist(),
            block_size=blocks.block_size,
            lora_id=None,  # replaced by the name
            medium=medium,
            lora_name=blocks.lora,
            extra_keys=blocks.extra,
            group_idx=blocks.group,
            kv_cache_spec_kind=blocks.kind or None,
            kv_cache_spec_sliding_window=blocks.window,
            locality=locality,
            ownership=OWNERSHIP,
        )
    return _encode(event)


CLEARED = _encode(AllBlocksCleared())
"""The event that takes back everything a topic has said."""


def payloads(events: Iterable[bytes], time: float) -> Iterator[bytes]:
    """Yield payloads that hold these encoded events, in order; each as many as it may hold.

    Args:
        events: encoded.
        time: of the batch, unix seconds.
    """
    batch: list[msgspec.Raw] = []
    size = 0
    for event in events:
        if batch and size + len(event) > MAX_BATCH_BYTES:
            yield _encode((time, batch, 0))
            batch, size = [], 0
        batch.append(msgspec.Raw(event))
        size += len(event)
    if batch:
        yield _encode((time, batch, 0))
