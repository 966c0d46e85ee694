"""llm-d's index of KV events, by the rules of llm-d-kv-cache 7be76e1 (June 2026).

Its Go code: pkg/kvevents/pool.go takes events, engineadapter/common.go reads topics and hashes,
pkg/kvcache/kvblock/in_memory.go holds the index. What matters of it:

- Blocks are known by request keys: hashes of their tokens, the model or LoRA adapter and extra
  keys that are texts, chained from the first block on. A map leads from engines' hashes to them;
  it is one map for all pods.
- A store whose parent's hash is not in that map is dropped. So is one whose extra keys cannot be
  brought to the index's blocks.
- A store without tokens is another tier of blocks that are known; unknown ones are dropped.
- A removal takes one entry (pod, tier, group) from a block; once a block has no entry left, its
  hash is forgotten. A removal of an unknown hash does nothing.
- AllBlocksCleared takes all entries of a pod, of all tiers, and forgets no hash.

Here a request key is a digest of its own; llm-d's is another one, with the same equalities.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from tests.events.wire import low64

DEFAULT_BLOCK_TOKENS = 16
ENTRIES_OF_A_BLOCK = 10
DEFAULT_TIER = "gpu"

ExtraKeys = Sequence[Sequence[Any] | None]


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
    """What llm-d knows after these events.

    Args:
        block_tokens: tokens of a block in the index, as its configuration says.

    Attributes:
        dropped: by reason, how many stores it did not take.
    """

    def __init__(self, block_tokens: int = DEFAULT_BLOCK_TOKENS) -> None:
        self.block_tokens = block_tokens
        self.dropped: Counter[str] = Counter()
        self._entries: dict[int, dict[Entry, None]] = {}  # by request key, latest last
        self._request_keys: dict[int, list[int]] = {}  # by an engine's hash

    def take(self, topic: str, batch: Any) -> None:
        """Take the events of one message, in order."""
        pod, model = pod_and_model(topic)
        for event in batch.events:
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                self.forget(pod)
                continue
            entry = Entry(pod, (event.medium or DEFAULT_TIER).lower(), event.group_idx)
            hashes = [low64(each) for each in event.block_hashes]
            if kind == "BlockStored":
                self._store(event, hashes, entry, event.lora_name or model)
            else:
                for each in hashes:
                    self._evict(each, entry)

    # ---------------------------------------------------------------- queries

    def chain(self, model: str, tokens: Sequence[int], extra: ExtraKeys | None = None) -> list[int]:
        """The request keys of a prompt's whole blocks. `extra`: of each block, as events have it.

        Raises:
            ValueError: extra keys of another number of blocks.
        """
        return self._keys(None, tokens, model, self._features(extra, len(tokens)))

    def held(self, pod: str) -> set[tuple[int, str, int | None]]:
        """What the pod holds: request key, tier, group."""
        return {
            (key, entry.tier, entry.group)
            for key, entries in self._entries.items()
            for entry in entries
            if entry.pod == pod
        }

    def prefix(
        self, pod: str, model: str, tokens: Sequence[int], extra: ExtraKeys | None = None
    ) -> int:
        """How many of a prompt's first blocks the pod holds, in any tier, by llm-d's scorer."""
        count = 0
        for key in self.chain(model, tokens, extra):
            if not any(entry.pod == pod for entry in self._entries.get(key, ())):
                break
            count += 1
        return count

    # ---------------------------------------------------------------- changes

    def _store(self, event: Any, hashes: list[int], entry: Entry, model: str) -> None:
        parent = None
        if event.parent_block_hash is not None and low64(event.parent_block_hash):
            known = self._request_keys.get(low64(event.parent_block_hash))
            if known is None:
                self.dropped["unknown parent"] += 1
                return
            parent = known[-1]
        try:
            features = self._features(event.extra_keys, len(event.token_ids))
        except ValueError:
            self.dropped["extra keys"] += 1
            return
        keys = self._keys(parent, event.token_ids, model, features)
        if keys:
            self._map(hashes, keys)
        elif event.token_ids:
            self.dropped["less than a block"] += 1
        else:
            keys = [self._request_keys[each][-1] for each in hashes if each in self._request_keys]
            if not keys:
                self.dropped["no tokens, unknown"] += 1
        for key in keys:
            entries = self._entries.setdefault(key, {})
            entries.pop(entry, None)
            entries[entry] = None
            if len(entries) > ENTRIES_OF_A_BLOCK:
                del entries[next(iter(entries))]

    def _map(self, hashes: list[int], keys: list[int]) -> None:
        """One hash to one key, several to one, or one to several, as their numbers say."""
        most = max(len(hashes), len(keys))
        fresh: dict[int, list[int]] = {}
        for i in range(most):
            key = keys[i * len(keys) // most]
            fresh.setdefault(hashes[i * len(hashes) // most], []).append(key)
        self._request_keys |= fresh

    def _evict(self, block_hash: int, entry: Entry) -> None:
        keys = self._request_keys.get(block_hash, [])
        for key in keys:
            self._drop(key, entry)
        if not any(key in self._entries for key in keys):
            self._request_keys.pop(block_hash, None)

    def forget(self, pod: str) -> None:
        """Drop all entries of a pod."""
        for key, entries in list(self._entries.items()):
            for entry in [entry for entry in entries if entry.pod == pod]:
                self._drop(key, entry)

    def _drop(self, key: int, entry: Entry) -> None:
        entries = self._entries.get(key, {})
        entries.pop(entry, None)
        if not entries:
            self._entries.pop(key, None)

    # ------------------------------------------------------------------- keys

    def _keys(
        self,
        parent: int | None,
        tokens: Sequence[int],
        model: str,
        features: Sequence[tuple[str, ...]],
    ) -> list[int]:
        key = _digest(0, (), model) if parent is None else parent
        ends = range(0, len(tokens) + 1, self.block_tokens)
        keys = []
        for (begin, end), texts in zip(pairwise(ends), features, strict=True):
            key = _digest(key, tuple(tokens[begin:end]), texts or None)
            keys.append(key)
        return keys

    def _features(self, extra: ExtraKeys | None, num_tokens: int) -> list[tuple[str, ...]]:
        """Of each block of the index the texts that tell it from others with the same tokens."""
        blocks = num_tokens // self.block_tokens
        if not extra or not blocks:
            return [()] * blocks
        given = [tuple(_texts(each)) for each in extra]
        if len(given) == blocks:
            return given
        if len(given) < blocks:
            return [given[i * len(given) // blocks] for i in range(blocks)]
        merged: list[tuple[str, ...]] = [()] * blocks
        for i, texts in enumerate(given):
            merged[i * blocks // len(given)] += texts
        return merged

    def __repr__(self) -> str:
        dropped = dict(self.dropped)
        return f"<LlmdIndex {len(self._entries)} blocks, dropped {dropped}>"


def _texts(keys: Sequence[Any] | None) -> Iterator[str]:
    """Texts, and the first item of pairs; anything else tells nothing to llm-d."""
    for key in keys or ():
        if isinstance(key, str):
            yield key
        elif isinstance(key, list | tuple) and key and isinstance(key[0], str):
            yield key[0]


def _digest(*parts: object) -> int:
    encoded = msgspec.msgpack.encode(parts)
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "big")
