"""What is published of a namespace that changes, to routers that come when they like."""

from array import array
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvd.publisher import publication as publication_module
from kvd.publisher.publication import Publication
from kvd.publisher.topics import Topics
from kvd.publisher.wire import Message, topic
from kvd_proto.announcements import below as below_name
from kvd_proto.descriptions import Description
from tests.proto.changing import KEYS, Changing, Operation, operations
from tests.routers.blocks import BlockSet
from tests.routers.dynamo import DynamoIndex
from tests.routers.llmd import LlmdIndex
from tests.routers.wire import decode, low64

BLOCKS = 4  # of a chunk
TOKENS = 2  # of a block
ENGINES = ("a", "b")


def hash_of(chunk: int, block: int) -> bytes:
    """Of a block of a chunk."""
    return bytes((1 + chunk, 1 + block)) * 16


def parent_of(chunk: int) -> bytes:
    """The last block of the chunk before, in a tree; the first two chunks begin prompts."""
    return hash_of(chunk // 2 - 1, BLOCKS - 1) if chunk >= 2 else b""


def description(chunk: int) -> Description:
    """Of one of the keys' chunks."""
    tokens = array("I", range(chunk * 8, chunk * 8 + BLOCKS * TOKENS)).tobytes()
    hashes = tuple(hash_of(chunk, block) for block in range(BLOCKS))
    return Description(parent_of(chunk), hashes, tokens, TOKENS, kind="full_attention")


def prompt_of(block: bytes) -> tuple[int, ...]:
    """The tokens of a prompt that ends with a block."""
    chunk, at = block[0] - 1, block[1] - 1
    own = tuple(range(chunk * 8, chunk * 8 + (at + 1) * TOKENS))
    parent = parent_of(chunk)
    return (*prompt_of(parent), *own) if parent else own


class Described:
    """Descriptions of what lies in a directory, or lay there."""

    def __init__(self, changing: Changing) -> None:
        self._changing = changing
        self._known: dict[tuple[int, int], int] = {}

    def note(self) -> None:
        """Keep those of what is there now."""
        for key, place in self._changing.found().items():
            self._known[place[:2]] = KEYS.index(key)

    def read(self, slot: int, generation: int) -> Description | None:
        """As `DescriptionsView.read`."""
        chunk = self._known.get((slot, generation))
        return None if chunk is None else description(chunk)


class Router:
    """Indexes of one that has subscribed; they hear what is said from then on."""

    def __init__(self) -> None:
        self.indexes: tuple[Any, ...] = (BlockSet(), LlmdIndex(TOKENS), DynamoIndex(TOKENS))
        self.last: dict[str, int] = {}

    def hear(self, message: Message) -> None:
        """Take a message."""
        told = decode(message.frames)
        last = self.last.get(told.topic)
        assert last is None or told.sequence == last + 1
        self.last[told.topic] = told.sequence
        for index in self.indexes:
            index.take(told.topic, told.batch)


class Publishing(RuleBasedStateMachine):
    """Changes, turns of the publisher, engines and routers in any order."""

    @initialize()
    def begin(self) -> None:
        """An empty directory that one engine uses, and one router."""
        self.now = 1000.0
        self.changing = Changing()
        self.described = Described(self.changing)
        described: Any = self.described
        self.publication = Publication(self.changing.view(), described, lambda: 0)
        self.topics = Topics(lambda: self.now)
        self.routers = [Router()]
        self.engine("a")

    def send(self, messages: list[Message]) -> None:
        """Every router hears what is said."""
        for message in messages:
            for router in self.routers:
                router.hear(message)

    @rule(some=st.lists(operations, min_size=1, max_size=5))
    def change(self, some: list[Operation]) -> None:
        """The daemon changes something, faster than anybody reads now and then."""
        for operation in some:
            self.changing.apply(operation)
            self.described.note()

    @rule(times=st.integers(1, 3))
    def turn(self, times: int) -> None:
        """The publisher goes on."""
        for _ in range(times):
            self.now += 0.3
            self.send(self.publication.turn(self.now))

    @rule(name=st.sampled_from(ENGINES))
    def engine(self, name: str) -> None:
        """An engine comes, or one that is there leaves."""
        if name not in self.publication.topics:
            self.publication.topics[name] = self.topics.open(topic(name, "m"))
            return
        gone, messages = self.publication.withdraw(name)
        self.send(messages)
        self.topics.closed(gone)
        for router in self.routers:
            for index in router.indexes:
                assert not index.held(name if isinstance(index, LlmdIndex) else f"kv@{name}@m")
                if isinstance(index, DynamoIndex):
                    assert not index.held(f"kv@{name}@m", "disk")

    @rule()
    def subscribe(self) -> None:
        """A router comes, and the others hear everything again."""
        self.routers = [*self.routers[-1:], Router()]
        for each in self.topics.opened:
            each.due = True

    @rule()
    def rest(self) -> None:
        """Nothing changes until everything is said: each router believes what is there."""
        self.changing.below()
        for _ in range(400):
            self.now += 0.3
            self.send(self.publication.turn(self.now))
            due = any(each.due for each in self.topics.opened)
            if not (due or self.publication.behind or self.publication._telling):
                break
        else:
            raise AssertionError(f"there is no end: {self.publication}")
        memory, kept, bare = self.media()
        there = memory | kept
        for name in ENGINES:
            used = name in self.publication.topics
            for router in self.routers:
                plain, llmd, dynamo = router.indexes
                at = f"kv@{name}@m"
                said = {(block.medium, block.hash) for block in plain.held(at)}
                promised = {(tier, key) for key, tier, _ in llmd.held(name)}
                for medium, tier, blocks in (("CPU", "host", memory), ("STORAGE", "disk", kept)):
                    found = set(map(low64, blocks)) if used else set()
                    assert dynamo.held(at, tier) == found
                    said -= {(medium, each) for each in found}
                    chained = {each for each in blocks if self.chain_is_there(each, there)}
                    wanted, possible = (
                        {(medium.lower(), llmd.chain("m", prompt_of(each))[-1]) for each in some}
                        for some in ((chained, blocks) if used else (set(), set()))
                    )
                    mine = {each for each in promised if each[0] == medium.lower()}
                    assert wanted <= mine <= possible
                assert said == ({("STORAGE", low64(each)) for each in bare} if used else set())

    def media(self) -> tuple[set[bytes], set[bytes], set[bytes]]:
        """Blocks in memory, in tiers, and what chunks in tiers without description are told by.

        A chunk that is in memory, too, has a description.
        """
        found, below = self.changing.found(), self.changing.below()
        without = {key for key in below if below_name(key) in self.publication._announcer._bare}
        assert not without & found.keys()
        memory = {key: place[2:] for key, place in found.items()}
        described = {key: place for key, place in below.items() if key not in without}
        in_memory, in_tiers = (
            {
                hash_of(KEYS.index(key), block)
                for key, (first, count) in some.items()
                for block in range(first, first + count)
            }
            for some in (memory, described)
        )
        return in_memory, in_tiers, {key[:-4] or key for key in without}

    @staticmethod
    def chain_is_there(block: bytes, there: set[bytes]) -> bool:
        """Whether all blocks before this one are there, from the first of a prompt on."""
        while block in there:
            chunk, at = block[0] - 1, block[1] - 1
            if not (block := hash_of(chunk, at - 1) if at else parent_of(chunk)):
                return True
        return False

    @invariant()
    def is_sound(self) -> None:
        """Nothing contradicts itself."""
        if hasattr(self, "publication"):
            repr(self.publication)
            self.publication._announcer.check_integrity()

    def teardown(self) -> None:
        """All ends well."""
        if hasattr(self, "publication"):
            self.rest()


@pytest.mark.parametrize("piece", [1, 5])
@pytest.mark.hypothesis
def test_every_router_believes_what_is_there(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """Plain sets, llm-d's and Dynamo's rules; late subscribers, engines that come and leave."""
    monkeypatch.setattr(publication_module, "PIECE", piece)
    monkeypatch.setattr(publication_module, "CHANGES_AT_ONCE", 3)
    run_state_machine_as_test(Publishing, settings=settings(settings(), stateful_step_count=40))
