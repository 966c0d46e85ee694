"""Publishes what changes in the pool as KV events of the engine.

The events cover every chunk that this engine can load, whichever engine stored it.
"""

import math
import time
from array import array
from collections.abc import Callable, Collection, Iterable

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import GroupOffloadConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import KVCacheSpecKind
from vllm.v1.kv_offload.base import Locality

from kvd_client import Scheduler
from kvd_client.announcer import Announcement, Announcer, RemovedBlocks, locality
from kvd_client.vllm.idle import IDLE_SECONDS
from kvd_client.vllm.upstream import require

PART_CHUNKS = 64
"""Chunks that are published again at a time: about a millisecond of a step."""
MAX_PARTS = 8
"""Parts at a time, of an engine that publishes less often than parts are due."""

WHOLE_PREFIX_KINDS = frozenset(
    {
        KVCacheSpecKind.FULL_ATTENTION.value,
        KVCacheSpecKind.MLA_ATTENTION.value,
        KVCacheSpecKind.SINK_FULL_ATTENTION.value,
    }
)

_LOCAL = Locality.LOCAL.value
_HAS_LOOKAHEAD = "lookahead_token_ids" in BlockStored.__struct_fields__  # since vLLM 0.33


class RepeatPace:
    """Spreads the repetition of the whole pool evenly over a period.

    Args:
        period: seconds from the beginning of a round to that of the next; 0: no rounds.
        now: in seconds.
    """

    def __init__(self, period: float, now: float) -> None:
        self._period = period
        self._round_at = now + period
        self._part_at = self._round_at
        self._interval = period

    def is_due(self, now: float) -> bool:
        """Return whether a part is to be published."""
        return self._period > 0 and now >= self._part_at

    def begin_round(self, now: float, num_chunks: int) -> None:
        """Plan a round of so many chunks that begins now."""
        self._round_at = now + self._period
        self._interval = self._period / max(1, math.ceil(num_chunks / PART_CHUNKS))
        self._part_at = now

    def take_parts(self, now: float) -> int:
        """Return how many parts are due, at most MAX_PARTS, and plan the one after them."""
        due = 1 + int((now - self._part_at) / self._interval)
        parts = min(due, MAX_PARTS)
        self._part_at = (
            now + self._interval if due > parts else self._part_at + due * self._interval
        )
        return parts

    def end_round(self, now: float) -> None:
        """Plan the next round."""
        self._part_at = max(now, self._round_at)


class PoolEvents:
    """Makes the events of one engine.

    Args:
        scheduler: whose changes are taken here, and nowhere else.
        tier_groups: groups whose blocks in tiers are published; see `groups_in_tiers`.
        repeat_seconds: in which everything is published once more; 0: never.
        clock: in seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tier_groups: Collection[int],
        repeat_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._tier_groups = frozenset(tier_groups)
        self._clock = clock
        self._repeat_seconds = repeat_seconds
        self._external = hashes_in_events()
        self._tier_locality: str | None = _LOCAL
        self._gpu: BlockPool | None = None
        self._gpu_cache: object = None
        self._is_behind = False
        self._idle_at = clock()
        self._begin()

    def _begin(self) -> None:
        """Treat nothing as published."""
        self._announcer = Announcer(self._scheduler.description, self._tier_groups)
        self._pace = RepeatPace(self._repeat_seconds, self._clock())

    def watch(self, gpu: BlockPool) -> None:
        """Publish the pool anew after each reset of the engine's own prefix cache.

        vLLM publishes a reset as AllBlocksCleared, which names no medium: routers then forget the
        blocks in the pool as well.
        """
        require(gpu, "cached_block_hash_to_block")
        self._gpu, self._gpu_cache = gpu, gpu.cached_block_hash_to_block

    def is_due(self) -> bool:
        """Return whether an engine without requests should publish now what waits.

        At most once in IDLE_SECONDS, except while one call of `take` could not take everything.
        May be called from any thread.
        """
        if self._is_behind:
            return True
        now = self._clock()
        return now >= self._idle_at and (
            self._scheduler.changes_waiting
            or self._announcer.waiting
            or self._repeats(now)
            or self._was_reset()
        )

    def take(self, *, idle: bool = False) -> list[KVCacheEvent]:
        """Return the events of what has changed since the last call, a bounded number.

        Args:
            idle: the engine has no requests, and publishes nothing else.
        """
        now = self._clock()
        if idle:
            self._idle_at = now + IDLE_SECONDS
        if self._was_reset():
            assert self._gpu is not None  # noqa: S101  # it was reset
            self._gpu_cache = self._gpu.cached_block_hash_to_block
            self._scheduler.repeat_changes()
            self._begin()
        changes = self._scheduler.take_changes()
        announced: list[Announcement] = []
        if changes or self._announcer.waiting:
            announced = self._announcer.announce(changes)
        if self._repeats(now):
            announced += self._repeat(now)
        self._is_behind = self._scheduler.changes_behind or self._announcer.waiting
        if tiers := self._scheduler.tiers:  # none are known while the daemon is away
            self._tier_locality = locality(tier.medium for tier in tiers)
        return [to_event(blocks, self._external, self._tier_locality) for blocks in announced]

    def _repeats(self, now: float) -> bool:
        """Return whether a part of the pool is to be published again, and can be described."""
        return self._pace.is_due(now) and self._scheduler.attached

    def _repeat(self, now: float) -> list[Announcement]:
        """Return the parts of the round that are due."""
        announcer, pace = self._announcer, self._pace
        if not announcer.repeating:
            announcer.begin_repeat()
            pace.begin_round(now, len(announcer))
        announced = announcer.repeat(pace.take_parts(now) * PART_CHUNKS)
        if not announcer.repeating:
            pace.end_round(now)
        return announced

    def _was_reset(self) -> bool:
        """Return whether the engine's own prefix cache is another than at the last call."""
        return self._gpu is not None and self._gpu.cached_block_hash_to_block is not self._gpu_cache


def groups_in_tiers(groups: Iterable[GroupOffloadConfig]) -> list[int]:
    """Return the groups whose blocks in tiers are published: those that attend to whole prefixes.

    Dynamo 1.5 to 1.6.1 puts the groups of medium STORAGE into one index by hash. A window's block
    would count there for the main group's, and its removal would remove that one.
    """
    return [
        group.group_idx
        for group in groups
        if group.kv_event_group_spec.kv_cache_spec_kind in WHOLE_PREFIX_KINDS
    ]


def hashes_in_events() -> Callable[[bytes], int | bytes]:
    """Return the function that makes a block's hash one of events, as vLLM's does.

    vLLM's own asks for its environment variable for each hash; this one has asked.
    """
    if isinstance(maybe_convert_block_hash(BlockHash(bytes(32))), int):
        return lambda block_hash: int.from_bytes(block_hash[-8:], "big")
    return bytes


def to_event(
    blocks: Announcement,
    external: Callable[[bytes], int | bytes],
    tier_locality: str | None = _LOCAL,
) -> BlockStored | BlockRemoved:
    """Return vLLM's event for these blocks.

    It names no `ownership`: that is a secondary tier of an engine, and Dynamo drops such events.

    Args:
        blocks: in memory or in tiers.
        external: of `hashes_in_events`.
        tier_locality: of blocks in tiers.
    """
    medium, near = (MEDIUM_STORAGE, tier_locality) if blocks.in_tiers else (MEDIUM_CPU, _LOCAL)
    hashes = list(map(external, blocks.hashes))
    if isinstance(blocks, RemovedBlocks):
        return BlockRemoved(hashes, medium, blocks.group, near)
    event = BlockStored(
        hashes,
        external(blocks.parent) if blocks.parent else None,
        array("I", blocks.tokens).tolist(),
        blocks.block_size,
        None,  # the adapter's number, which its name has replaced
        medium,
        blocks.lora,
        None if blocks.extra is None else list(blocks.extra),
        blocks.group,
        blocks.kind or None,
        blocks.window,
        near,
    )
    if _HAS_LOOKAHEAD and blocks.lookahead is not None:
        event.lookahead_token_ids = [array("I", tokens).tolist() for tokens in blocks.lookahead]
    return event
