"""What Dynamo's real indexer makes of each form of KV event that an engine can publish.

Events are vLLM's own structures, encoded as vLLM's publisher encodes them. Each row of the tables
states what is published and what the router knows of `PROMPT` then.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)

from tests.routers.indexer import NOTHING, DynamoIndexer, Matched
from tests.waiting import PATIENCE, eventually

BLOCK = 4
TIME = 1764000000.0
PROMPT = range(1, 25)  # blocks 11 to 16
FIRST = 11
MARKER = 1_000_000  # first token, and hash, of the first marker: see `await_all_taken`
MEDIA = ("GPU", "CPU", "STORAGE")
Batch = Sequence[Any]


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


# ------------------------------------------------------------------- publishers


class Publisher:
    """An engine's publisher that can wait for its subscriber."""

    def __init__(self, endpoint: str, topic: str = "") -> None:
        self.endpoint = endpoint
        self._topic = topic.encode()
        self._numbers = count()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)

    def close(self) -> None:
        """Close its socket."""
        self._socket.close()

    def await_subscriber(self) -> None:
        """Wait until the indexer has subscribed."""
        assert self._socket.poll(int(PATIENCE * 1000)), "the indexer does not subscribe"
        assert self._socket.recv() == b"\x01"  # to all topics

    def publish(self, *events: Any) -> None:
        """Publish events in one batch."""
        self.publish_as(next(self._numbers), *events)

    def publish_as(self, number: int, *events: Any, topic: str | None = None) -> None:
        """Publish events with this sequence number, on another topic if one is given."""
        payload = msgspec.msgpack.encode(KVEventBatch(TIME, list(events), 0))
        name = self._topic if topic is None else topic.encode()
        self._socket.send_multipart([name, number.to_bytes(8, "big"), payload])

    def skip(self, batches: int) -> None:
        """Leave out sequence numbers, as if so many batches were lost."""
        for _ in range(batches):
            next(self._numbers)


_markers = count(MARKER, BLOCK)
_numbers = count(1)  # an instance has one model


class Worker:
    """A publisher, registered as an instance of the indexer while it is entered."""

    def __init__(self, indexer: DynamoIndexer, endpoint: str, model: str) -> None:
        self.number = next(_numbers)
        self.model = model
        self.publisher = Publisher(endpoint, f"kv@{self.number}@{model}")
        self._indexer = indexer

    def __enter__(self) -> Self:
        self._indexer.register(self.number, self.publisher.endpoint, self.model, BLOCK)
        self.publisher.await_subscriber()
        return self

    def __exit__(self, *_: object) -> None:
        self._indexer.unregister(self.number, self.model)
        self.publisher.close()

    def known(self, **query: str) -> Matched:
        """What the router knows of `PROMPT` when it has taken all that was published."""
        await_all_taken(self._indexer, self.model, self.number, self.publisher.publish)
        return self._indexer.query(PROMPT, self.model, **query).get(self.number, NOTHING)


def await_all_taken(
    indexer: DynamoIndexer, model: str, number: int, publish: Callable[..., None]
) -> None:
    """Wait until the indexer has taken all that this worker has published.

    It applies the events of each tier in order: a block that is new in each tier marks the end.
    """
    markers = [next(_markers) for _ in MEDIA]
    for marker, medium in zip(markers, MEDIA, strict=True):
        tokens = list(range(marker, marker + BLOCK))
        publish(stored(marker, medium=medium, token_ids=tokens))
    for marker in markers:
        eventually(partial(indexer.query, range(marker, marker + BLOCK), model), known_to(number))


def known_to(number: int) -> Callable[[dict[int, Matched]], bool]:
    """Return what tests whether an answer names this worker."""
    return lambda answer: number in answer


@pytest.fixture(scope="module")
def indexer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DynamoIndexer]:
    """One indexer for the module: each test has a model of its own in it."""
    with DynamoIndexer(tmp_path_factory.mktemp("indexer") / "log") as running:
        yield running


@pytest.fixture
def endpoints(runtime_dir: Path) -> Callable[[str], str]:
    """Endpoints of this test, by name."""
    runtime_dir.mkdir()
    return lambda name: f"ipc://{runtime_dir}/{name}"


@pytest.fixture
def worker(indexer: DynamoIndexer, endpoints: Callable[[str], str], label: str) -> Iterator[Worker]:
    """A publisher that the indexer hears, the only one of its model."""
    with Worker(indexer, endpoints("events"), label) as heard:
        yield heard


# ---------------------------------------------------------- one event, each form


class Form(NamedTuple):
    """A row: batches that are published, and what is known of `PROMPT` then."""

    name: str
    batches: Sequence[Batch]
    known: Matched
    query: Mapping[str, str] = {}


KVD: dict[str, Any] = {"group_idx": 0, "kv_cache_spec_kind": "full_attention", "locality": "LOCAL"}
WINDOW: dict[str, Any] = {
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 128,
}
PICTURE = ("ab" * 32, 0)

FORMS = [
    # What kvd's connector publishes of memory, of tiers of this node, of shared tiers.
    Form("kvd memory", [[stored(11, 12, **KVD)]], blocks(cpu=2)),
    Form("kvd tier", [[stored(11, 12, medium="STORAGE", **KVD)]], blocks(disk=2)),
    Form(
        "kvd shared tier",
        [[stored(11, 12, medium="STORAGE", **KVD | {"locality": "REMOTE"})]],
        NOTHING,
    ),
    # Media.
    Form("no medium", [[stored(11, 12, medium=None)]], blocks(gpu=2)),
    Form("medium GPU", [[stored(11, 12, medium="GPU")]], blocks(gpu=2)),
    Form("medium CPU", [[stored(11, 12, medium="CPU")]], blocks(cpu=2)),
    Form("medium STORAGE", [[stored(11, 12, medium="STORAGE")]], blocks(disk=2)),
    Form("unknown medium", [[stored(11, 12, medium="TAPE")]], NOTHING),
    # Where, and whose.
    Form("locality LOCAL", [[stored(11, 12, locality="LOCAL")]], blocks(cpu=2)),
    Form("locality REMOTE", [[stored(11, 12, locality="REMOTE")]], NOTHING),
    Form("unknown locality", [[stored(11, 12, locality="NEAR")]], NOTHING),
    Form("ownership", [[stored(11, 12, ownership="kvd")]], NOTHING),
    Form("ownership of nobody", [[stored(11, 12, ownership="")]], NOTHING),
    Form("session", [[stored(11, 12, session_id="chat")]], blocks(cpu=2)),
    Form("ownership on the device", [[stored(11, medium="GPU", ownership="kvd")]], NOTHING),
    # KV-cache groups.
    Form("kind full attention", [[stored(11, kv_cache_spec_kind="full_attention")]], blocks(cpu=1)),
    Form("kind MLA", [[stored(11, kv_cache_spec_kind="mla_attention")]], blocks(cpu=1)),
    Form("kind sliding window", [[stored(11, **WINDOW)]], NOTHING),
    Form("kind of mamba", [[stored(11, kv_cache_spec_kind="mamba")]], NOTHING),
    # On disk groups are not told apart: so kvd publishes one of them only.
    Form("kind sliding window on disk", [[stored(11, medium="STORAGE", **WINDOW)]], blocks(disk=1)),
    Form(
        "removed of a window's group on disk",
        [
            [stored(11, medium="STORAGE", group_idx=0, kv_cache_spec_kind="full_attention")],
            [stored(11, medium="STORAGE", group_idx=1, **WINDOW)],
            [removed(11, medium="STORAGE", group_idx=1)],
        ],
        NOTHING,
    ),
    Form("group 0, no kind", [[stored(11, group_idx=0)]], blocks(cpu=1)),
    Form("group 1, no kind", [[stored(11, group_idx=1)]], NOTHING),
    Form(
        "group 1, full attention",
        [[stored(11, group_idx=1, kv_cache_spec_kind="full_attention")]],
        blocks(cpu=1),
    ),
    # Sizes and tokens.
    Form("another block size", [[stored(11, block_size=2 * BLOCK)]], NOTHING),
    Form("block size 0, no tokens", [[stored(11, block_size=0, token_ids=[])]], NOTHING),
    Form("no tokens", [[stored(11, token_ids=[])]], NOTHING),
    Form(
        "tokens of the first block only", [[stored(11, 12, token_ids=tokens_of(11))]], blocks(cpu=1)
    ),
    # What else a block's hash is made of.
    Form("adapter, asked without", [[stored(11, lora_name="sql")]], NOTHING),
    Form("adapter", [[stored(11, lora_name="sql")]], blocks(cpu=1), {"lora_name": "sql"}),
    Form(
        "adapter in the extra keys too",
        [[stored(11, lora_name="sql", extra_keys=[("sql",)])]],
        blocks(cpu=1),
        {"lora_name": "sql"},
    ),
    Form("cache salt, asked without", [[stored(11, extra_keys=[("salt",)])]], blocks(cpu=1)),
    Form(
        "cache salt",
        [[stored(11, extra_keys=[("salt",)])]],
        NOTHING,
        {"cache_salt": "salt"},
    ),
    Form(
        "cache salt as Dynamo's worker tags it, asked without",
        [[stored(11, extra_keys=[("dynamo-cache-salt:salt",)])]],
        NOTHING,
    ),
    Form(
        "cache salt as Dynamo's worker tags it",
        [[stored(11, extra_keys=[("dynamo-cache-salt:salt",)])]],
        blocks(cpu=1),
        {"cache_salt": "salt"},
    ),
    Form("picture, asked without", [[stored(11, extra_keys=[(PICTURE,)])]], blocks(cpu=1)),
    Form("no extra keys of a block", [[stored(11, extra_keys=[None])]], blocks(cpu=1)),
    # Hashes.
    Form("hashes of 64 bits", [[stored(11, 12, hashed=lambda n: 2**64 - n)]], blocks(cpu=2)),
    Form("hashes of 32 bytes", [[stored(11, 12, hashed=wide)]], NOTHING),
    Form("a batch with one of them", [[stored(11, hashed=wide), stored(11, 12)]], NOTHING),
    Form("a parent of 32 bytes", [[stored(11)], [stored(12, parent=wide(11))]], blocks(cpu=1)),
]


# --------------------------------------------------- several events, one after another

CHAINS = [
    # Parents that are unknown.
    Form(
        "unknown parent on the device",
        [[stored(12, parent=11, medium="GPU")], [stored(11, medium="GPU")]],
        blocks(gpu=1),
    ),
    Form("unknown parent in memory", [[stored(12, parent=11)], [stored(11)]], blocks(cpu=2)),
    Form(
        "unknown parent on disk",
        [[stored(12, parent=11, medium="STORAGE")], [stored(11, medium="STORAGE")]],
        blocks(disk=2),
    ),
    # Chains over several media.
    Form(
        "device, then memory",
        [[stored(11, medium="GPU")], [stored(12, 13, parent=11)]],
        blocks(gpu=1, cpu=2),
    ),
    Form(
        "device, then disk",
        [[stored(11, medium="GPU")], [stored(12, parent=11, medium="STORAGE")]],
        blocks(gpu=1, disk=1),
    ),
    Form(
        "memory, then disk",
        [[stored(11)], [stored(12, 13, parent=11, medium="STORAGE")]],
        blocks(cpu=1, disk=2),
    ),
    Form(
        "device, memory, disk",
        [
            [stored(11, medium="GPU")],
            [stored(12, parent=11)],
            [stored(13, parent=12, medium="STORAGE")],
        ],
        blocks(gpu=1, cpu=1, disk=1),
    ),
    Form(
        "disk, then memory",
        [[stored(11, medium="STORAGE")], [stored(12, parent=11)]],
        blocks(disk=1),
    ),
    Form(
        "memory, then device", [[stored(11)], [stored(12, parent=11, medium="GPU")]], blocks(cpu=1)
    ),
    Form(
        "memory, disk, memory",
        [[stored(11)], [stored(12, parent=11, medium="STORAGE")], [stored(13, parent=12)]],
        blocks(cpu=1, disk=1),
    ),
    Form(
        "the same block in memory and on disk",
        [[stored(11)], [stored(11, 12, medium="STORAGE")]],
        blocks(cpu=1, disk=1),
    ),
    Form(
        "the same block on the device and in memory",
        [[stored(11, medium="GPU")], [stored(11, 12)]],
        blocks(gpu=1, cpu=1),
    ),
    # Removals.
    Form("removed", [[stored(11, 12)], [removed(12)]], blocks(cpu=1)),
    Form("removed, unknown", [[stored(11)], [removed(15)]], blocks(cpu=1)),
    Form(
        "removed from another medium",
        [[stored(11)], [removed(11, medium="STORAGE")]],
        blocks(cpu=1),
    ),
    Form("removed with an owner", [[stored(11)], [removed(11, ownership="kvd")]], blocks(cpu=1)),
    Form("removed as REMOTE", [[stored(11)], [removed(11, locality="REMOTE")]], blocks(cpu=1)),
    Form(
        "removed of kvd",
        [[stored(11, 12, **KVD)], [removed(12, group_idx=0, locality="LOCAL")]],
        blocks(cpu=1),
    ),
    Form(
        "removed of group 1, kind learned",
        [
            [stored(11, group_idx=1, kv_cache_spec_kind="full_attention")],
            [removed(11, group_idx=1)],
        ],
        NOTHING,
    ),
    Form(
        "removed of a window's group",
        [[stored(11, **KVD)], [stored(11, group_idx=1, **WINDOW)], [removed(11, group_idx=1)]],
        blocks(cpu=1),
    ),
    Form(
        "removed of a group of which nothing was learned",
        [[stored(11)], [removed(11, group_idx=1)]],
        blocks(cpu=1),
    ),
    # Counting.
    Form(
        "stored twice, removed once",
        [[stored(11, 12)], [stored(11, 12)], [removed(12)]],
        blocks(cpu=1),
    ),
    Form(
        "stored twice on the device, removed once",
        [
            [stored(11, 12, medium="GPU")],
            [stored(11, 12, medium="GPU")],
            [removed(12, medium="GPU")],
        ],
        blocks(gpu=1),
    ),
    Form(
        "removed twice, stored once",
        [[stored(11)], [removed(11)], [removed(11)], [stored(11)]],
        blocks(cpu=1),
    ),
    # Order in one batch.
    Form(
        "removed and stored in one batch",
        [[stored(11, 12)], [removed(11), stored(11)]],
        blocks(cpu=2),
    ),
    Form("stored and removed in one batch", [[stored(11, 12), removed(12)]], blocks(cpu=1)),
    Form(
        "removed and stored on the device in one batch",
        [[stored(11, 12, medium="GPU")], [removed(11, medium="GPU"), stored(11, medium="GPU")]],
        blocks(gpu=1),
    ),
    Form(
        "moved from memory to disk in one batch",
        [[stored(11)], [stored(11, medium="STORAGE"), removed(11)]],
        blocks(disk=1),
    ),
    # A parent that goes and comes back.
    Form("parent removed", [[stored(11, 12, 13)], [removed(11)]], NOTHING),
    Form(
        "parent comes back in memory",
        [[stored(11, 12, 13)], [removed(11)], [stored(11)]],
        blocks(cpu=3),
    ),
    Form(
        "parent comes back on the device",
        [
            [stored(11, 12, 13, medium="GPU")],
            [removed(11, medium="GPU")],
            [stored(11, medium="GPU")],
        ],
        blocks(gpu=1),
    ),
    Form(
        "parent comes back on disk",
        [
            [stored(11, 12, medium="STORAGE")],
            [removed(11, medium="STORAGE")],
            [stored(11, medium="STORAGE")],
        ],
        blocks(disk=2),
    ),
    Form(
        "parent removed on the device, back in memory",
        [
            [stored(11, medium="GPU")],
            [stored(12, parent=11)],
            [removed(11, medium="GPU")],
            [stored(11)],
        ],
        blocks(cpu=2),
    ),
    # Stores that overlap.
    Form("the first block known, more follow", [[stored(11)], [stored(11, 12, 13)]], blocks(cpu=3)),
    Form(
        "the first block known on the device, more follow",
        [[stored(11, medium="GPU")], [stored(11, 12, 13, medium="GPU")]],
        blocks(gpu=3),
    ),
    Form(
        "another hash for the same tokens",
        [[stored(11)], [stored(21, token_ids=tokens_of(11))], [stored(12, parent=21)]],
        blocks(cpu=1),
    ),
    Form(
        "the same hash twice in one event", [[stored(11, 11, token_ids=list(PROMPT[:8]))]], NOTHING
    ),
    # All gone.
    Form("cleared", [[stored(11)], [AllBlocksCleared()]], NOTHING),
    Form(
        "cleared in all media",
        [
            [stored(11, medium="GPU")],
            [stored(12, parent=11)],
            [stored(13, parent=12, medium="STORAGE")],
            [AllBlocksCleared()],
        ],
        NOTHING,
    ),
    Form(
        "cleared, then stored", [[stored(11, 12)], [AllBlocksCleared(), stored(11)]], blocks(cpu=1)
    ),
]


@pytest.mark.parametrize("form", [*FORMS, *CHAINS], ids=lambda form: form.name)
def test_known_after_events(worker: Worker, form: Form) -> None:
    """The router knows of the prompt what the row says, when it has taken the row's events."""
    for batch in form.batches:
        worker.publisher.publish(*batch)
    assert worker.known(**form.query) == form.known


# ----------------------------------------------------------- sequences and topics


def test_lost_batches_stay_lost_without_replay(worker: Worker) -> None:
    """After a gap the router takes what follows and does not notice what it has missed."""
    worker.publisher.publish(stored(11, 12))
    worker.publisher.skip(2)
    worker.publisher.publish(stored(14, parent=13))
    assert worker.known() == blocks(cpu=2)


def test_numbers_that_start_again_are_dropped(worker: Worker) -> None:
    """Of an engine that was restarted nothing is taken until its numbers pass the old ones."""
    worker.publisher.skip(10)
    worker.publisher.publish(stored(11))
    for number in range(5):
        worker.publisher.publish_as(number, stored(12, parent=11), removed(11))
    assert worker.known() == blocks(cpu=1)


def test_a_registration_anew_takes_numbers_from_the_start(
    indexer: DynamoIndexer, endpoints: Callable[[str], str], label: str
) -> None:
    """An engine that was unregistered has no blocks, and may begin at 0 when it is registered."""
    with Worker(indexer, endpoints("first"), label) as first:
        first.publisher.skip(10)
        first.publisher.publish(stored(11, 12))
        assert first.known() == blocks(cpu=2)
    with Worker(indexer, endpoints("second"), label) as second:
        second.publisher.publish(stored(11))
        assert second.known() == blocks(cpu=1)


class Engine:
    """vLLM's own publisher, with its replay socket."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self.endpoint, self.replay_endpoint = endpoint, replay_endpoint
        self._publisher = ZmqEventPublisher(0, endpoint, replay_endpoint, topic="kv@engine@model")

    def publish(self, *events: Any) -> None:
        """Publish events in one batch."""
        self._publisher.publish(KVEventBatch(TIME, list(events)))

    def shutdown(self) -> None:
        """End its thread."""
        self._publisher.shutdown()


@pytest.fixture
def engine(endpoints: Callable[[str], str]) -> Iterator[Engine]:
    """A publisher as vLLM's engine has one."""
    publisher = Engine(endpoints("events"), endpoints("replay"))
    yield publisher
    publisher.shutdown()


def test_vllms_publisher_is_heard(indexer: DynamoIndexer, engine: Engine, label: str) -> None:
    """The router hears vLLM's publisher once it has connected."""

    def publish_marker(_: int) -> list[int]:
        marker = next(_markers)
        tokens = list(range(marker, marker + BLOCK))
        engine.publish(stored(marker, token_ids=tokens))
        return tokens

    number = next(_numbers)
    indexer.register(number, engine.endpoint, label, BLOCK)
    indexer.await_events(number, label, publish_marker)
    engine.publish(stored(11, 12), removed(12))
    await_all_taken(indexer, label, number, engine.publish)
    assert indexer.query(PROMPT, label) == {number: blocks(cpu=1)}
    assert indexer.settled_query(PROMPT, label) == {number: blocks(cpu=1)}


def test_replay_brings_what_was_missed(indexer: DynamoIndexer, engine: Engine, label: str) -> None:
    """With vLLM's replay socket the router asks for all batches that it has not heard."""
    engine.publish(stored(11))
    engine.publish(stored(12, parent=11, medium="STORAGE"), stored(13, parent=12, medium="STORAGE"))
    engine.publish(removed(13, medium="STORAGE"))
    number = next(_numbers)
    indexer.register(number, engine.endpoint, label, BLOCK, engine.replay_endpoint)
    eventually(lambda: engine.publish(stored(16)), lambda _: indexer.query(PROMPT, label))
    await_all_taken(indexer, label, number, engine.publish)
    assert indexer.query(PROMPT, label) == {number: blocks(cpu=1, disk=1)}


# ------------------------------------------------------- several engines and models


def test_engines_have_blocks_of_their_own(
    indexer: DynamoIndexer, endpoints: Callable[[str], str], label: str
) -> None:
    """What one engine stores and removes does not change what the router knows of another."""
    with (
        Worker(indexer, endpoints("first"), label) as first,
        Worker(indexer, endpoints("second"), label) as second,
    ):
        for worker in (first, second):
            worker.publisher.publish(stored(11, 12))
        first.publisher.publish(stored(13, parent=12, medium="STORAGE"))
        second.publisher.publish(removed(12))
        assert first.known() == blocks(cpu=2, disk=1)
        assert second.known() == blocks(cpu=1)
        first.publisher.publish(AllBlocksCleared())
        assert first.known() == NOTHING
        assert second.known() == blocks(cpu=1)


# ---------------------------------------------------------------------- the harness
