"""What routers make of announcements: sets, counters, and trees that drop what has no parent."""

import struct
from collections import Counter
from collections.abc import Iterable

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

from kvd_proto import announcer as announcer_module
from kvd_proto.announcements import Announcement, RemovedBlocks, StoredBlocks
from kvd_proto.announcer import Announcer
from kvd_proto.descriptions import Description
from kvd_proto.said import NO_SLOT, Differences, Place

BLOCK_SIZE = 2
NODES = 14
GROUPS = 2

BELOW = 100
MEDIA = (*range(GROUPS), *range(BELOW, BELOW + GROUPS))

Name = tuple[int, bytes]
"""A block: its group, to which `BELOW` is added where it lies in tiers, and its hash."""


def group_of(told: Announcement) -> int:
    """As in a name."""
    return told.group + BELOW * told.below


def block_hash(node: int) -> bytes:
    """Of a node of a tree of blocks."""
    return bytes([65 + node]) * 8


def key_of(node: int, group: int = 0) -> bytes:
    """Of the chunk that ends with this block, as vLLM names it."""
    return block_hash(node) + group.to_bytes(4, "big")


def tokens_of(nodes: Iterable[int]) -> bytes:
    """Two for each block."""
    return b"".join(struct.pack("<2I", node, 1000 + node) for node in nodes)


def describe(nodes: list[int], parent: int | None, group: int = 0) -> Description:
    """A chunk of these blocks."""
    return Description(
        parent=b"" if parent is None else block_hash(parent),
        hashes=tuple(map(block_hash, nodes)),
        tokens=tokens_of(nodes),
        block_size=BLOCK_SIZE,
        group=group,
        kind="full_attention",
        extra=tuple((f"salt {node}",) for node in nodes),
    )


class CountingRouter:
    """Counts how often a block was stored and removed; it has what was stored more often."""

    def __init__(self) -> None:
        self.counts: Counter[Name] = Counter()

    def hear(self, told: Announcement) -> None:
        """Count one."""
        by = 1 if isinstance(told, StoredBlocks) else -1
        for each in told.hashes:
            self.counts[group_of(told), each] += by


class HashRouter:
    """As llm-d: a block whose parent has no hash that it knows is dropped, whatever the group.

    One without tokens is another tier of a block that it knows.
    """

    def __init__(self) -> None:
        self.groups: dict[bytes, set[int]] = {}

    def hear(self, told: Announcement) -> None:
        """Add or remove."""
        if isinstance(told, RemovedBlocks):
            for each in told.hashes:
                self.groups.get(each, set()).discard(group_of(told))
                if not self.groups.get(each, {0}):
                    del self.groups[each]
        elif not told.tokens:
            for each in self.groups.keys() & told.hashes:
                self.groups[each].add(group_of(told))
        elif not told.parent or told.parent in self.groups:
            for each in told.hashes:
                self.groups.setdefault(each, set()).add(group_of(told))

    @property
    def blocks(self) -> set[Name]:
        """What it has."""
        return {(group, each) for each, groups in self.groups.items() for group in groups}


class TreeRouter:
    """As Dynamo: one group has a tree; what follows a block goes with it."""

    def __init__(self) -> None:
        self.parents: dict[Name, bytes] = {}

    def hear(self, told: Announcement) -> None:
        """Add or remove."""
        if isinstance(told, RemovedBlocks):
            for each in told.hashes:
                self._remove((group_of(told), each))
        elif told.tokens and (not told.parent or (group_of(told), told.parent) in self.parents):
            parent = told.parent
            for each in told.hashes:
                self.parents[group_of(told), each] = parent
                parent = each

    def _remove(self, name: Name) -> None:
        if self.parents.pop(name, None) is not None:
            for other, parent in list(self.parents.items()):
                if (other[0], parent) == name:
                    self._remove(other)


class RoutersMachine(RuleBasedStateMachine):
    """Chunks that come and go in any order, of a tree of blocks in two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.descriptions: dict[Place, Description] = {}
        self.said: dict[bytes, Place] = {}
        self.kept: dict[bytes, tuple[int, int, int]] = {}  # node, blocks before, in all; in tiers
        self.bare: set[bytes] = set()  # of these, those of which nothing is known
        self.announcer = Announcer(self.descriptions.get)
        self.counting, self.hashes, self.tree = CountingRouter(), HashRouter(), TreeRouter()
        self.generation = 0

    @initialize(
        parents=st.lists(st.integers(0, 3), min_size=NODES, max_size=NODES),
        lengths=st.lists(st.integers(1, 4), min_size=NODES, max_size=NODES),
        untold=st.sets(st.integers(0, NODES - 1), max_size=3),
    )
    def plant(self, parents: list[int], lengths: list[int], untold: set[int]) -> None:
        """Node n comes after one of the four before it, or begins a prompt."""
        self.parents = [None if not back else n - back for n, back in enumerate(parents)]
        self.parents = [None if p is not None and p < 0 else p for p in self.parents]
        self.lengths = lengths
        # One that somebody follows would be told by another chunk, too.
        self.untold = untold - set(self.parents)

    def nodes(self, node: int) -> tuple[list[int], int | None]:
        """The blocks of the chunk that ends with this one, and what comes before it."""
        path: list[int] = []
        at: int | None = node
        while at is not None and len(path) < self.lengths[node]:
            path.insert(0, at)
            at = self.parents[at]
        return path, at

    def place(self, node: int, group: int, cut: int) -> Place:
        """A new place of this chunk, without some of its first blocks."""
        path, before = self.nodes(node)
        self.generation += 1
        first = min(cut, len(path) - 1)
        place = Place(node, self.generation, first, len(path) - first, 0)
        if node not in self.untold:
            self.descriptions[place] = describe(path, before, group)
        return place

    chunks = st.tuples(st.integers(0, NODES - 1), st.integers(0, GROUPS - 1), st.integers(0, 2))

    @rule(
        stored=st.lists(chunks, max_size=6),
        removed=st.lists(st.integers(0, 100), max_size=3),
        kept=st.lists(chunks, max_size=4),
        released=st.lists(st.integers(0, 100), max_size=3),
    )
    def announce(
        self,
        stored: list[tuple[int, int, int]],
        removed: list[int],
        kept: list[tuple[int, int, int]],
        released: list[int],
    ) -> None:
        """Some chunks came, or came again with other blocks, and some went; in tiers, too."""
        differences = Differences()
        for choice in removed:
            if self.said:
                key = list(self.said)[choice % len(self.said)]
                self.descriptions.pop(self.said.pop(key), None)
                differences.removed.append(key)
        for node, group, cut in stored:
            key = key_of(node, group)
            if key not in differences.removed:
                place = self.place(node, group, cut)
                self.descriptions.pop(self.said.get(key, place), None) if key in self.said else 0
                self.said[key] = differences.stored[key] = place
        for choice in released:
            if self.kept:
                key = list(self.kept)[choice % len(self.kept)]
                del self.kept[key]
                self.bare.discard(key)
                differences.released.append(key)
        for node, group, cut in kept:
            key = key_of(node, group)
            if key not in differences.released:
                self.keep(key, node, cut, differences)
        self.bare -= {key for key in differences.stored if self.is_described(key)}
        self.hear(self.announcer.announce(differences))

    def keep(self, key: bytes, node: int, cut: int, differences: Differences) -> None:
        """Tiers hold a chunk without some of its first blocks."""
        path, _ = self.nodes(node)
        first = min(cut, len(path) - 1)
        if not self.is_described(key) and (key not in self.kept or key in self.bare):
            self.bare.add(key)
        else:
            self.bare.discard(key)
        self.kept[key] = node, first, len(path) - first
        differences.kept[key] = Place(NO_SLOT, 0, first, len(path) - first, 0)

    def is_described(self, key: bytes) -> bool:
        """Whether a chunk is in memory, with a description."""
        return key in self.said and self.said[key] in self.descriptions

    @rule()
    def go_on(self) -> None:
        """Nothing came or went."""
        self.hear(self.announcer.announce(Differences()))

    @rule()
    def everything(self) -> None:
        """A router that is told everything from the beginning has what there is."""
        late, tree = HashRouter(), TreeRouter()
        told = list(self.announcer.everything())
        for each in told:
            late.hear(each)
            tree.hear(each)
        names = [(group_of(each), block) for each in told for block in each.hashes]
        assert len(names) == len(set(names))
        assert set(names) == self.blocks()
        self.check_tree(tree)
        if len({group for group, _ in names}) < GROUPS and not self.kept:
            assert late.blocks == self.chained(whole=False)

    def hear(self, told: list[Announcement]) -> None:
        """All routers hear it."""
        for each in told:
            if isinstance(each, StoredBlocks):
                check_payload(each)
            for router in (self.counting, self.hashes, self.tree):
                router.hear(each)

    def blocks(self) -> set[Name]:
        """The blocks of the chunks that are said."""
        found = set()
        for key, place in self.said.items():
            group = int.from_bytes(key[-4:], "big")
            path, _ = self.nodes(place.slot)
            part = path[place.first :] if place.slot not in self.untold else [place.slot]
            found |= {(group, block_hash(node)) for node in part}
        for key, (node, first, _) in self.kept.items():
            group = int.from_bytes(key[-4:], "big") + BELOW
            path, _ = self.nodes(node)
            part = [node] if key in self.bare else path[first:]
            found |= {(group, block_hash(each)) for each in part}
        return found

    def described(self) -> set[Name]:
        """Those of which more than the hash is told, by chunks that are there."""
        bare, kept = self.bare, self.kept
        self.kept = {key: place for key, place in kept.items() if key not in bare}
        found = {name for name in self.blocks() if name[1][0] - 65 not in self.untold}
        self.kept = kept
        return found

    def chained(self, *, whole: bool) -> set[Name]:
        """Those whose chain is there: in their own group, or in any."""
        there = self.described()
        chained: set[Name] = set()
        for node in range(NODES):
            before = self.parents[node]
            for group in MEDIA:
                groups = [group] if whole else MEDIA
                if (group, block_hash(node)) in there and (
                    before is None or any((g, block_hash(before)) in chained for g in groups)
                ):
                    chained.add((group, block_hash(node)))
        return chained

    @invariant()
    def is_exact(self) -> None:
        """Every block that is there was told once more than it was removed, and no other."""
        self.announcer.check_integrity()
        assert +self.counting.counts == Counter(dict.fromkeys(self.blocks(), 1))
        assert min(self.counting.counts.values(), default=0) >= 0
        announced = {(group + BELOW * low, each) for group, each, low in self.announcer.announced}
        assert announced == self.blocks()

    def teardown(self) -> None:
        """At last routers that need parents have every block whose chain is there."""
        if not hasattr(self, "parents"):
            return
        while self.announcer.waiting:
            self.hear(self.announcer.announce(Differences()))
        # It keeps what follows a block that has gone: a lookup does not get there.
        assert self.chained(whole=False) <= self.hashes.blocks <= self.blocks()
        self.check_tree(self.tree)

    def check_tree(self, tree: TreeRouter) -> None:
        """It has what it can have.

        A block in tiers that was described by a chunk that is gone may be there or not.
        """
        found, chained = set(tree.parents), self.chained(whole=True)
        assert {name for name in found if name[0] < BELOW} == {
            name for name in chained if name[0] < BELOW
        }
        assert chained <= found <= self.blocks()


def check_payload(told: StoredBlocks) -> None:
    """Tokens and extra keys are those of the blocks."""
    if told.tokens:
        nodes = [each[0] - 65 for each in told.hashes]
        assert told.tokens == tokens_of(nodes)
        assert told.block_size == BLOCK_SIZE
        assert told.extra == tuple((f"salt {node}",) for node in nodes)
    else:
        assert (told.parent, told.block_size, len(told.hashes)) == (b"", 0, 1)


@pytest.mark.hypothesis
def test_routers_have_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes and goes in which order, each kind of router has what it can have."""
    monkeypatch.setattr(announcer_module, "MOST_REPEATED", 2)
    run_state_machine_as_test(
        RoutersMachine, settings=settings(stateful_step_count=40, parent=settings.default)
    )


def tell(chunks: dict[int, Description | None]) -> tuple[Announcer, list[Announcement]]:
    """What is told of these chunks, by the node that ends each, when all come at once."""
    places = {Place(node, 1, 0, 4, 0): found for node, found in chunks.items()}
    announcer = Announcer(places.get)
    stored = {key_of(place.slot): place for place in places}
    return announcer, announcer.announce(Differences(stored))


def test_parents_come_first() -> None:
    """Chunks that come at once are told from a prompt's beginning on, each once."""
    _, told = tell({node: describe([node], node - 1 if node else None) for node in (3, 1, 2, 0)})
    assert [each.hashes for each in told] == [(block_hash(node),) for node in range(4)]


def test_a_chunk_without_description_is_named_by_its_key() -> None:
    """Without a description hash and group are read from the key; tokens are empty."""
    _, told = tell({5: None})
    assert told == [StoredBlocks((block_hash(5),), b"", b"", 0, 0)]
    short = Announcer(lambda _: None).announce(Differences({b"key": Place(0, 1, 0, 1, 0)}))
    assert short == [StoredBlocks((b"key",), b"", b"", 0, 0)]


def test_a_description_that_comes_later_is_told() -> None:
    """A chunk that was told by its key alone is taken back when more is known of it."""
    found: dict[Place, Description] = {}
    announcer = Announcer(found.get)
    child = {key_of(1): Place(1, 1, 0, 1, 0)}
    found[child[key_of(1)]] = describe([1], 0)
    announcer.announce(Differences({key_of(0): Place(0, 1, 0, 1, 0)}))
    announcer.announce(Differences(child))
    again = Place(0, 2, 0, 1, 0)
    found[again] = describe([0], None)
    told = announcer.announce(Differences({key_of(0): again}))
    zero, one = (block_hash(0),), (block_hash(1),)
    assert [(type(each), each.hashes) for each in told] == [
        (RemovedBlocks, zero),
        (StoredBlocks, zero),
        (RemovedBlocks, one),
        (StoredBlocks, one),
    ]


def below(first: int = 0) -> Place:
    """A chunk in tiers, without some of its four blocks."""
    return Place(NO_SLOT, 0, first, 4 - first, 0)


def test_a_chunk_is_told_of_each_medium() -> None:
    """What is in memory and in tiers is told twice, and taken back of one without the other."""
    announcer, told = tell({0: describe([0], None)})
    kept = announcer.announce(Differences(kept={key_of(0): below()}))
    assert kept == [told[0]._replace(below=True)]
    gone = announcer.announce(Differences(removed=[key_of(0)]))
    assert gone == [RemovedBlocks((block_hash(0),), 0)]
    assert list(announcer.everything()) == kept
    gone = announcer.announce(Differences(released=[key_of(0)]))
    assert gone == [RemovedBlocks((block_hash(0),), 0, below=True)]
    assert not list(announcer.announced)


def test_a_chunk_that_goes_from_memory_to_tiers_is_told_before_it_is_taken_back() -> None:
    """A router never has less than is there, and the description is what it was."""
    found = {Place(0, 1, 0, 1, 0): describe([0], None)}
    announcer = Announcer(found.get)
    told = announcer.announce(Differences({key_of(0): next(iter(found))}))
    moved = announcer.announce(Differences(removed=[key_of(0)], kept={key_of(0): below()}))
    assert moved == [told[0]._replace(below=True), RemovedBlocks((block_hash(0),), 0)]


def test_a_chunk_that_comes_up_is_described_again() -> None:
    """What was told by its key alone is told with tokens when it is in memory again."""
    found: dict[Place, Description] = {}
    announcer = Announcer(found.get)
    told = announcer.announce(Differences(kept={key_of(1): below()}))
    assert told == [StoredBlocks((block_hash(1),), b"", b"", 0, 0, below=True)]
    found[Place(0, 1, 0, 1, 0)] = describe([1], 0)
    told = announcer.announce(Differences({key_of(1): Place(0, 1, 0, 1, 0)}))
    assert [(type(each), each.below) for each in told] == [
        (StoredBlocks, False),
        (RemovedBlocks, True),
        (StoredBlocks, True),
    ]
    assert isinstance(told[2], StoredBlocks)
    assert told[2].tokens == tokens_of([1])


def test_blocks_of_several_chunks_are_told_once() -> None:
    """Chunks that share a head share its blocks, which go with the last of them."""
    first, second = describe([0, 1, 2], None), describe([0, 1, 3], None)
    announcer, told = tell({2: first, 3: second})
    assert [(each.hashes, each.group) for each in told] == [
        ((block_hash(0), block_hash(1), block_hash(2)), 0),
        ((block_hash(3),), 0),
    ]
    assert isinstance(told[1], StoredBlocks)
    assert (told[1].parent, told[1].tokens) == (block_hash(1), tokens_of([3]))
    gone = announcer.announce(Differences({}, [key_of(2)]))
    assert gone == [RemovedBlocks((block_hash(2),), 0)]
    gone = announcer.announce(Differences({}, [key_of(3)]))
    assert gone == [RemovedBlocks((block_hash(0), block_hash(1), block_hash(3)), 0)]


def test_another_place_says_nothing() -> None:
    """A chunk that lies elsewhere with the same blocks is nothing to tell."""
    found = {Place(0, n, 0, 1, 0): describe([0], None) for n in (1, 2)}
    announcer = Announcer(found.get)
    first, second = found
    assert announcer.announce(Differences({key_of(0): first}))
    assert not announcer.announce(Differences({key_of(0): second}))
    del found[first]
    assert [each.hashes for each in announcer.everything()] == [(block_hash(0),)]


@pytest.mark.parametrize(
    "wrong",
    [
        describe([0, 0], None),  # one block twice
        describe([0], 0),  # its own parent
        describe([1, 0], 0),  # a circle
    ],
)
def test_descriptions_that_lie_do_no_harm(wrong: Description) -> None:
    """Whatever another engine has written, chunks are told and taken back."""
    announcer, told = tell({0: wrong, 1: describe([1], 0)})
    assert told
    assert list(announcer.everything())
    announcer.check_integrity()
    announcer.announce(Differences({}, [key_of(0)]))
    announcer.announce(Differences({}, [key_of(1), b"never said"]))
    announcer.check_integrity()
    assert not list(announcer.announced)
