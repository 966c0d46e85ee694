"""What Dynamo's real indexer makes of each form of KV event that an engine can publish.

Events are vLLM's own structures, encoded as vLLM's publisher encodes them. Each row of the tables
states what is published and what the router knows of `PROMPT` then.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import (
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)

from tests.routers.indexer import NOTHING, DynamoIndexer, Matched, endpoints
from tests.waiting import PATIENCE, eventually

BLOCK = 4
TIME = 1764000000.0
PROMPT = range(1, 25)  # blocks 11 to 16
FIRST = 11
MARKER = 1_000_000  # first token, and hash, of the first marker: see `Worker.known`
MEDIA = ("GPU", "CPU", "STORAGE")


def tokens_of(block: int) -> list[int]:
    """The tokens of a block of `PROMPT`."""
    first = (block - FIRST) * BLOCK
    return list(PROMPT[first : first + BLOCK])


def stored(
    *blocks: int,
    parent: int | bytes | None = None,
    medium: str | None = "CPU",
    hashed: Callable[[int], int | bytes] = int,
    **fields: Any,
) -> Any:
    """Return the event that stores blocks of `PROMPT`, each the parent of the next."""
    event = {
        "block_hashes": [hashed(block) for block in blocks],
        "parent_block_hash": parent,
        "token_ids": [token for block in blocks for token in tokens_of(block)],
        "block_size": BLOCK,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
    }
    return BlockStored(**(event | fields))


def removed(*blocks: int, medium: str | None = "CPU", **fields: Any) -> Any:
    """Return the event that removes blocks from a medium."""
    return BlockRemoved(block_hashes=list(blocks), medium=medium, **fields)


def wide(block: int) -> bytes:
    """A block's hash of 32 bytes, whose last eight are its number."""
    return bytes([0xAB] * 24) + block.to_bytes(8, "big")


def blocks(*, gpu: int = 0, cpu: int = 0, disk: int = 0) -> Matched:
    """Return an answer for `PROMPT`: blocks on the device, then in memory, then on disk."""
    device, memory, below = gpu * BLOCK, (gpu + cpu) * BLOCK, (gpu + cpu + disk) * BLOCK
    return Matched(below, device, memory, below)


_markers = count(MARKER, BLOCK)
_numbers = count(1)  # an instance has one model


class Worker:
    """An engine's publisher, an instance of the indexer while it is entered.

    Or a further replica of an engine, `rank` 1 or more, which ends with the first one.
    """

    def __init__(
        self,
        indexer: DynamoIndexer,
        folder: Path,
        model: str,
        *,
        replica_of: "Worker | None" = None,
        rank: int = 0,
    ) -> None:
        self._number: int = replica_of._number if replica_of else next(_numbers)
        self._rank = rank
        self._model = model
        self._indexer = indexer
        folder.mkdir(exist_ok=True)
        self._endpoint, _ = endpoints(folder, f"worker-{self._number}-{rank}")
        self._next_sequence = 0
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self._endpoint)

    def __enter__(self) -> Self:
        self.register(self._rank)
        assert self._socket.poll(int(PATIENCE * 1000)), "the indexer does not subscribe"
        assert self._socket.recv() == b"\x01"  # to all topics
        return self

    def __exit__(self, *_: object) -> None:
        if not self._rank:
            self._indexer.unregister(self._number, self._model)
        self._socket.close()

    def register(self, rank: int) -> None:
        """Register it as the engine's replica of this rank."""
        self._indexer.register(self._number, self._endpoint, self._model, BLOCK, rank=rank)

    def publish(self, *events: Any, number: int | None = None) -> None:
        """Publish events in one batch, with the next sequence number or this one."""
        if number is None:
            number, self._next_sequence = self._next_sequence, self._next_sequence + 1
        payload = msgspec.msgpack.encode(KVEventBatch(TIME, list(events), self._rank))
        self._socket.send_multipart([b"kv@engine", number.to_bytes(8, "big"), payload])

    def skip(self, batches: int) -> None:
        """Leave out sequence numbers, as if so many batches were lost."""
        self._next_sequence += batches

    def known(self, **query: str) -> Matched:
        """What the router knows of `PROMPT` when it has taken all that was published.

        It applies the events of each tier in order: a block that is new in each tier marks the end.
        """
        ends = [range(first, first + BLOCK) for first in islice(_markers, len(MEDIA))]
        for tokens, medium in zip(ends, MEDIA, strict=True):
            self.publish(stored(tokens[0], medium=medium, token_ids=list(tokens)))
        for tokens in ends:
            eventually(
                partial(self._indexer.query, self._number, tokens, self._model),
                lambda known: known != NOTHING,
            )
        return self._indexer.query(self._number, PROMPT, self._model, **query)


@pytest.fixture(scope="module")
def indexer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DynamoIndexer]:
    """One indexer for the module: each test has a model of its own in it."""
    with DynamoIndexer(tmp_path_factory.mktemp("indexer") / "log") as running:
        yield running


@pytest.fixture
def worker(indexer: DynamoIndexer, runtime_dir: Path, label: str) -> Iterator[Worker]:
    """A publisher that the indexer hears, the only one of its model."""
    with Worker(indexer, runtime_dir, label) as heard:
        yield heard


KVD: dict[str, Any] = {"group_idx": 0, "kv_cache_spec_kind": "full_attention", "locality": "LOCAL"}
WINDOW: dict[str, Any] = {
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 128,
}
PICTURE = ("ab" * 32, 0)

# What is known of `PROMPT` after these batches, most of one event.
FORMS: dict[str, tuple[Matched, *tuple[Any, ...]]] = {
    # What kvd's connector publishes of tiers of this node, of shared tiers.
    "kvd tier": (blocks(disk=2), stored(11, 12, medium="STORAGE", **KVD)),
    "kvd shared tier": (
        NOTHING,
        stored(11, 12, medium="STORAGE", **KVD | {"locality": "REMOTE"}),
    ),
    # Media; where, and whose.
    "unknown medium": (NOTHING, stored(11, 12, medium="TAPE")),
    "ownership": (NOTHING, stored(11, 12, ownership="kvd")),
    # KV-cache groups.
    "kind sliding window": (NOTHING, stored(11, **WINDOW)),
    # On disk groups are not told apart: so kvd publishes one of them only.
    "kind sliding window on disk": (blocks(disk=1), stored(11, medium="STORAGE", **WINDOW)),
    "removed of a window's group on disk": (
        NOTHING,
        stored(11, medium="STORAGE", group_idx=0, kv_cache_spec_kind="full_attention"),
        stored(11, medium="STORAGE", group_idx=1, **WINDOW),
        removed(11, medium="STORAGE", group_idx=1),
    ),
    "removed of a window's group": (
        blocks(cpu=1),
        stored(11, **KVD),
        stored(11, group_idx=1, **WINDOW),
        removed(11, group_idx=1),
    ),
    # Sizes and tokens.
    "another block size": (NOTHING, stored(11, block_size=2 * BLOCK)),
    "block size 0, no tokens": (NOTHING, stored(11, block_size=0, token_ids=[])),
    # What else a block's hash is made of.
    "adapter, asked without": (NOTHING, stored(11, lora_name="sql")),
    "adapter": (blocks(cpu=1), stored(11, lora_name="sql")),
    "cache salt, asked without": (blocks(cpu=1), stored(11, extra_keys=[("salt",)])),
    "cache salt": (NOTHING, stored(11, extra_keys=[("salt",)])),
    "picture, asked without": (blocks(cpu=1), stored(11, extra_keys=[(PICTURE,)])),
    # Hashes.
    "hashes of 32 bytes": (NOTHING, stored(11, 12, hashed=wide)),
    "a batch with one of them": (NOTHING, [stored(11, hashed=wide), stored(11, 12)]),
    # Parents that are unknown.
    "unknown parent on the device": (
        blocks(gpu=1),
        stored(12, parent=11, medium="GPU"),
        stored(11, medium="GPU"),
    ),
    "unknown parent in memory": (blocks(cpu=2), stored(12, parent=11), stored(11)),
    "unknown parent on disk": (
        blocks(disk=2),
        stored(12, parent=11, medium="STORAGE"),
        stored(11, medium="STORAGE"),
    ),
    # Chains over several media.
    "device, memory, disk": (
        blocks(gpu=1, cpu=1, disk=1),
        stored(11, medium="GPU"),
        stored(12, parent=11),
        stored(13, parent=12, medium="STORAGE"),
    ),
    "memory, then device": (blocks(cpu=1), stored(11), stored(12, parent=11, medium="GPU")),
    # Counting.
    "stored twice, removed once": (blocks(cpu=1), stored(11, 12), stored(11, 12), removed(12)),
}
QUERIES = {"adapter": {"lora_name": "sql"}, "cache salt": {"cache_salt": "salt"}}


@pytest.mark.parametrize("form", FORMS)
def test_known_after_events(worker: Worker, form: str) -> None:
    """The router knows of the prompt what the row says, when it has taken the row's events."""
    known, *batches = FORMS[form]
    for batch in batches:
        worker.publish(*(batch if isinstance(batch, list) else [batch]))
    assert worker.known(**QUERIES.get(form, {})) == known


def test_lost_batches_stay_lost_without_replay(worker: Worker) -> None:
    """After a gap the router takes what follows and does not notice what it has missed."""
    worker.publish(stored(11, 12))
    worker.skip(2)
    worker.publish(stored(14, parent=13))
    assert worker.known() == blocks(cpu=2)


def test_numbers_that_start_again_are_dropped(worker: Worker) -> None:
    """Of an engine that was restarted nothing is taken until its numbers pass the old ones."""
    worker.skip(10)
    worker.publish(stored(11))
    for number in range(5):
        worker.publish(stored(12, parent=11), removed(11), number=number)
    assert worker.known() == blocks(cpu=1)


def test_a_registration_anew_takes_numbers_from_the_start(
    indexer: DynamoIndexer, runtime_dir: Path, label: str
) -> None:
    """An engine that was unregistered has no blocks, and may begin at 0 when it is registered."""
    with Worker(indexer, runtime_dir, label) as first:
        first.skip(10)
        first.publish(stored(11, 12))
        assert first.known() == blocks(cpu=2)
    with Worker(indexer, runtime_dir, label) as second:
        second.publish(stored(11))
        assert second.known() == blocks(cpu=1)


def test_data_parallel_replicas_are_registered_each_with_its_rank(
    indexer: DynamoIndexer, runtime_dir: Path, label: str
) -> None:
    """One instance has what any of them has; without its rank a second replica is refused.

    What one of them drops the others still have.
    """
    with (
        Worker(indexer, runtime_dir, label) as first,
        Worker(indexer, runtime_dir, label, replica_of=first, rank=1) as second,
    ):
        with pytest.raises(AssertionError, match="409"):
            second.register(rank=0)
        first.publish(stored(11, 12))
        second.publish(stored(11, 12, 13))
        assert {first.known(), second.known()} == {blocks(cpu=3)}
        first.publish(removed(11, 12))
        assert {first.known(), second.known()} == {blocks(cpu=3)}
