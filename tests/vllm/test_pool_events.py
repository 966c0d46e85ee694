"""Changes of the pool become vLLM's events, whose bytes are those that routers are tested with."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvd_client.vllm.events import PoolEvents, hashes_in_events, to_event
from kvd_proto.announcements import RemovedBlocks, StoredBlocks
from kvd_proto.descriptions import Description
from kvd_proto.messages import TierInfo
from kvd_proto.said import NO_SLOT, Differences, Place
from tests.routers.vectors import PAYLOADS

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
    """In place of a manager, with a scheduler that finds these chunks, by slot."""

    def __init__(self, *chunks: Description) -> None:
        self.chunks = chunks
        self.scheduler = self
        self.coming = Differences()
        self.repeated = 0
        self.tiers: tuple[TierInfo, ...] = ()

    def description(self, place: Place) -> Description | None:
        """See Scheduler."""
        return self.chunks[place.slot] if place.slot < len(self.chunks) else None

    def repeat_changes(self) -> None:
        """See Scheduler: all that is there comes again."""
        self.repeated += 1
        self.coming = Differences(self.there(range(len(self.chunks))))

    def take_changes(self) -> Differences:
        """See the manager."""
        taken, self.coming = self.coming, Differences()
        return taken

    def there(self, slots: Iterable[int]) -> dict[bytes, Place]:
        """The chunks in these slots, as they are found."""
        hashes = [self.chunks[slot].hashes[-1] for slot in slots]
        return {
            value + bytes(4): Place(slot, 1, 0, 1, 0)
            for slot, value in zip(slots, hashes, strict=True)
        }


def events_of(pool: Any) -> PoolEvents:
    """Events of this double."""
    return PoolEvents(pool)


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
        batch = KVEventBatch(TIME, [to_event(blocks, hashes_in_events())], 0)
        encoded = msgspec.msgpack.encode(batch)
        assert encoded == bytes.fromhex(PAYLOADS[name])
        assert msgspec.msgpack.Decoder(KVEventBatch).decode(encoded) == batch


@pytest.mark.parametrize("as_numbers", [True, False])
def test_hashes_have_the_form_that_vllm_is_told_to_use(
    monkeypatch: pytest.MonkeyPatch, as_numbers: bool
) -> None:
    """Numbers of 64 bits, or all bytes: the same for each hash as vLLM's own function gives."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", str(int(as_numbers)))
    external = hashes_in_events()
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
        ownership="kvd",
    )


def test_each_change_is_told_once() -> None:
    """Stored, then removed, and nothing where nothing has changed."""
    pool = Pool(described(11), described(12, 11))
    events = events_of(pool)
    pool.coming.stored.update(pool.there([0, 1]))
    stored = events.take()
    assert [event.block_hashes for event in stored] == [[11], [12]]
    assert not events.take()
    pool.coming.removed.append(key_of(12))
    assert events.take() == [BlockRemoved([12], "CPU", 0, "LOCAL", "kvd")]
    assert not events.take()


def test_a_chunk_in_tiers_is_told_of_on_its_own() -> None:
    """Another medium, with where its tiers are, also while the daemon is away that told of them."""
    pool = Pool(described(11))
    pool.tiers = tuple(
        TierInfo(name=medium, medium=medium, shared=medium == "remote")
        for medium in ("disk", "remote")
    )
    events = events_of(pool)
    pool.coming.stored.update(pool.there([0]))
    pool.coming.kept[key_of(11)] = Place(NO_SLOT, 0, 0, 1, 0)
    in_memory, below = events.take()
    assert isinstance(in_memory, BlockStored)
    assert isinstance(below, BlockStored)
    assert (in_memory.medium, in_memory.locality) == ("CPU", "LOCAL")
    assert (below.medium, below.locality) == ("STORAGE", None)
    assert (below.block_hashes, below.token_ids) == ([11], [1, 2, 3, 4])
    pool.tiers = pool.tiers[1:]
    pool.coming.removed.append(key_of(11))
    assert events.take() == [BlockRemoved([11], "CPU", 0, "LOCAL", "kvd")]
    pool.tiers = ()
    pool.coming.released.append(key_of(11))
    assert events.take() == [BlockRemoved([11], "STORAGE", 0, "REMOTE", "kvd")]


def test_a_chunk_without_a_description_is_told_by_its_key() -> None:
    """Hash and group; without tokens, which routers take for another medium of a known block."""
    pool = Pool()
    pool.coming.stored[key_of(13, group=2)] = Place(5, 1, 0, 1, 0)
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


@pytest.mark.parametrize("lost", ["cached_block_hash_to_block"])
def test_a_pool_that_cannot_be_watched_is_refused(lost: str) -> None:
    """The engine does not start, in one sentence."""
    watch: Callable[[Any], None] = events_of(Pool()).watch
    with pytest.raises(Exception, match=lost):
        watch(SimpleNamespace())
