"""Publishes the pool's changes as KV events of the engine, in its steps and while it is idle.

The events cover every chunk that this engine can load, whichever engine stored it.
"""

import inspect
import math
import threading
import time
from array import array
from collections.abc import Callable, Collection, Iterable

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import GroupOffloadConfig
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.kv_cache_interface import KVCacheSpecKind
from vllm.v1.kv_offload.base import Locality

from kvd_client import Scheduler
from kvd_client.announcer import Announcer
from kvd_client.block_chains import Announcement, RemovedBlocks
from kvd_client.errors import get_logger
from kvd_client.vllm.upstream import require

log = get_logger("kvd_client.vllm")

PART_CHUNKS = 64
"""Chunks that are published again at a time: about a millisecond of a step."""
MIN_PART_SECONDS = 0.05
"""Between two parts: a round of more than 1,280 chunks a second takes longer than its period."""
MAX_PARTS, MAX_IDLE_PARTS = 8, 32
"""Parts at a time, if steps or an idle engine's turns come less often than parts."""
IDLE_SECONDS = 1.0
"""Between two publications of an idle engine."""
POLL_SECONDS = 0.2
"""Between two checks for waiting changes of an idle engine."""
CLOSE_SECONDS = 1.0

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
        period: seconds from the start of a round to the start of the next one; 0: no rounds.
        now: in seconds.
    """

    def __init__(self, period: float, now: float) -> None:
        self._period = period
        self._round_end = self._part_at = now + period
        self._interval = period

    def is_due(self, now: float) -> bool:
        """Return whether a part is to be published."""
        return self._period > 0 and now >= self._part_at

    def begin_round(self, now: float, num_chunks: int) -> None:
        """Start a round of so many chunks."""
        self._round_end = now + self._period
        self._plan(now, num_chunks)
        self._part_at = now

    def num_parts(self, now: float, max_parts: int) -> int:
        """Return how many parts are due."""
        return min(1 + int((now - self._part_at) / self._interval), max_parts)

    def end_part(self, now: float, num_chunks: int) -> None:
        """Plan the next part, with so many chunks left in the round; 0: plan the next round."""
        if num_chunks:
            self._plan(now, num_chunks)
            self._part_at = now + self._interval
        else:
            self._part_at = max(now, self._round_end)

    def _plan(self, now: float, num_chunks: int) -> None:
        num_parts = max(1, math.ceil(num_chunks / PART_CHUNKS))
        self._interval = max((self._round_end - now) / num_parts, MIN_PART_SECONDS)


class PoolEvents:
    """Makes the KV events of one engine.

    Args:
        scheduler: the session whose changes become events; nothing else may take them.
        tier_groups: groups whose blocks in tiers are published; see `groups_in_tiers`.
        repeat_seconds: period in which the whole pool is published again; 0: never.
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
        self._clock = clock
        self._to_event_hash = event_hash_function()
        self._tier_locality: str | None = _LOCAL
        self._device_pool: BlockPool | None = None
        self._device_cache: object = None  # its table at the last take: a reset replaces it
        self._is_behind = False  # the last take left changes
        self._next_idle_take = clock()
        self._announcer = Announcer(scheduler.description, frozenset(tier_groups))
        self._pace = RepeatPace(repeat_seconds, clock())

    def watch(self, device_pool: BlockPool) -> None:
        """Publish the pool again after each reset of the engine's own prefix cache.

        vLLM publishes a reset as AllBlocksCleared, which names no medium. So routers forget the
        blocks in the pool as well.
        """
        require(device_pool, "cached_block_hash_to_block")
        self._device_pool, self._device_cache = device_pool, device_pool.cached_block_hash_to_block

    def is_due(self) -> bool:
        """Return whether an engine without requests should publish now.

        True at most once in IDLE_SECONDS, unless one call of `take` could not take all changes. May
        be called from any thread.
        """
        if self._is_behind:
            return True
        now = self._clock()
        return now >= self._next_idle_take and (
            self._scheduler.changes_waiting
            or self._announcer.waiting
            or self._repeat_is_due(now)
            or self._was_reset()
        )

    def take(self, *, idle: bool = False) -> list[KVCacheEvent]:
        """Return events for the changes since the last call, a bounded number.

        Args:
            idle: the engine has no requests and publishes nothing else.
        """
        now = self._clock()
        if idle:
            self._next_idle_take = now + IDLE_SECONDS
        if self._was_reset():
            assert self._device_pool is not None  # noqa: S101  # it was reset
            self._device_cache = self._device_pool.cached_block_hash_to_block
            self._scheduler.repeat_changes()
            self._announcer.forget()
        changes = self._scheduler.take_changes()
        tiers = self._scheduler.tiers
        announcements: list[Announcement] = []
        if tiers:  # none are known while the daemon is away
            self._tier_locality = common_locality(tier.medium for tier in tiers)
            self._announcer.has_tiers = True
        if changes or self._announcer.waiting:
            announcements = self._announcer.announce(changes)
        if self._repeat_is_due(now):
            announcements += self._repeat(now, MAX_IDLE_PARTS if idle else MAX_PARTS)
        self._is_behind = self._scheduler.changes_behind or self._announcer.waiting
        return [
            to_event(announcement, self._to_event_hash, self._tier_locality)
            for announcement in announcements
        ]

    def _repeat_is_due(self, now: float) -> bool:
        """Return whether a part of the pool is to be published again, and can be described."""
        return self._pace.is_due(now) and self._scheduler.attached

    def _repeat(self, now: float, max_parts: int) -> list[Announcement]:
        """Return the parts of the round that are due."""
        announcer, pace = self._announcer, self._pace
        if not announcer.repeating:
            announcer.begin_repeat()
            pace.begin_round(now, announcer.num_to_repeat)
        announcements = announcer.repeat(pace.num_parts(now, max_parts) * PART_CHUNKS)
        pace.end_part(now, announcer.num_to_repeat)
        return announcements

    def _was_reset(self) -> bool:
        """Return whether the engine's own prefix cache was reset since the last `take`."""
        return (
            self._device_pool is not None
            and self._device_pool.cached_block_hash_to_block is not self._device_cache
        )


def groups_in_tiers(groups: Iterable[GroupOffloadConfig]) -> list[int]:
    """Return the groups whose blocks in tiers are published: those that attend to whole prefixes.

    Dynamo 1.5 to 1.6.1 keeps all groups of medium STORAGE in one index by hash. There, a window's
    block would count for the main group, and its removal would remove the main group's block.
    """
    return [
        group.group_idx
        for group in groups
        if group.kv_event_group_spec.kv_cache_spec_kind in WHOLE_PREFIX_KINDS
    ]


def common_locality(media: Iterable[str]) -> str | None:
    """Return the locality, in events, of blocks in tiers of these media; None: they differ."""
    localities = {"REMOTE" if medium == "remote" else "LOCAL" for medium in media}
    return localities.pop() if len(localities) == 1 else None


def event_hash_function() -> Callable[[bytes], int | bytes]:
    """Return the function from a block's hash to its hash in events, equal to vLLM's.

    vLLM's own function reads an environment variable for each hash; this one reads it now.
    """
    if isinstance(maybe_convert_block_hash(BlockHash(bytes(32))), int):
        return lambda block_hash: int.from_bytes(block_hash[-8:], "big")
    return bytes


def to_event(
    blocks: Announcement,
    to_event_hash: Callable[[bytes], int | bytes],
    tier_locality: str | None = _LOCAL,
) -> BlockStored | BlockRemoved:
    """Return vLLM's event for these blocks.

    `ownership` is not set: it marks a secondary tier of an engine, and Dynamo drops such events.

    Args:
        blocks: in memory or in tiers.
        to_event_hash: see `event_hash_function`.
        tier_locality: of blocks in tiers.
    """
    medium, locality = (MEDIUM_STORAGE, tier_locality) if blocks.in_tiers else (MEDIUM_CPU, _LOCAL)
    hashes = list(map(to_event_hash, blocks.hashes))
    if isinstance(blocks, RemovedBlocks):
        return BlockRemoved(hashes, medium, blocks.group, locality)
    event = BlockStored(
        hashes,
        to_event_hash(blocks.parent) if blocks.parent else None,
        array("I", blocks.tokens).tolist(),
        blocks.block_size,
        None,  # the adapter's number, which its name has replaced
        medium,
        blocks.lora,
        None if blocks.extra is None else list(blocks.extra),
        blocks.group,
        blocks.kind or None,
        blocks.window,
        locality,
    )
    if _HAS_LOOKAHEAD and blocks.lookahead is not None:
        event.lookahead_token_ids = [array("I", tokens).tolist() for tokens in blocks.lookahead]
    return event


# ------------------------------------------------------------- idle engines

_PUBLISHER_FAILED = (
    "publishing without steps failed and is off; this engine publishes in its steps only"
)


class IdlePublisher:
    """Publishes the pool's changes while an engine has no requests.

    vLLM publishes KV events at the end of a step. An engine without requests waits on its input
    queue and takes no steps. vLLM's own message `EngineCoreRequestType.WAKEUP` makes it ask its
    connector whether there is work; the connector publishes, in the engine's thread, and returns
    False. A step would do as well, but each step keeps vLLM's workers in a busy loop for a second.

    Args:
        core: the engine.
        is_due: whether changes wait to be published; called from any thread.
        take_events: returns their events; called in the engine's thread, never raises.
    """

    def __init__(
        self,
        core: EngineCoreProc,
        is_due: Callable[[], bool],
        take_events: Callable[[], Iterable[KVCacheEvent]],
    ) -> None:
        self._core = core
        self._is_due = is_due
        self._take_events = take_events
        self._wakeup_pending = False  # a WAKEUP was queued since the last `publish`
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvd-idle-publisher", daemon=True)
        self._thread.start()

    def publish(self) -> None:
        """Publish the engine's own KV events, then a bounded number of the pool's, if some are due.

        Called in the engine's thread whenever it has no requests. If more are due, queue another
        wake-up instead of looping, so that requests that arrive in between go first. An exception
        switches idle publishing off for good.
        """
        if self._closed.is_set():
            return
        self._wakeup_pending = False
        try:
            if not self._is_due():
                return
            scheduler = self._core.scheduler
            events = [*scheduler.kv_cache_manager.take_events(), *self._take_events()]
            if events:
                scheduler.kv_event_publisher.publish(KVEventBatch(ts=time.time(), events=events))
            if self._is_due():
                self._wake()
        except Exception:
            log.exception(_PUBLISHER_FAILED)
            self._closed.set()

    def close(self) -> None:
        """End the thread. May be called again."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        try:
            while not self._closed.wait(POLL_SECONDS):
                if not self._wakeup_pending and self._is_due():
                    self._wake()
        except Exception:
            log.exception(_PUBLISHER_FAILED)
            self._closed.set()

    def _wake(self) -> None:
        if not self._closed.is_set():
            self._wakeup_pending = True
            self._core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))


def calling_engine_core() -> EngineCoreProc | None:
    """Return the engine whose constructor is on the stack, as while vLLM creates a connector.

    Returns:
        None: the engine runs within its caller's process, and only when its caller says so.

    Raises:
        UnsupportedVllm: the engine has no input queue.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, EngineCoreProc):
            require(caller, "input_queue")
            return caller
        frame = frame.f_back
    return None
