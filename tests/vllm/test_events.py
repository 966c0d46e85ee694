"""Changes of the pool become vLLM's events: their bytes, when they are published, and failures."""

import queue
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.engine.core import EngineCoreProc

from kvd_client.block_chains import RemovedBlocks, StoredBlocks
from kvd_client.changes import NO_SLOT, ChunkLocation, Differences
from kvd_client.vllm import KvdOffloadingSpec
from kvd_client.vllm.events import (
    IDLE_SECONDS,
    PART_CHUNKS,
    PoolEvents,
    event_hash_function,
    to_event,
)
from kvd_proto.descriptions import Description
from kvd_proto.messages import TierInfo
from tests.vllm.configs import configured
from tests.vllm.stepping import Lender, Stepping

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
        self.coming = Differences(self.found())
        self.attached = True
        self.changes_behind = False
        self.tiers: tuple[TierInfo, ...] = ()

    def description(self, place: ChunkLocation) -> Description | None:
        """See Scheduler."""
        return self.chunks[place.slot] if place.slot < len(self.chunks) else None

    def repeat_changes(self) -> None:
        """See Scheduler: all that is there comes again."""
        self.coming = Differences(self.found())

    @property
    def changes_waiting(self) -> bool:
        """See Scheduler."""
        return bool(self.coming)

    def take_changes(self) -> Differences:
        """See Scheduler."""
        taken, self.coming = self.coming, Differences()
        return taken

    def found(self) -> dict[bytes, ChunkLocation]:
        """The chunks as they are found."""
        return {
            chunk.hashes[-1] + bytes(4): ChunkLocation(slot, 1, 0, 1, 0)
            for slot, chunk in enumerate(self.chunks)
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


# ------------------------------------------------------------------- what is said

PAYLOADS = {
    "stored 11 12": (
        "93cb41da492040000000918ba474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573920b"
        "0cb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473980102030405060708aa626c6f63"
        "6b5f73697a6504a76c6f72615f6964c0a66d656469756da3435055a96c6f72615f6e616d65c0a967726f7570"
        "5f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6ea86c6f6361"
        "6c697479a54c4f43414c00"
    ),
    "removed 11": (
        "93cb41da4920400000009185a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391"
        "0ba66d656469756da3435055a967726f75705f69647800a86c6f63616c697479a54c4f43414c00"
    ),
}
"""That vLLM 0.32 encoded, at 1764000000.0, of rank 0."""


def test_bytes_are_those_that_vllm_publishes() -> None:
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
        batch = KVEventBatch(1764000000.0, [to_event(blocks, event_hash_function())], 0)
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


def test_an_event_has_all_that_is_known_of_a_block() -> None:
    """Parent, adapter, extra keys and window; of a chunk without description hash and group."""
    chunk = described(12, 11, window=64, lora="adapter", extra=(("adapter", ("a" * 64, -3)),))
    pool = Pool(chunk)
    pool.coming.stored[key_of(13, group=2)] = ChunkLocation(5, 1, 0, 1, 0)
    known, unknown = events_of(pool).take()
    assert known == BlockStored(
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
    assert isinstance(unknown, BlockStored)
    assert (unknown.block_hashes, unknown.group_idx) == ([13], 2)
    assert (unknown.token_ids, unknown.block_size, unknown.parent_block_hash) == ([], 0, None)


def test_a_chunk_in_tiers_has_events_of_its_own() -> None:
    """Another medium, with where its tiers are, also while the daemon is away that has them."""
    pool = Pool(described(11))
    pool.tiers = tuple(
        TierInfo(name=medium, medium=medium, shared=medium == "remote")
        for medium in ("disk", "remote")
    )
    events = events_of(pool)
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
    assert len(events.take()) == 1
    pool.chunks = ()
    pool.coming.stored_in_tiers[key_of(11)] = ChunkLocation(NO_SLOT, 0, 0, 1, 0)
    pool.coming.removed.append(key_of(11))
    below, gone = events.take()
    assert isinstance(below, BlockStored)
    assert (below.medium, below.token_ids) == ("STORAGE", [1, 2, 3, 4])
    assert gone == BlockRemoved([11], "CPU", 0, "LOCAL")


# ------------------------------------------------------------------ when it is said


def test_after_a_reset_of_the_engines_own_cache_everything_is_published_again() -> None:
    """For routers forget all of the engine's blocks with AllBlocksCleared, in whichever medium."""
    pool, gpu = Pool(described(11), described(12, 11)), BlockPool(4, True, BLOCK, True)
    events = events_of(pool)
    events.watch(gpu)
    first = events.take()
    assert not events.take()
    held = gpu.get_new_blocks(1)
    assert not gpu.reset_prefix_cache()  # a block is in use: nothing was reset
    assert not events.take()
    gpu.free_blocks(held)
    assert gpu.reset_prefix_cache()
    assert events.is_due()  # also of an idle engine
    assert events.take() == first
    assert not events.take()


def test_an_idle_engine_publishes_changes_once_a_second() -> None:
    """As soon as something waits, then at most once a second while more and more comes."""
    pool, clock = Pool(), Clock()
    events = events_of(pool, clock=clock)
    assert not events.is_due()
    pool.coming.stored[key_of(11)] = ChunkLocation(0, 1, 0, 1, 0)
    assert events.is_due()
    assert len(events.take(idle=True)) == 1
    pool.coming.removed.append(key_of(11))
    clock.now += IDLE_SECONDS - 0.01
    assert not events.is_due()
    clock.now += 0.02
    assert events.is_due()
    assert len(events.take(idle=True)) == 1
    clock.now += IDLE_SECONDS
    assert not events.is_due()


def test_everything_is_published_again_within_the_period() -> None:
    """Each block once, removed and stored in one batch, spread over the period in parts."""
    pool, clock = Pool(*(described(number + 1, number) for number in range(300))), Clock()
    events = events_of(pool, repeat_seconds=100.0, clock=clock)
    events.take()
    clock.now += 99.0
    assert not events.is_due()
    assert not events.take()
    sizes, hashes = [], list[int | bytes]()
    for _ in range(101):
        clock.now += 1.0
        batch = events.take()
        assert hashes_in(batch, BlockStored) == hashes_in(batch, BlockRemoved)
        hashes += hashes_in(batch, BlockStored)
        sizes.append(len(batch) // 2)
    assert sorted(map(str, hashes)) == sorted(str(number + 1) for number in range(300))
    assert max(sizes) <= PART_CHUNKS
    assert sum(map(bool, sizes)) == -(-300 // PART_CHUNKS)


def hashes_in(batch: Iterable[KVCacheEvent], kind: type[Any]) -> list[int | bytes]:
    """Blocks that events of this kind name, in an order of their own."""
    return sorted(h for event in batch if isinstance(event, kind) for h in event.block_hashes)


# ----------------------------------------------------- in the scheduler of an engine


class Core(EngineCoreProc):  # type: ignore[misc]  # without vLLM's types
    """An engine that makes a connector's half, and has nothing else that it needs."""

    def __init__(self, make: Callable[[], Stepping]) -> None:
        self.input_queue: queue.Queue[object] = queue.Queue()
        self.scheduler: SimpleNamespace | None = None
        self.half = make().half


@pytest.fixture
def lender() -> Lender:
    """A daemon that stores all it is offered, and in which another engine has stored a chunk."""
    lender = Lender(99)
    lender.changes.stored[b"another engine's".ljust(36)] = ChunkLocation(1, 1, 0, 1, 0)
    return lender


@pytest.fixture
def core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lender: Lender) -> Iterator[Core]:
    """An engine that publishes KV events, whose scheduler fails when it publishes without steps."""
    core = Core(lambda: Stepping(tmp_path, monkeypatch, lender, events=True))
    yield core
    core.half.shutdown()


def test_an_error_ends_idle_publishing_and_not_the_engine(
    core: Core, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once; the engine publishes in its steps."""
    assert not core.half.has_pending_push_work()
    assert not core.half.has_pending_push_work()
    (line,) = [line for line in caplog.records if line.exc_info]
    assert "publishing without steps failed" in line.getMessage()
    assert [type(event) for event in core.half.take_events()] == [BlockStored]


def test_an_error_in_the_events_ends_them_and_not_the_engine(
    core: Core, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once, with its stack; later steps publish nothing, and nothing wakes it."""
    half = core.half
    assert half.events is not None
    monkeypatch.setattr(half.events, "take", lambda **_: 1 // 0)
    assert [list(half.take_events()) for _ in range(2)] == [[], []]
    assert not half.has_pending_push_work()
    (line,) = [line for line in caplog.records if line.exc_info]
    assert "publishes none" in line.getMessage()


def test_an_engine_in_its_callers_process_publishes_in_steps_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lender: Lender
) -> None:
    """Nothing can wake it, and nothing is lost."""
    half = Stepping(tmp_path, monkeypatch, lender, events=True).half
    assert not half.has_pending_push_work()
    assert [type(event) for event in half.take_events()] == [BlockStored]


@pytest.mark.parametrize(
    ("extra", "engine", "publishes"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"events": False}, True, False),
        ({"self_describing_kv_events": True}, True, True),
    ],
)
def test_events_are_published_where_vllm_publishes_and_the_option_is_on(
    tmp_path: Path, extra: dict[str, Any], engine: bool, publishes: bool
) -> None:
    """What vLLM would remember of chunks to describe them stays empty, whatever is configured."""
    vllm_config, kv_cache_config, config = configured(tmp_path, extra=extra, events=engine)
    spec = KvdOffloadingSpec(config, vllm_config, kv_cache_config)
    assert spec.publishes is publishes
    assert not spec.kv_events_config.self_describing_kv_events
