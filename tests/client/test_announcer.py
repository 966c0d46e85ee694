"""What routers make of announcements: sets, counters, and trees that drop what has no parent.

Of routers some hear everything, some come late, and some lose messages until a round repeats all.
"""

import struct
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvd_client import announcer as announcer_module
from kvd_client.announcer import Announcer
from kvd_client.block_chains import (
    Announcement,
    BlockId,
    RemovedBlocks,
    StoredBlocks,
)
from kvd_client.changes import NO_SLOT, ChunkLocation, Differences
from kvd_proto.descriptions import Description
from tests.exploring import explored

BLOCK_SIZE = 2
NODES = 14
GROUPS = 2


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


def ids_of(announcement: Announcement) -> list[BlockId]:
    """The blocks that are announced."""
    group, in_tiers = announcement.group, announcement.in_tiers
    return [(group, in_tiers, block_hash) for block_hash in announcement.hashes]


class CountingRouter:
    """Counts how often a block was stored and removed; it ignores removals of unknown blocks."""

    def __init__(self) -> None:
        self.counts: Counter[BlockId] = Counter()

    def hear(self, announcement: Announcement) -> None:
        """Count one."""
        for block in ids_of(announcement):
            if isinstance(announcement, StoredBlocks):
                self.counts[block] += 1
            elif self.counts[block]:
                self.counts[block] -= 1


class HashRouter:
    """As llm-d: a block whose parent has no hash that it knows is dropped, whatever the group.

    One without tokens is another tier of a block that it knows.
    """

    def __init__(self) -> None:
        self.blocks: set[BlockId] = set()

    def hear(self, announcement: Announcement) -> None:
        """Add or remove."""
        blocks = ids_of(announcement)
        hashes = {block[2] for block in self.blocks}
        if isinstance(announcement, RemovedBlocks):
            self.blocks.difference_update(blocks)
        elif not announcement.tokens:
            self.blocks.update(block for block in blocks if block[2] in hashes)
        elif not announcement.parent or announcement.parent in hashes:
            self.blocks.update(blocks)


class TreeRouter:
    """Each group has a tree; what follows a block goes when no medium has the block any more."""

    def __init__(self) -> None:
        self.parents: dict[BlockId, bytes] = {}

    def hear(self, announcement: Announcement) -> None:
        """Add or remove."""
        if isinstance(announcement, RemovedBlocks):
            for block in ids_of(announcement):
                self._remove(block)
        elif announcement.tokens:
            parent = announcement.parent
            if parent and not self._has(announcement.group, parent):
                return
            for block in ids_of(announcement):
                self.parents[block] = parent
                parent = block[2]

    def _has(self, group: int, block_hash: bytes) -> bool:
        return (group, False, block_hash) in self.parents or (
            (group, True, block_hash) in self.parents
        )

    def _remove(self, block: BlockId) -> None:
        group, _, block_hash = block
        if self.parents.pop(block, None) is not None and not self._has(group, block_hash):
            for child, parent in list(self.parents.items()):
                if (child[0], parent) == (group, block_hash):
                    self._remove(child)


class Listener:
    """One router of each kind.

    Attributes:
        is_deaf: it hears nothing now.
        lost: it has lost messages: its counts are wrong for ever.
        exact: it has heard all messages, or a whole round and all since.
    """

    def __init__(self, *, exact: bool) -> None:
        self.is_deaf = False
        self.forget()
        self.exact = exact

    def forget(self) -> None:
        """Know no block any more, as after AllBlocksCleared."""
        self.counting, self.hashes, self.tree = CountingRouter(), HashRouter(), TreeRouter()
        self.plain: set[BlockId] = set()
        self.lost, self.exact = self.is_deaf, not self.is_deaf

    def hear(self, announcement: Announcement) -> None:
        """Tell it to all routers."""
        if self.is_deaf:
            return
        for router in (self.counting, self.hashes, self.tree):
            router.hear(announcement)
        if isinstance(announcement, StoredBlocks):
            self.plain.update(ids_of(announcement))
        else:
            self.plain.difference_update(ids_of(announcement))


class RoutersMachine(RuleBasedStateMachine):
    """Chunks that come and go in any order, of a tree of blocks in two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.descriptions: dict[ChunkLocation, Description] = {}
        self.in_memory: dict[bytes, ChunkLocation] = {}
        self.in_tiers: dict[bytes, tuple[int, int]] = {}  # node, and blocks left out; in tiers
        self.bare: set[bytes] = set()  # of these, those that are known by their keys alone
        self.doomed: set[bytes] = set()  # of `in_memory`, those that cannot be described any more
        self.remembered: set[bytes] = set()  # keys whose descriptions are, since there are tiers
        self.were_in_tiers: set[bytes] = set()  # keys whose descriptions are, since tiers had them
        self.listeners = [Listener(exact=True) for _ in range(3)]
        self.in_round: list[Listener] = []  # they have heard all of this round
        self.generation = 0

    @initialize(
        parents=st.lists(st.integers(0, 3), min_size=NODES, max_size=NODES),
        lengths=st.lists(st.integers(1, 4), min_size=NODES, max_size=NODES),
        undescribed=st.sets(st.integers(0, NODES - 1), max_size=3),
        has_tiers=st.booleans(),
        tier_groups=st.sampled_from((None, [0])),
    )
    def plant(
        self,
        parents: list[int],
        lengths: list[int],
        undescribed: set[int],
        has_tiers: bool,
        tier_groups: list[int] | None,
    ) -> None:
        """Node n comes after one of the four before it, or begins a prompt."""
        self.tier_groups = range(GROUPS) if tier_groups is None else tier_groups
        self.announcer = Announcer(self.descriptions.get, tier_groups)
        self.announcer.has_tiers = has_tiers
        self.parents = [None if not back else n - back for n, back in enumerate(parents)]
        self.parents = [None if p is not None and p < 0 else p for p in self.parents]
        self.lengths, self.undescribed = lengths, undescribed

    def nodes(self, node: int) -> tuple[list[int], int | None]:
        """The blocks of the chunk that ends with this one, and what comes before it."""
        path: list[int] = []
        at: int | None = node
        while at is not None and len(path) < self.lengths[node]:
            path.insert(0, at)
            at = self.parents[at]
        return path, at

    def place(self, node: int, group: int, cut: int) -> ChunkLocation:
        """A new place of this chunk, without some of its first blocks."""
        path, before = self.nodes(node)
        self.generation += 1
        first = min(cut, len(path) - 1)
        place = ChunkLocation(node, self.generation, first, len(path) - first, 0)
        if node not in self.undescribed:
            self.descriptions[place] = describe(path, before, group)
        return place

    chunks = st.tuples(st.integers(0, NODES - 1), st.integers(0, GROUPS - 1), st.integers(0, 2))

    @rule(
        stored=st.lists(chunks, max_size=6),
        removed=st.lists(st.integers(0, 100), max_size=3),
        moved=st.lists(chunks, max_size=4),
        released=st.lists(st.integers(0, 100), max_size=3),
    )
    def announce(
        self,
        stored: list[tuple[int, int, int]],
        removed: list[int],
        moved: list[tuple[int, int, int]],
        released: list[int],
    ) -> None:
        """Some chunks came, or came again with other blocks, and some went; in tiers, too."""
        differences = Differences()
        for choice in removed:
            if self.in_memory:
                key = list(self.in_memory)[choice % len(self.in_memory)]
                self.descriptions.pop(self.in_memory.pop(key), None)
                self.doomed.discard(key)
                differences.removed.append(key)
        for node, group, cut in stored:
            key = key_of(node, group)
            if key not in differences.removed:
                if key in self.in_memory:
                    self.descriptions.pop(self.in_memory[key], None)
                self.in_memory[key] = differences.stored[key] = self.place(node, group, cut)
                self.doomed.discard(key)
                may_move = self.announcer.has_tiers and group in self.tier_groups
                if may_move and node not in self.undescribed:
                    self.remembered.add(key)
        for choice in released:
            if self.in_tiers:
                key = list(self.in_tiers)[choice % len(self.in_tiers)]
                del self.in_tiers[key]
                self.bare.discard(key)
                differences.removed_from_tiers.append(key)
        for node, group, cut in moved:
            key = key_of(node, group)
            if key not in differences.removed_from_tiers:
                self.move(key, node, cut, differences, is_described=self.is_described(key))
        described = {key for key in differences.stored if self.is_described(key)}
        self.were_in_tiers |= described & self.in_tiers.keys()
        self.bare -= described
        self.hear(self.announcer.announce(differences))

    def move(
        self, key: bytes, node: int, cut: int, differences: Differences, *, is_described: bool
    ) -> None:
        """Tiers get a chunk without some of its first blocks."""
        path, _ = self.nodes(node)
        first = min(cut, len(path) - 1)
        differences.stored_in_tiers[key] = ChunkLocation(NO_SLOT, 0, first, len(path) - first, 0)
        if int.from_bytes(key[-4:], "big") not in self.tier_groups:
            return  # not announced
        if not is_described and (key not in self.in_tiers or key in self.bare):
            self.bare.add(key)
        else:
            self.bare.discard(key)
            self.were_in_tiers.add(key)
        self.in_tiers[key] = node, first

    @rule(choices=st.lists(st.integers(0, 100), min_size=1, max_size=4))
    def move_down(self, choices: list[int]) -> None:
        """Tiers get chunks that are in memory, too."""
        differences = Differences()
        for choice in choices:
            if self.in_memory:
                key = list(self.in_memory)[choice % len(self.in_memory)]
                node, first = self.in_memory[key].slot, self.in_memory[key].first
                self.move(key, node, first, differences, is_described=self.is_described(key))
        self.hear(self.announcer.announce(differences))

    @rule(chunk=chunks, is_reused=st.booleans())
    def pass_through(self, chunk: tuple[int, int, int], is_reused: bool) -> None:
        """A chunk came, went down and left memory; its slot may be used again already."""
        node, group, cut = chunk
        key, place = key_of(node, group), self.place(node, group, cut)
        if is_reused:
            self.descriptions.pop(place, None)
        if key not in self.in_memory:
            differences = Differences(last_locations={key: place})
            is_described = place in self.descriptions or self.is_described(key)
            self.move(key, node, cut, differences, is_described=is_described)
            self.hear(self.announcer.announce(differences))
        self.descriptions.pop(place, None)

    @rule(choices=st.lists(st.integers(0, 100), min_size=1, max_size=4))
    def evict(self, choices: list[int]) -> None:
        """Memory loses chunks that tiers have."""
        both = [key for key in self.in_memory if key in self.in_tiers]
        gone = list({both[choice % len(both)]: None for choice in choices if both})
        for key in gone:
            self.descriptions.pop(self.in_memory.pop(key), None)
            self.doomed.discard(key)
        self.hear(self.announcer.announce(Differences(removed=gone)))

    def is_described(self, key: bytes) -> bool:
        """Whether a chunk's description can be read in memory, or is remembered."""
        is_remembered = key in self.remembered or key in self.were_in_tiers
        return is_remembered or self.in_memory.get(key) in self.descriptions

    @rule(choice=st.integers(0, 100))
    def doom(self, choice: int) -> None:
        """A chunk is gone from memory, and its removal is not announced yet."""
        described = [key for key, place in self.in_memory.items() if place in self.descriptions]
        if described:
            key = described[choice % len(described)]
            del self.descriptions[self.in_memory[key]]
            self.doomed.add(key)

    @rule()
    def bury(self) -> None:
        """The removals of such chunks are announced."""
        for key in self.doomed:
            del self.in_memory[key]
        self.hear(self.announcer.announce(Differences(removed=list(self.doomed))))
        self.doomed.clear()

    @rule()
    def go_on(self) -> None:
        """Nothing came or went."""
        self.hear(self.announcer.announce(Differences()))

    @rule()
    def forget(self) -> None:
        """Routers forget all blocks; what is there comes again, memory first."""
        self.bury()
        self.announcer.forget()
        for listener in self.listeners:
            listener.forget()
        self.in_round = []
        self.hear(self.announcer.announce(Differences(dict(self.in_memory))))
        differences = Differences()
        for key, (node, first) in self.in_tiers.items():
            self.move(key, node, first, differences, is_described=self.is_described(key))
        self.hear(self.announcer.announce(differences))

    # ---------------------------------------------------------- repeat rounds

    @precondition(lambda self: not self.announcer.repeating)
    @rule()
    def lose(self) -> None:
        """A router loses what comes, or hears again after that."""
        listener = self.listeners[1]
        listener.is_deaf = not listener.is_deaf
        listener.lost, listener.exact = True, False

    @precondition(lambda self: self.announcer.repeating)
    @rule()
    def lose_round(self) -> None:
        """A router loses a part of a round."""
        self.listeners[2].lost, self.listeners[2].exact = True, False
        self.listeners[2].is_deaf = True
        if self.listeners[2] in self.in_round:
            self.in_round.remove(self.listeners[2])

    @precondition(lambda self: not self.announcer.repeating)
    @rule()
    def begin_repeat(self) -> None:
        """A round begins; another router listens from now on."""
        self.listeners[3:] = [Listener(exact=False)]
        self.announcer.begin_repeat()
        self.listeners[2].is_deaf = False
        self.in_round = [listener for listener in self.listeners if not listener.is_deaf]

    @precondition(lambda self: self.announcer.repeating)
    @rule(num_chunks=st.integers(1, 3))
    def repeat(self, num_chunks: int) -> None:
        """The round goes on."""
        part = self.announcer.repeat(num_chunks)
        for removed, stored in pairwise(part):
            if isinstance(stored, StoredBlocks):
                assert isinstance(removed, RemovedBlocks)
                assert ids_of(removed) == ids_of(stored)
        self.hear(part, repeated=True)
        if not self.announcer.repeating:
            for listener in self.in_round:
                listener.exact = not listener.is_deaf

    @precondition(lambda self: self.announcer.repeating)
    @rule()
    def finish_round(self) -> None:
        """The rest of the round, and all that waits."""
        while self.announcer.repeating:
            self.repeat(3)
        while self.announcer.waiting:
            self.go_on()

    def hear(self, announcements: list[Announcement], *, repeated: bool = False) -> None:
        """All routers hear it."""
        known = self.listeners[0].plain
        for i, announcement in enumerate(announcements):
            if isinstance(announcement, StoredBlocks):
                check_payload(announcement)
            elif not repeated:
                unknown = set(ids_of(announcement)) - known
                assert self.announcer.repeating or not unknown
                for later in announcements[i + 1 :]:  # comes again: a router may have lost it
                    unknown.difference_update(ids_of(later))
                assert not unknown
            for listener in self.listeners:
                listener.hear(announcement)

    # ------------------------------------------------------------------ model

    def blocks(self, *, described: bool = False) -> set[BlockId]:
        """The blocks of the chunks that are said; those of described chunks alone."""
        blocks = set()
        for key, place in self.in_memory.items():
            by_key = place.slot in self.undescribed
            if not (by_key and described):
                nodes = [place.slot] if by_key else self.nodes(place.slot)[0][place.first :]
                group = int.from_bytes(key[-4:], "big")
                blocks |= {(group, False, block_hash(node)) for node in nodes}
        for key, (node, first) in self.in_tiers.items():
            by_key = key in self.bare
            if not (by_key and described):
                nodes = [node] if by_key else self.nodes(node)[0][first:]
                group = int.from_bytes(key[-4:], "big")
                blocks |= {(group, True, block_hash(node)) for node in nodes}
        return blocks

    def chained(self) -> set[BlockId]:
        """Those that are described, and so are all blocks before them in their group."""
        described = self.blocks(described=True)
        chained: set[BlockId] = set()
        for node in range(NODES):
            before = self.parents[node]
            for group in range(GROUPS):
                if before is None or any(
                    (group, in_tiers, block_hash(before)) in chained for in_tiers in (False, True)
                ):
                    both = {(group, in_tiers, block_hash(node)) for in_tiers in (False, True)}
                    chained |= both & described
        return chained

    @invariant()
    def is_exact(self) -> None:
        """Routers have what is there."""
        blocks = self.blocks()
        assert set(self.announcer.announced) == {
            (group, block, in_tiers) for group, in_tiers, block in blocks
        }
        assert len(self.announcer) == len(self.in_memory) + len(self.in_tiers)
        assert self.listeners[0].plain == blocks
        if not self.remembered.issuperset(self.doomed):
            return
        for listener in self.listeners:
            if listener.exact:
                assert listener.plain == blocks
                assert listener.lost or +listener.counting.counts == Counter(blocks)
                if not self.announcer.waiting and not self.announcer.repeating:
                    self.check_chained(listener)

    def check_chained(self, listener: Listener) -> None:
        """Routers that need parents have every block whose chain is there.

        One as llm-d keeps what follows a block that has gone: a lookup does not get there.
        """
        chained = self.chained()
        assert chained <= listener.hashes.blocks <= self.blocks()
        assert set(listener.tree.parents) == chained

    def teardown(self) -> None:
        """At last a whole round makes all routers right."""
        if not hasattr(self, "parents"):
            return
        self.bury()
        if self.announcer.repeating:
            self.finish_round()
        self.listeners[1].is_deaf = False
        while self.announcer.waiting:
            self.go_on()
        self.is_exact()
        self.begin_repeat()
        self.finish_round()
        assert all(listener.exact for listener in self.listeners)
        self.is_exact()


def check_payload(stored: StoredBlocks) -> None:
    """Tokens and extra keys are those of the blocks."""
    if stored.tokens:
        nodes = [block[0] - 65 for block in stored.hashes]
        assert stored.tokens == tokens_of(nodes)
        assert stored.block_size == BLOCK_SIZE
        assert stored.extra == tuple((f"salt {node}",) for node in nodes)
    else:
        assert (stored.parent, stored.block_size, len(stored.hashes)) == (b"", 0, 1)


@pytest.mark.hypothesis
def test_routers_have_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes and goes in which order, each kind of router has what it can have."""
    monkeypatch.setattr(announcer_module, "MAX_REANNOUNCED_RUNS", 2)
    monkeypatch.setattr(announcer_module, "REMOVALS_PER_CHUNK", 1)
    run_state_machine_as_test(RoutersMachine, settings=explored(300, 40))


def test_a_chain_that_a_round_could_not_read_comes_back_in_tiers() -> None:
    """A router that started with that round gets the block after it once tiers have the chain."""
    machine = planted({5: 3, 8: 5}, {8: 3})
    for node in (5, 3):
        machine.announce(stored=[(node, 0, 0)], removed=[], moved=[], released=[])
    machine.begin_repeat()
    machine.doom(choice=1)
    machine.finish_round()
    machine.pass_through(chunk=(8, 0, 0), is_reused=False)
    machine.bury()
    machine.is_exact()


def test_a_block_that_tiers_lose_in_a_round_does_not_overtake_its_chain() -> None:
    """A router that started with that round gets its block in memory after the parent."""
    machine = planted({2: 1, 4: 2, 6: 4}, {6: 3})
    for node in (6, 1):
        machine.announce(stored=[(node, 0, 0)], removed=[], moved=[], released=[])
    machine.begin_repeat()
    machine.pass_through(chunk=(2, 0, 0), is_reused=True)
    machine.announce(stored=[], removed=[], moved=[], released=[0])
    machine.finish_round()
    machine.is_exact()


def planted(parents: dict[int, int], lengths: dict[int, int]) -> RoutersMachine:
    """A machine without tiers; other nodes begin a prompt, and other chunks have one block."""
    machine = RoutersMachine()
    machine.plant(
        [node - parents.get(node, node) for node in range(NODES)],
        [lengths.get(node, 1) for node in range(NODES)],
        undescribed=set(),
        has_tiers=False,
        tier_groups=None,
    )
    return machine


def test_chunks_on_their_way_to_tiers_keep_descriptions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of so many chunks that have left."""
    monkeypatch.setattr(announcer_module, "MAX_DEPARTED", 2)
    announcer = with_chunks_in_memory(range(3))
    announcer.announce(Differences(removed=[key_of(node) for node in range(3)]))
    assert tokens_in_tiers(announcer, range(3)) == [b"", tokens_of([1]), tokens_of([2])]


@pytest.mark.parametrize("takes", [["forget"], ["remove"], ["remove", "forget"]])
def test_chunks_in_tiers_keep_descriptions(
    monkeypatch: pytest.MonkeyPatch, takes: list[str]
) -> None:
    """They come back with tokens after AllBlocksCleared, and if tiers and memory have lost all."""
    monkeypatch.setattr(announcer_module, "MAX_DEPARTED", 2)
    announcer = with_chunks_in_memory(range(NODES))
    tokens = [tokens_of([node]) for node in range(8)]
    assert tokens_in_tiers(announcer, range(8)) == tokens
    keys = [key_of(node) for node in range(NODES)]
    announcer.announce(Differences(removed=keys[:8]))
    for take in takes:
        if take == "forget":
            announcer.forget()
        else:
            announcer.announce(Differences(removed=keys[8:], removed_from_tiers=keys[:8]))
        assert not list(announcer.announced)
    assert tokens_in_tiers(announcer, range(8)) == tokens


def test_descriptions_of_chunks_that_tiers_lost_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With those of chunks in tiers they are a few more than tiers ever had chunks: the newest."""
    monkeypatch.setattr(announcer_module, "MAX_DEPARTED", 2)
    announcer = with_chunks_in_memory(range(NODES))
    keys = [key_of(node) for node in range(NODES)]
    for begin in range(0, NODES, 2):
        tokens_in_tiers(announcer, range(begin, begin + 2))
        announcer.announce(Differences(removed_from_tiers=keys[begin : begin + 2]))
    announcer.announce(Differences(removed=keys))
    known = [bool(tokens) for tokens in tokens_in_tiers(announcer, range(NODES))]
    assert known == [False] * (NODES - 4) + [True] * 4


def with_chunks_in_memory(nodes: Iterable[int]) -> Announcer:
    """Has announced a chunk of one block for each, whose descriptions cannot be read any more."""
    places = [ChunkLocation(node, 1, 0, 1, 0) for node in nodes]
    descriptions = {place: describe([place.slot], None) for place in places}
    announcer = Announcer(descriptions.get)
    announcer.has_tiers = True
    announcer.announce(Differences({key_of(place.slot): place for place in places}))
    descriptions.clear()
    return announcer


def tokens_in_tiers(announcer: Announcer, nodes: Iterable[int]) -> list[bytes]:
    """Let tiers get these chunks; return the tokens that are announced of them."""
    in_tiers = {key_of(node): ChunkLocation(NO_SLOT, 0, 0, 1, 0) for node in nodes}
    announced = announcer.announce(Differences(stored_in_tiers=in_tiers))
    return [stored.tokens for stored in announced if isinstance(stored, StoredBlocks)]


def test_the_newest_removals_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every round, until the blocks are announced again, and a bounded number."""
    monkeypatch.setattr(announcer_module, "MAX_REMEMBERED_REMOVALS", 3)
    places = [ChunkLocation(node, 1, 0, 1, 0) for node in range(5)]
    announcer = Announcer({place: describe([place.slot], None) for place in places}.get)
    announcer.announce(Differences({key_of(place.slot): place for place in places}))
    announcer.announce(Differences(removed=[key_of(node) for node in range(5)]))
    announcer.announce(Differences({key_of(3): places[3]}))
    for _ in range(2):
        announcer.begin_repeat()
        assert announcer.num_to_repeat == 2  # the removals count as one chunk
        removals, *again = announcer.repeat(5)
        assert removals == RemovedBlocks((block_hash(2), block_hash(4)), 0)
        assert [announcement.hashes for announcement in again] == [(block_hash(3),)] * 2
        assert not announcer.repeating


def test_descriptions_that_lie_do_no_harm() -> None:
    """A block twice, its own parent, a circle: chunks are told and taken back all the same."""
    for lie in (describe([0, 0], None), describe([0], 0), describe([1, 0], 0)):
        places = [ChunkLocation(node, 1, 0, 4, 0) for node in range(2)]
        announcer = Announcer({places[0]: lie, places[1]: describe([1], 0)}.get)
        assert announcer.announce(Differences({key_of(place.slot): place for place in places}))
        announcer.begin_repeat()
        while announcer.repeating:
            announcer.repeat(1)
        announcer.announce(Differences({}, [key_of(0)]))
        announcer.announce(Differences({}, [key_of(1), b"never said"]))
        assert not list(announcer.announced)
