"""Changes of the pool become vLLM's events: their bytes, when they are published, and failures."""

import queue
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import (
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventBatch,
    ZmqEventPublisher,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.engine.core import EngineCoreProc

from kvd_client.block_chains import RemovedBlocks, StoredBlocks
from kvd_client.changes import NO_SLOT, ChunkLocation
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
from tests.waiting import PATIENCE

BLOCK = 4
TOKENS = b"".join(token.to_bytes(4, "little") for token in range(1, 2 * BLOCK + 1))


def block_hash(number: int) -> bytes:
    """A hash whose number in events is this one."""
    return number.to_bytes(32, "big")


def key_of(number: int, group: int = 0) -> bytes:
    """The key of the chunk that is the block with this number, as vLLM makes it."""
    return block_hash(number) + group.to_bytes(4, "big")


def location(slot: int) -> ChunkLocation:
    """A place in memory, or in tiers."""
    return ChunkLocation(slot, int(slot != NO_SLOT), 0, 1, 0)


def described(number: int, parent: int = 0, **fields: Any) -> Description:
    """A chunk of one block."""
    return Description(
        parent=block_hash(parent) if parent else b"",
        hashes=(block_hash(number),),
        tokens=TOKENS[: 4 * BLOCK],
        block_size=BLOCK,
        kind="full_attention",
        **fields,
    )


class Pool(Lender):
    """A scheduler's session that finds these chunks, by slot."""

    def __init__(self, *descriptions: Description) -> None:
        super().__init__(None)
        self.descriptions = descriptions
        self.repeat_changes()

    def repeat_changes(self) -> None:
        """See Scheduler: all that is there comes again."""
        for slot, chunk in enumerate(self.descriptions):
            self.changes.stored[chunk.hashes[-1] + bytes(4)] = location(slot)


class Publisher:
    """The events of a pool, at times that the test sets."""

    def __init__(self, pool: Lender, repeat_seconds: float = 0.0) -> None:
        self.now = 1000.0
        session: Any = pool
        self.events = PoolEvents(session, [0], repeat_seconds, lambda: self.now)
        self.take, self.is_due = self.events.take, self.events.is_due


# ------------------------------------------------------------------- their contents

# The fields of an event that are set: msgpack's short count, or its long one for vLLM 0.33's event,
# which may have sixteen.
ELEVEN = "de000b" if "lookahead_token_ids" in BlockStored.__struct_fields__ else "8b"
PAYLOADS = {
    "stored 11 12": (
        f"93cb41da49204000000091{ELEVEN}"
        "a474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573920b0cb1706172656e745f626c6f"
        "636b5f68617368c0a9746f6b656e5f696473980102030405060708aa626c6f636b5f73697a6504a76c6f7261"
        "5f6964c0a66d656469756da3435055a96c6f72615f6e616d65c0a967726f75705f69647800b26b765f636163"
        "68655f737065635f6b696e64ae66756c6c5f617474656e74696f6ea86c6f63616c697479a54c4f43414c00"
    ),
    "removed 11": (
        "93cb41da4920400000009185a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391"
        "0ba66d656469756da3435055a967726f75705f69647800a86c6f63616c697479a54c4f43414c00"
    ),
}
"""That vLLM 0.32 and 0.33 encoded, at 1764000000.0, of rank 0."""


def test_bytes_are_those_that_vllm_publishes() -> None:
    """As vLLM encodes them, and as its decoder reads them."""
    stored = StoredBlocks(
        hashes=(block_hash(11), block_hash(12)),
        parent=b"",
        tokens=TOKENS,
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
    pool.changes.stored[key_of(13, group=2)] = location(5)
    known, unknown = Publisher(pool).take()
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
    remote = TierInfo(name="remote", medium="remote", shared=True)
    pool.tiers = TierInfo(name="disk", medium="disk", shared=False), remote
    pool.changes.stored_in_tiers[key_of(11)] = location(NO_SLOT)
    publisher = Publisher(pool)
    in_memory, below = publisher.take()
    assert isinstance(in_memory, BlockStored)
    assert isinstance(below, BlockStored)
    assert (in_memory.medium, in_memory.locality) == ("CPU", "LOCAL")
    assert (below.medium, below.locality) == ("STORAGE", None)
    assert (below.block_hashes, below.token_ids) == ([11], [1, 2, 3, 4])
    pool.tiers = (remote,)
    pool.changes.removed.append(key_of(11))
    assert publisher.take() == [BlockRemoved([11], "CPU", 0, "LOCAL")]
    pool.tiers = ()
    pool.changes.removed_from_tiers.append(key_of(11))
    assert publisher.take() == [BlockRemoved([11], "STORAGE", 0, "REMOTE")]


# ------------------------------------------------------------------ when they are published


def test_after_a_reset_of_the_engines_own_cache_everything_is_published_again() -> None:
    """For routers forget all of the engine's blocks with AllBlocksCleared, in whichever medium."""
    publisher = Publisher(Pool(described(11), described(12, 11)))
    device_pool = BlockPool(4, True, BLOCK, True)
    publisher.events.watch(device_pool)
    first = publisher.take()
    assert not publisher.take()
    used = device_pool.get_new_blocks(1)
    assert not device_pool.reset_prefix_cache()  # a block is in use: nothing was reset
    assert not publisher.take()
    device_pool.free_blocks(used)
    assert device_pool.reset_prefix_cache()
    assert publisher.is_due()  # also of an idle engine
    assert publisher.take() == first
    assert not publisher.take()


def test_after_such_a_reset_chunks_that_only_tiers_have_are_published_with_tokens() -> None:
    """The engine remembers tokens of chunks that have left memory."""
    pool = Pool(described(11))
    pool.tiers = (TierInfo(name="disk", medium="disk", shared=False),)
    publisher = Publisher(pool)
    device_pool = BlockPool(4, True, BLOCK, True)
    publisher.events.watch(device_pool)
    in_tiers = {key_of(11): location(NO_SLOT)}
    pool.changes.stored_in_tiers |= in_tiers
    _, first = publisher.take()
    pool.changes.removed.append(key_of(11))
    publisher.take()
    pool.descriptions = ()
    pool.changes.stored_in_tiers |= in_tiers
    assert device_pool.reset_prefix_cache()
    assert publisher.take() == [first]
    assert isinstance(first, BlockStored)
    assert first.token_ids == [1, 2, 3, 4]


def test_an_idle_engine_publishes_changes_once_a_second() -> None:
    """As soon as something waits, then at most once a second while more and more comes."""
    pool = Pool()
    publisher = Publisher(pool)
    assert not publisher.is_due()
    pool.changes.stored[key_of(11)] = location(0)
    assert publisher.is_due()
    assert len(publisher.take(idle=True)) == 1
    pool.changes.removed.append(key_of(11))
    publisher.now += IDLE_SECONDS - 0.01
    assert not publisher.is_due()
    publisher.now += 0.02
    assert publisher.is_due()
    assert len(publisher.take(idle=True)) == 1
    publisher.now += IDLE_SECONDS
    assert not publisher.is_due()


def test_everything_is_published_again_within_the_period() -> None:
    """Each block once, removed and stored in one batch, spread over the period in parts."""
    publisher = Publisher(Pool(*(described(i, i - 1) for i in range(1, 301))), repeat_seconds=100.0)
    publisher.take()
    publisher.now += 99.0
    assert not publisher.is_due()
    assert not publisher.take()
    sizes, hashes = [], list[int | bytes]()
    for _ in range(101):
        publisher.now += 1.0
        batch = publisher.take()
        assert hashes_in(batch, BlockStored) == hashes_in(batch, BlockRemoved)
        hashes += hashes_in(batch, BlockStored)
        sizes.append(len(batch) // 2)
    assert sorted(map(str, hashes)) == sorted(map(str, range(1, 301)))
    assert max(sizes) <= PART_CHUNKS
    assert sum(map(bool, sizes)) == -(-300 // PART_CHUNKS)


def hashes_in(batch: Iterable[KVCacheEvent], kind: type[Any]) -> list[int | bytes]:
    """Blocks that events of this kind name, sorted."""
    return sorted(h for event in batch if isinstance(event, kind) for h in event.block_hashes)


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


# ----------------------------------------------------- in the scheduler of an engine


class Core(EngineCoreProc):  # type: ignore[misc]  # without vLLM's types
    """An engine that makes a connector's half, and has nothing else that it needs."""

    def __init__(self, make: Callable[[], Stepping]) -> None:
        self.input_queue: queue.Queue[object] = queue.Queue()
        self.scheduler: SimpleNamespace | None = None
        self.half = make().half


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Stepping]:
    """Makes a half that publishes KV events, and whose pool has a chunk."""
    return lambda: Stepping(tmp_path, monkeypatch, Pool(described(11)), events=True)


@pytest.fixture
def core(make: Callable[[], Stepping]) -> Iterator[Core]:
    """An engine whose scheduler fails when it publishes without steps."""
    core = Core(make)
    yield core
    core.half.shutdown()


def test_a_data_parallel_replica_publishes_on_its_port_and_names_its_rank(core: Core) -> None:
    """Its endpoint's port is that of the flag plus its rank, and vLLM puts the rank in each batch.

    The connector publishes by vLLM's publisher, also while the engine is idle.
    """
    offset = ZmqEventPublisher.offset_endpoint_port
    assert offset("tcp://*:5557", 1) == "tcp://*:5558"
    with pytest.raises(ValueError, match="endpoint"):
        offset("ipc:///tmp/events", 1)
    publisher = ZmqEventPublisher(1, "inproc://kvd-events", topic="kv@pod@model")
    replica: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
    try:
        replica.subscribe("")
        replica.connect("inproc://kvd-events_dp1")
        device = SimpleNamespace(take_events=list)
        core.scheduler = SimpleNamespace(kv_cache_manager=device, kv_event_publisher=publisher)
        assert not core.half.has_pending_push_work()
        assert replica.poll(int(PATIENCE * 1000))
        _, _, payload = replica.recv_multipart()
    finally:
        replica.close()
        publisher.shutdown()
    batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
    assert batch.data_parallel_rank == 1
    assert [type(event) for event in batch.events] == [BlockStored]


def test_an_error_ends_idle_publishing_and_not_the_engine(
    core: Core, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once; the engine publishes in its steps."""
    for _ in range(2):
        assert not core.half.has_pending_push_work()
    (line,) = [line for line in caplog.records if line.exc_info]
    assert "publishing without steps failed" in line.getMessage()
    assert [type(event) for event in core.half.take_events()] == [BlockStored]


def test_an_error_in_the_events_ends_them_and_not_the_engine(
    core: Core, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once, with its stack; later steps publish nothing, and nothing wakes it."""
    monkeypatch.setattr(core.half.events, "take", lambda **_: 1 // 0)
    assert [list(core.half.take_events()) for _ in range(2)] == [[], []]
    assert not core.half.has_pending_push_work()
    (line,) = [line for line in caplog.records if line.exc_info]
    assert "publishes none" in line.getMessage()


def test_an_engine_in_its_callers_process_publishes_in_steps_only(
    make: Callable[[], Stepping],
) -> None:
    """Nothing can wake it, and nothing is lost."""
    half = make().half
    assert not half.has_pending_push_work()
    assert [type(event) for event in half.take_events()] == [BlockStored]
