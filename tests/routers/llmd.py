"""Indexes of KV events: the plainest one, and llm-d's by the rules of llm-d-kv-cache 7be76e1.

They take events with the names and fields of vLLM's. llm-d's Go code: pkg/kvevents/pool.go takes
events, engineadapter/common.go reads topics and hashes, pkg/kvcache/kvblock/in_memory.go holds the
index. What matters of it:

- Blocks are known by request keys: hashes of their tokens and the model or LoRA adapter, chained
  from the first block on. A map leads from engines' hashes to them; it is one map for all pods.
- A store whose parent's hash is not in that map is dropped.
- A store without tokens is another tier of blocks that are known; unknown ones are dropped.
- A removal takes one entry (pod, tier, group) from a block; once a block has no entry left, its
  hash is forgotten. A removal of an unknown hash does nothing.
- AllBlocksCleared takes all entries of a pod, of all tiers, and forgets no hash.

Here a request key is a digest of its own; llm-d's is another one, with the same equalities. Extra
keys and blocks of another size than the index's, which llm-d maps, are left out.
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

BLOCK_TOKENS = 16
ENTRIES_OF_A_BLOCK = 10


def low64(block_hash: int | bytes) -> int:
    """A block hash as routers keep it: of bytes the last eight, of a number the lowest 64 bits."""
    if isinstance(block_hash, bytes):
        return int.from_bytes(block_hash[-8:], "big")
    return block_hash & (2**64 - 1)


class PublishedBlock(NamedTuple):
    """A block that a publisher says it holds."""

    medium: str
    group: int | None
    hash: int


class BlockSet:
    """By topic, the set of what was stored and not removed."""

    def __init__(self) -> None:
        self.blocks: defaultdict[str, set[PublishedBlock]] = defaultdict(set)

    def take(self, topic: str, batch: Any) -> None:
        """Take the events of one message, in order."""
        blocks = self.blocks[topic]
        for event in batch.events:
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                blocks.clear()
                continue
            medium, group = event.medium or "GPU", event.group_idx
            named = {PublishedBlock(medium, group, low64(each)) for each in event.block_hashes}
            if kind == "BlockStored":
                blocks |= named
            else:
                blocks -= named


class Entry(NamedTuple):
    """Who holds a block."""

    pod: str
    tier: str
    group: int | None


def pod_and_model(topic: str) -> tuple[str, str]:
    """Of a topic kv@pod@model; of another one itself, and no model."""
    parts = topic.split("@")
    return (parts[1], parts[2]) if len(parts) == 3 else (topic, "")


class LlmdIndex:
    """What llm-d knows after these events."""

    def __init__(self) -> None:
        self._entries: dict[int, dict[Entry, None]] = {}  # by request key, latest last
        self._request_keys: dict[int, int] = {}  # by an engine's hash

    def take(self, topic: str, batch: Any) -> None:
        """Take the events of one message, in order."""
        pod, model = pod_and_model(topic)
        for event in batch.events:
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                self.forget(pod)
                continue
            entry = Entry(pod, (event.medium or "gpu").lower(), event.group_idx)
            hashes = [low64(each) for each in event.block_hashes]
            if kind == "BlockStored":
                self._store(event, hashes, entry, event.lora_name or model)
            else:
                self._evict(hashes, entry)

    def chain(self, model: str, tokens: Sequence[int]) -> list[int]:
        """The request keys of a prompt's whole blocks."""
        return _request_keys(_digest(0, model), tokens)

    def blocks(self, pod: str) -> set[tuple[int, str, int | None]]:
        """What the pod holds: request key, tier, group."""
        return {
            (key, entry.tier, entry.group)
            for key, entries in self._entries.items()
            for entry in entries
            if entry.pod == pod
        }

    def forget(self, pod: str) -> None:
        """Drop all entries of a pod."""
        for key, entries in list(self._entries.items()):
            for entry in [entry for entry in entries if entry.pod == pod]:
                self._drop(key, entry)

    def _store(self, event: Any, hashes: list[int], entry: Entry, model: str) -> None:
        parent: int | None = _digest(0, model)
        if event.parent_block_hash is not None and low64(event.parent_block_hash):
            parent = self._request_keys.get(low64(event.parent_block_hash))
            if parent is None:
                return
        if event.token_ids:
            keys = _request_keys(parent, event.token_ids)
            self._request_keys.update(zip(hashes, keys, strict=False))
        else:
            keys = [self._request_keys[each] for each in hashes if each in self._request_keys]
        for key in keys:
            entries = self._entries.setdefault(key, {})
            entries.pop(entry, None)
            entries[entry] = None
            if len(entries) > ENTRIES_OF_A_BLOCK:
                del entries[next(iter(entries))]

    def _evict(self, hashes: list[int], entry: Entry) -> None:
        for block_hash in hashes:
            key = self._request_keys.get(block_hash)
            if key is not None:
                self._drop(key, entry)
                if key not in self._entries:
                    del self._request_keys[block_hash]

    def _drop(self, key: int, entry: Entry) -> None:
        entries = self._entries.get(key, {})
        entries.pop(entry, None)
        if not entries:
            self._entries.pop(key, None)


def _request_keys(key: int | None, tokens: Sequence[int]) -> list[int]:
    keys = []
    for begin, end in pairwise(range(0, len(tokens) + 1, BLOCK_TOKENS)):
        key = _digest(key, tuple(tokens[begin:end]))
        keys.append(key)
    return keys


def _digest(*parts: object) -> int:
    encoded = msgspec.msgpack.encode(parts)
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "big")
