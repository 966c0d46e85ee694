"""What changes in the pool, as the KV events that vLLM publishes.

They speak of every chunk that this engine can load, whether or not it has ever computed its blocks.
"""

from array import array
from collections.abc import Callable

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_offload.base import Locality

from kvd_client.vllm.manager import OWNERSHIP, KvdOffloadingManager
from kvd_client.vllm.upstream import require
from kvd_proto.announcements import Announcement, RemovedBlocks, locality
from kvd_proto.announcer import Announcer

_LOCAL = Locality.LOCAL.value


class PoolEvents:
    """Makes the events of one engine.

    Args:
        manager: its changes are taken here, and nowhere else.
    """

    def __init__(self, manager: KvdOffloadingManager) -> None:
        self._manager = manager
        self._announcer = Announcer(manager.scheduler.description)
        self._external = hashes_in_events()
        self._locality: str | None = _LOCAL  # of tiers
        self._gpu: BlockPool | None = None
        self._gpu_cache: object = None

    def watch(self, gpu: BlockPool) -> None:
        """Look from now on whether the engine's own prefix cache was reset.

        vLLM publishes it as AllBlocksCleared, which names no medium: routers forget also what is
        in the pool.
        """
        require(gpu, "cached_block_hash_to_block")
        self._gpu, self._gpu_cache = gpu, gpu.cached_block_hash_to_block

    def take(self) -> list[KVCacheEvent]:
        """Return what has changed since the last call, a bounded amount."""
        if self._was_reset():
            self._manager.scheduler.repeat_changes()
            self._announcer = Announcer(self._manager.scheduler.description)
        changes = self._manager.take_changes()
        if not changes and not self._announcer.waiting:
            return []
        if tiers := self._manager.scheduler.tiers:  # none are known while the daemon is away
            self._locality = locality(tier.medium for tier in tiers)
        announced = self._announcer.announce(changes)
        return [to_event(blocks, self._external, self._locality) for blocks in announced]

    def _was_reset(self) -> bool:
        """Whether the engine's own prefix cache is another than at the last call."""
        if self._gpu is None or self._gpu.cached_block_hash_to_block is self._gpu_cache:
            return False
        self._gpu_cache = self._gpu.cached_block_hash_to_block
        return True


def hashes_in_events() -> Callable[[bytes], int | bytes]:
    """Return what makes a block's hash one of events, as vLLM does; it asks anew for each hash."""
    if isinstance(maybe_convert_block_hash(BlockHash(bytes(32))), int):
        return lambda block_hash: int.from_bytes(block_hash[-8:], "big")
    return bytes


def to_event(
    blocks: Announcement,
    external: Callable[[bytes], int | bytes],
    locality_below: str | None = _LOCAL,
) -> BlockStored | BlockRemoved:
    """Return vLLM's event for these blocks.

    Args:
        blocks: in memory or in tiers.
        external: of `hashes_in_events`.
        locality_below: of blocks in tiers.
    """
    medium, near = (MEDIUM_STORAGE, locality_below) if blocks.below else (MEDIUM_CPU, _LOCAL)
    hashes = list(map(external, blocks.hashes))
    if isinstance(blocks, RemovedBlocks):
        return BlockRemoved(hashes, medium, blocks.group, near, OWNERSHIP)
    return BlockStored(
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
        OWNERSHIP,
    )
