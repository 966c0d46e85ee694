"""Changes of the pool become vLLM's events, whose bytes are those that routers are tested with."""

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvd_client.block_chains import RemovedBlocks, StoredBlocks
from kvd_client.changes import NO_SLOT, ChunkLocation, Differences
from kvd_client.vllm.events import (
    IDLE_SECONDS,
    PART_CHUNKS,
    PoolEvents,
    event_hash_function,
    to_event,
)
from kvd_proto.descriptions import Description
from kvd_proto.messages import TierInfo
from tests.events.vectors import PAYLOADS

TIME = 1764000000.0
BLOCK = 4


def block_hash(number: int) -> bytes:
    """A hash whose number in events is this one."""
    return number.to_bytes(32, "big")


def described(number: int, parent: int = 0, **fields: Any) -> Description:
    """A chunk of one block."""
    return Description(
        parent=block_hash(parent) if parent else b"",
        hashes=(block_hash(number),),
        tokens=b"".join(token.to_bytes(4, "little") for token in range(1, BLOCK + 1)),
        block_size=BLOCK,
        kind="full_attention",
        **fields,
    )


def key_of(number: int, group: int = 0) -> bytes:
    """The chunk's key, as vLLM makes it."""
    return block_hash(number) + group.to_bytes(4, "big")


class Pool:
    """In place of a scheduler, which finds these chunks, by slot."""

    def __init__(self, *chunks: Description) -> None:
        self.chunks = chunks
        self.coming = Differences()
        self.attached = True
        self.changes_behind = False
        self.repeated = 0
        self.tiers: tuple[TierInfo, ...] = ()

    def description(self, place: ChunkLocation) -> Description | None:
        """See Scheduler."""
        return self.chunks[place.slot] if place.slot < len(self.chunks) else None

    def repeat_changes(self) -> None:
        """See Scheduler: all that is there comes again."""
        self.repeated += 1
        self.coming = Differences(self.there(range(len(self.chunks))))

    @property
    def changes_waiting(self) -> bool:
        """See Scheduler."""
        return bool(self.coming)

    def take_changes(self) -> Differences:
        """See Scheduler."""
        taken, self.coming = self.coming, Differences()
        return taken

    def there(self, slots: Iterable[int]) -> dict[bytes, ChunkLocation]:
        """The chunks in these slots, as they are found."""
        hashes = [self.chunks[slot].hashes[-1] for slot in slots]
        return {
            value + bytes(4): ChunkLocation(slot, 1, 0, 1, 0)
            for slot, value in zip(slots, hashes, strict=True)
        }


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def events_of(pool: Any, repeat_seconds: float = 0.0, clock: Clock | None = None) -> PoolEvents:
    """Events of this double."""
    return PoolEvents(pool, [0], repeat_seconds, clock or Clock())


def test_bytes_are_those_that_routers_are_tested_with() -> None:
    """As vLLM encodes them, and as its decoder reads them."""
    stored = StoredBlocks(
        hashes=(block_hash(11), block_hash(12)),
        parent=b"",
        tokens=b"".join(token.to_bytes(4, "little") for token in range(1, 9)),
        block_size=BLOCK,
        group=0,
        kind="full_attention",
        window=None,
        lora=None,
        extra=None,
    )
    removed = RemovedBlocks(hashes=(block_hash(11),), group=0)
    for blocks, name in ((stored, "stored 11 12"), (removed, "removed 11")):
        batch = KVEventBatch(TIME, [to_event(blocks, event_hash_function())], 0)
        encoded = msgspec.msgpack.encode(batch)
        assert encoded == bytes.fromhex(PAYLOADS[name])
        assert msgspec.msgpack.Decoder(KVEventBatch).decode(encoded) == batch


@pytest.mark.parametrize("as_numbers", [True, False])
def test_hashes_have_the_form_that_vllm_is_told_to_use(
    monkeypatch: pytest.MonkeyPatch, as_numbers: bool
) -> None:
    """Numbers of 64 bits, or all bytes: the same for each hash as vLLM's own function gives."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", str(int(as_numbers)))
    external = event_hash_function()
    for value in (bytes(range(32)), bytes(range(224, 256)), bytes(32)):
        assert external(value) == maybe_convert_block_hash(BlockHash(value))
        assert isinstance(external(value), int) is as_numbers


def test_all_that_is_known_of_a_block_is_told() -> None:
    """Parent, adapter, extra keys and window."""
    chunk = described(12, 11, window=64, lora="adapter", extra=(("adapter", ("a" * 64, -3)),))
    pool = Pool(chunk)
    pool.coming.stored.update(pool.there([0]))
    (event,) = events_of(pool).take()
    assert event == BlockStored(
        block_hashes=[12],
        parent_block_hash=11,
        token_ids=[1, 2, 3, 4],
        block_size=BLOCK,
        lora_id=None,
        medium="CPU",
        lora_name="adapter",
        extra_keys=[("adapter", ("a" * 64, -3))],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
        kv_cache_spec_sliding_window=64,
        locality="LOCAL",
    )


def test_a_chunk_in_tiers_is_told_of_on_its_own() -> None:
    """Another medium, with where its tiers are, also while the daemon is away that told of them."""
    pool = Pool(described(11))
    pool.tiers = tuple(
        TierInfo(name=medium, medium=medium, shared=medium == "remote")
        for medium in ("disk", "remote")
    )
    events = events_of(pool)
    pool.coming.stored.update(pool.there([0]))
    pool.coming.stored_in_tiers[key_of(11)] = ChunkLocation(NO_SLOT, 0, 0, 1, 0)
    in_memory, below = events.take()
    assert isinstance(in_memory, BlockStored)
    assert isinstance(below, BlockStored)
    assert (in_memory.medium, in_memory.locality) == ("CPU", "LOCAL")
    assert (below.medium, below.locality) == ("STORAGE", None)
    assert (below.block_hashes, below.token_ids) == ([11], [1, 2, 3, 4])
    pool.tiers = pool.tiers[1:]
    pool.coming.removed.append(key_of(11))
    assert events.take() == [BlockRemoved([11], "CPU", 0, "LOCAL")]
    pool.tiers = ()
    pool.coming.removed_from_tiers.append(key_of(11))
    assert events.take() == [BlockRemoved([11], "STORAGE", 0, "REMOTE")]


def test_a_chunk_that_goes_down_is_described_though_its_slot_is_used_again() -> None:
    """Where the daemon has tiers: an engine that publishes rarely learns of both at once."""
    pool = Pool(described(11))
    pool.tiers = (TierInfo(name="disk", medium="disk", shared=False),)
    events = events_of(pool)
    pool.coming.stored.update(pool.there([0]))
    assert len(events.take()) == 1
    pool.chunks = ()
    pool.coming.stored_in_tiers[key_of(11)] = ChunkLocation(NO_SLOT, 0, 0, 1, 0)
    pool.coming.removed.append(key_of(11))
    below, gone = events.take()
    assert isinstance(below, BlockStored)
    assert (below.medium, below.token_ids) == ("STORAGE", [1, 2, 3, 4])
    assert gone == BlockRemoved([11], "CPU", 0, "LOCAL")


def test_a_chunk_without_a_description_is_told_by_its_key() -> None:
    """Hash and group; without tokens, which routers take for another medium of a known block."""
    pool = Pool()
    pool.coming.stored[key_of(13, group=2)] = ChunkLocation(5, 1, 0, 1, 0)
    (event,) = events_of(pool).take()
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.group_idx) == ([13], 2)
    assert (event.token_ids, event.block_size, event.parent_block_hash) == ([], 0, None)


def test_after_a_reset_of_the_engines_own_cache_everything_is_told_again() -> None:
    """For routers forget all of the engine's blocks with AllBlocksCleared, in whichever medium."""
    pool, gpu = Pool(described(11), described(12, 11)), BlockPool(4, True, BLOCK, True)
    events = events_of(pool)
    events.watch(gpu)
    pool.coming.stored.update(pool.there([0, 1]))
    first = events.take()
    assert not events.take()
    held = gpu.get_new_blocks(1)
    assert not gpu.reset_prefix_cache()  # a block is in use: nothing was reset
    assert not events.take()
    gpu.free_blocks(held)
    assert gpu.reset_prefix_cache()
    assert len(gpu.take_events()) == 1
    assert events.take() == first
    assert not events.take()
    assert pool.repeated == 1


# -------------------------------------------------------------- an idle engine


def test_an_idle_engine_publishes_changes_once_a_second() -> None:
    """As soon as something waits, then at most once a second while more and more comes."""
    pool, clock = Pool(described(11), described(12, 11)), Clock()
    events = events_of(pool, clock=clock)
    assert not events.is_due()
    pool.coming.stored.update(pool.there([0]))
    assert events.is_due()
    assert len(events.take(idle=True)) == 1
    pool.coming.stored.update(pool.there([1]))
    clock.now += IDLE_SECONDS - 0.01
    assert not events.is_due()
    clock.now += 0.02
    assert events.is_due()
    assert len(events.take(idle=True)) == 1
    clock.now += IDLE_SECONDS
    assert not events.is_due()


# ------------------------------------------------------------------ repetition


def chain(length: int) -> list[Description]:
    """Chunks of one block each, the parent of the next."""
    return [described(number + 1, number) for number in range(length)]


def test_everything_is_published_again_within_the_period() -> None:
    """Each block once, removed and stored in one batch, spread over the period in parts."""
    pool, clock = Pool(*chain(300)), Clock()
    events = events_of(pool, repeat_seconds=100.0, clock=clock)
    pool.coming.stored.update(pool.there(range(300)))
    events.take()
    clock.now += 99.0
    assert not events.is_due()
    assert not events.take()
    sizes, hashes = [], list[int | bytes]()
    for _ in range(101):
        clock.now += 1.0
        batch = events.take()
        assert sorted(map(str, stored_in(batch))) == sorted(map(str, removed_in(batch)))
        hashes += stored_in(batch)
        sizes.append(len(batch) // 2)
    assert sorted(map(str, hashes)) == sorted(str(number + 1) for number in range(300))
    assert max(sizes) <= PART_CHUNKS
    assert sum(map(bool, sizes)) == -(-300 // PART_CHUNKS)


def test_an_idle_engine_repeats_in_larger_parts() -> None:
    """As large as once a second makes necessary; not while it is detached."""
    pool, clock = Pool(*chain(300)), Clock()
    events = events_of(pool, repeat_seconds=2.0, clock=clock)
    pool.coming.stored.update(pool.there(range(300)))
    events.take()
    pool.attached = False
    clock.now += 2.0
    assert not events.is_due()
    pool.attached = True
    stored, times = 0, 0
    for _ in range(21):
        if events.is_due():
            times += 1
            stored += len(stored_in(events.take(idle=True)))
        clock.now += 0.101
    assert stored == 300
    assert times == 3


def stored_in(batch: list[KVCacheEvent]) -> list[int | bytes]:
    """Hashes of blocks that are stored."""
    return [
        each for event in batch if isinstance(event, BlockStored) for each in event.block_hashes
    ]


def removed_in(batch: list[KVCacheEvent]) -> list[int | bytes]:
    """Hashes of blocks that are removed."""
    return [
        each for event in batch if isinstance(event, BlockRemoved) for each in event.block_hashes
    ]
