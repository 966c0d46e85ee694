"""Dynamo's index of KV events, by the rules of its code of 2026.

Its Rust code: lib/kv-router/src/zmq_wire reads events, lib/llm/src/kv_router/publisher/dedup.rs
counts them, lib/kv-router/src/indexer/lower_tier.rs holds the tiers below the device. What matters:

- A topic is one worker's. Only blocks of the main attention are taken: kv_cache_spec_kind says so,
  or for an event without one what was learned of its group; of a group of which nothing was
  learned only group 0.
- A store is taken up to the first block that is not of the router's size or has no tokens any
  more: one without tokens, or with block_size 0, holds no block. A store of a hash that occurs
  twice in it, or is its own parent, is dropped.
- Stores and removals of a block are counted for each worker and tier: each store adds one, and only
  the removal that takes the last one reaches the index. **Who tells of a block twice and removes it
  once leaves it in the index for ever.**
- Below the device a block is an edge from its parent to it. The parent need not be known. A block
  that is known with another parent or other tokens ends the walk over its event.
- On the device a store with an unknown parent is dropped.
- AllBlocksCleared takes all that the worker has, in all tiers.

Cache salts, which only some versions read, are left out here.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.routers.wire import low64

TIERS = {
    "GPU": "device",
    "DEVICE": "device",
    "CPU": "host",
    "CPU_PINNED": "host",
    "CPU_TIER1": "host",
    "CPU_TIER2": "disk",
    "DISK": "disk",
    "NVME": "disk",
    "STORAGE": "disk",
    "EXTERNAL": "external",
    "NETWORK": "external",
    "REMOTE": "external",
    "SHARED": "external",
}
MAIN_KINDS = {"full_attention", "mla_attention", "sink_full_attention"}
MM_IDENTIFIER_DIGITS = 64


class Edge(NamedTuple):
    """How a block follows its parent: the parent's hash, and what the block's tokens are."""

    parent: int | None
    local: tuple[object, ...]


class Tier:
    """What one worker has in one tier; `counts` says how often it told of a block."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.edges: dict[int, Edge] = {}
        self.blocks: dict[Edge, int] = {}

    def add(self, block: int, edge: Edge) -> bool:
        """Take a block; whether it is there then, and not known otherwise."""
        if self.edges.get(block, edge) != edge or self.blocks.get(edge, block) != block:
            return False
        self.edges[block], self.blocks[edge] = edge, block
        return True

    def remove(self, block: int) -> None:
        """The last removal of a block takes it away; one of an unknown block does nothing."""
        self.counts[block] -= 1
        if self.counts[block] <= 0:
            del self.counts[block]
            edge = self.edges.pop(block, None)
            if edge is not None:
                del self.blocks[edge]


class DynamoIndex:
    """What Dynamo knows after these events.

    Args:
        block_tokens: tokens of a block, as the router was told.

    Attributes:
        dropped: by reason, how many events or blocks it did not take.
    """

    def __init__(self, block_tokens: int = 16) -> None:
        self.block_tokens = block_tokens
        self.dropped: Counter[str] = Counter()
        self._kinds: dict[tuple[str, int], str] = {}  # by worker and group
        self._tiers: dict[tuple[str, str], Tier] = defaultdict(Tier)  # by worker and name

    def take(self, topic: str, batch: Any) -> None:
        """Take the events of one message, in order."""
        for event in batch.events:
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                for place in [place for place in self._tiers if place[0] == topic]:
                    del self._tiers[place]
                continue
            if not self._is_main(topic, event):
                self.dropped["not main attention"] += 1
                continue
            name = TIERS.get(event.medium or "GPU", "device")
            tier = self._tiers[topic, name]
            hashes = [low64(each) for each in event.block_hashes]
            if kind == "BlockStored":
                self._store(tier, event, hashes, anywhere=name != "device")
                continue
            for each in hashes:
                tier.remove(each)

    # ---------------------------------------------------------------- queries

    def held(self, topic: str, tier: str = "host") -> set[int]:
        """The blocks of a worker in a tier."""
        return set(self._tiers[topic, tier].edges)

    def prefix(
        self,
        topic: str,
        tokens: Sequence[int],
        lora: str | None = None,
        extra: Sequence[Sequence[Any] | None] | None = None,
    ) -> int:
        """How many of a prompt's first blocks the worker has: on the device, then below it."""
        parent, count = None, 0
        for tier in ("device", "host", "disk", "external"):
            blocks = self._tiers[topic, tier].blocks
            while (count + 1) * self.block_tokens <= len(tokens):
                local = self._local(tokens, count, lora, extra)
                if (found := blocks.get(Edge(parent, local))) is None:
                    break
                parent, count = found, count + 1
        return count

    # ---------------------------------------------------------------- changes

    def _is_main(self, topic: str, event: Any) -> bool:
        kind, group = getattr(event, "kv_cache_spec_kind", None), event.group_idx
        if kind is not None and group is not None:
            self._kinds[topic, group] = kind
        if kind is None and group is not None:
            kind = self._kinds.get((topic, group))
            if kind is None:
                return bool(group == 0)
        return kind is None or kind in MAIN_KINDS

    def _store(self, tier: Tier, event: Any, hashes: list[int], *, anywhere: bool) -> None:
        """Take a store; `anywhere`: also after a parent that is not known."""
        parent = None if event.parent_block_hash is None else low64(event.parent_block_hash)
        if len({*hashes, parent}) != len(hashes) + 1:
            self.dropped["a hash twice"] += 1
            return
        tokens = event.token_ids
        whole = len(tokens) // self.block_tokens if event.block_size == self.block_tokens else 0
        if whole < len(hashes):
            self.dropped["no tokens, or another block size"] += len(hashes) - whole
            hashes = hashes[:whole]
        tier.counts.update(hashes)
        if not anywhere and parent is not None and parent not in tier.edges:
            self.dropped["unknown parent"] += len(hashes)
            return
        for at, block in enumerate(hashes):
            edge = Edge(parent, self._local(tokens, at, event.lora_name, event.extra_keys))
            if not tier.add(block, edge):
                self.dropped["known otherwise"] += len(hashes) - at
                return
            parent = block

    def _local(
        self,
        tokens: Sequence[int],
        at: int,
        lora: str | None,
        extra: Sequence[Sequence[Any] | None] | None,
    ) -> tuple[object, ...]:
        """What tells a block from others after the same parent."""
        begin = at * self.block_tokens
        keys = (extra[at] if extra and at < len(extra) else None) or ()
        names = tuple(each[0] if isinstance(each, list | tuple) else each for each in keys)
        pictures = tuple(n for n in names if isinstance(n, str) and len(n) == MM_IDENTIFIER_DIGITS)
        return (*tokens[begin : begin + self.block_tokens], lora, pictures)

    def __repr__(self) -> str:
        counts = {" ".join(place): len(tier.edges) for place, tier in self._tiers.items()}
        return f"<DynamoIndex {counts}, dropped {dict(self.dropped)}>"
