"""The announced blocks: announcements, which blocks are chained, and the order of a repeat round.

A block is chained when it and all blocks before it, up to a prompt's first block, are announced in
its KV-cache group, each in memory or in tiers. A router that requires the parent accepts a block
only then. `Block.chained` says how the block was announced last: a block that was announced while
it was not chained, and has its chain now, is in `BlockChains.rechecks` and is announced again.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, TypeAlias, TypeVar

from kvd_client.changes import ChunkLocation
from kvd_proto.descriptions import TOKEN_BYTES, Description

_GROUP_BYTES = 4  # of a key, its last ones, where it has more: the index of the group
MAX_HOLDERS_READ = 8
"""Chunks of a block that are tried until a description can be read."""

T = TypeVar("T")
BlockId: TypeAlias = tuple[int, bool, bytes]
"""Group of a block, whether it is in tiers, and its hash."""
OneOrMore: TypeAlias = T | dict[T, None] | None
"""Nothing, one, or the keys of a dict: nearly always one, for which a dict would be large."""


@dataclass(slots=True, eq=False)
class AnnouncedChunk:
    """An announced chunk, in memory or in tiers.

    place: where it lies, and which of its blocks it has.
    blocks: each is the parent of the next; none: the chunk is not announced any more.
    description: encoded, of a chunk in tiers, or that may go there. Empty: it is read at the
        chunk's place in memory; in tiers, where it was too long to remember, it cannot be read
        again. None: the chunk is known by its key alone.
    """

    place: ChunkLocation
    description: bytes | None
    blocks: tuple["Block", ...] = ()


@dataclass(slots=True, eq=False)
class GroupBlocks:
    """The announced blocks of one KV-cache group.

    number: index of the group.
    media: the blocks in memory, and those in tiers, by hash; `in_tiers` is the index.
    children: the described blocks in both media, by the hash of the parent.
    """

    number: int
    media: tuple[dict[bytes, "Block"], dict[bytes, "Block"]] = field(
        default_factory=lambda: ({}, {})
    )
    children: "dict[bytes, OneOrMore[Block]]" = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Block:
    """An announced block of a group, in memory or in tiers.

    parent: hash of the block before it; empty: it is a prompt's first; None: all its holders are
        known by their keys alone.
    holders: the chunks that have it.
    chained: it was announced, or announced again, when all blocks before it were.
    repeat_round: number of the last repeat round that has announced it, or of which it needs no
        more.
    """

    group: GroupBlocks
    hash: bytes
    parent: bytes | None
    repeat_round: int
    in_tiers: bool
    holders: OneOrMore[AnnouncedChunk] = None
    chained: bool = False

    @property
    def parents(self) -> list["Block"]:
        """The blocks before it: one in memory, one in tiers, or none."""
        parent, media = self.parent, self.group.media
        return [blocks[parent] for blocks in media if parent in blocks] if parent else []

    @property
    def has_chain(self) -> bool:
        """Whether it is chained if it is announced now."""
        parent = self.parent
        if not parent:
            return parent is not None
        memory, tiers = self.group.media
        before = memory.get(parent)
        if before is not None and before.chained:
            return True
        before = tiers.get(parent)
        return before is not None and before.chained

    @property
    def is_described(self) -> bool:
        """Whether a chunk that has it is known by more than its key."""
        return any(chunk.description is not None for chunk in each(self.holders))


class BlockChains:
    """All announced blocks.

    Attributes:
        rechecks: blocks that were announced while they were not chained, and may have a chain now.
        repeat_round: number of the last repeat round; new blocks have it.
    """

    def __init__(self) -> None:
        self.rechecks: deque[Block] = deque()
        self.repeat_round = 0
        self._groups: dict[int, GroupBlocks] = {}  # none is empty

    def __iter__(self) -> Iterator[Block]:
        for group in self._groups.values():
            for blocks in group.media:
                yield from blocks.values()

    def group(self, number: int) -> GroupBlocks:
        """Return a group's blocks; of a new group there are none, and the caller adds one."""
        group = self._groups.get(number)
        if group is None:
            group = self._groups[number] = GroupBlocks(number)
        return group

    def has(self, group: int, block_hash: bytes) -> bool:
        """Return whether the block is announced in memory or in tiers."""
        blocks = self._groups.get(group)
        if blocks is None:
            return False
        memory, tiers = blocks.media
        return block_hash in memory or block_hash in tiers

    def add(
        self, group: GroupBlocks, block_hash: bytes, parent: bytes | None, *, in_tiers: bool
    ) -> Block:
        """Return a new block, which is announced now; the caller adds a holder."""
        block = Block(group, block_hash, parent, self.repeat_round, in_tiers)
        group.media[in_tiers][block_hash] = block
        if parent is not None:
            self._link(block, parent)
        return block

    def describe(self, block: Block, parent: bytes) -> None:
        """Link a block that was known by a key alone to its parent: it is announced again."""
        block.parent = parent
        self._link(block, parent)

    def undescribe(self, block: Block) -> None:
        """Unlink a block from its parent: it is announced again by its key alone."""
        self._unlink(block)
        block.parent = None

    def add_holder(self, block: Block, chunk: AnnouncedChunk) -> None:
        """Note that the chunk has the block."""
        block.holders = _with(block.holders, chunk)

    def remove_holder(self, block: Block, chunk: AnnouncedChunk) -> bool:
        """Return whether no chunk has the block any more, so that it is removed."""
        block.holders = _without(block.holders, chunk)
        if block.holders is not None:
            return False
        group = block.group
        memory, tiers = group.media
        del group.media[block.in_tiers][block.hash]
        self._unlink(block)
        if not memory and not tiers:
            del self._groups[group.number]
        return True

    def repeat(self, block: Block) -> None:
        """Note that a block is announced again, for the last round."""
        block.repeat_round = self.repeat_round
        self.update_chained(block)

    def update_chained(self, block: Block) -> bool:
        """Return whether the block is chained now and was not before; its children are checked."""
        if block.chained or not block.has_chain:
            return False
        block.chained = True
        children = block.group.children.get(block.hash)
        if children is not None:
            self.rechecks.extend(child for child in each(children) if not child.chained)
        return True

    def _link(self, block: Block, parent: bytes) -> None:
        if parent:
            children = block.group.children
            children[parent] = _with(children.get(parent), block)
        self.update_chained(block)

    def _unlink(self, block: Block) -> None:
        """Separate the block from its parent; blocks that lose their chain by it are unchained."""
        children = block.group.children
        if block.parent:
            siblings = _without(children.pop(block.parent), block)
            if siblings is not None:
                children[block.parent] = siblings
        if not block.chained:
            return
        block.chained = False
        unchained = [block]
        while unchained:
            for child in each(children.get(unchained.pop().hash)):
                if child.chained and not child.has_chain:
                    child.chained = False
                    unchained.append(child)


class RepeatRound:
    """The order of a repeat round: each chunk comes after the chunks with its parent.

    Args:
        number: of the round; a block that it has repeated has this `repeat_round`.
        media: announced chunks by key, of each medium.

    Attributes:
        unreadable: chunks whose descriptions could not be read; they are left out.
    """

    def __init__(self, number: int, *media: dict[bytes, AnnouncedChunk]) -> None:
        self.number = number
        self.unreadable: set[AnnouncedChunk] = set()
        self._media = list(media)
        self._chunks: deque[AnnouncedChunk] = deque()  # of the first of the media
        self._added: deque[AnnouncedChunk] = (
            deque()
        )  # announced since, before blocks that they follow
        self._by_key: deque[AnnouncedChunk] = deque()  # known by their keys alone
        self._path: dict[
            AnnouncedChunk, None
        ] = {}  # the last one is next, and those before it wait for it

    @property
    def num_left(self) -> int:
        """How many chunks are to be visited."""
        queues = (self._path, self._chunks, self._added, self._by_key, *self._media)
        return sum(map(len, queues))

    @property
    def is_finished(self) -> bool:
        """Whether no chunk is left."""
        return not (self._path or self._chunks or self._media or self._added or self._by_key)

    def visit(self) -> AnnouncedChunk | None:
        """Return the next chunk; None: another one comes first, or none is left."""
        if not self._chunks and self._media:
            # One medium at a time: a copy of a million chunks takes some 15 ms.
            self._chunks = deque(self._media.pop(0).values())
        if self._path:
            chunk = next(reversed(self._path))
        elif self._chunks or self._added:
            chunk = (self._chunks or self._added).popleft()
            if chunk.description is None:
                self._by_key.append(chunk)
                return None
            self._path[chunk] = None
        elif self._by_key:
            return self._by_key.popleft()
        else:
            return None
        holder = self._parent_holder(chunk)
        if holder is not None:
            self._path[holder] = None
            return None
        del self._path[chunk]
        return chunk

    def note_announced(self, chunk: AnnouncedChunk, blocks: Iterable[Block]) -> None:
        """Note that blocks of a chunk were announced during the round.

        They are repeated, too, if their chain is not repeated yet: routers may not know it.
        """
        for block in blocks:
            repeated = not block.chained or self._follows_repeated(block)
            block.repeat_round = self.number if repeated else self.number - 1
        if any(block.repeat_round != self.number for block in chunk.blocks):
            self._added.append(chunk)

    def _follows_repeated(self, block: Block) -> bool:
        """Return whether the chain of a block is repeated, in memory or in tiers."""
        return block.parent == b"" or any(
            parent.chained and parent.repeat_round == self.number for parent in block.parents
        )

    def _parent_holder(self, chunk: AnnouncedChunk) -> AnnouncedChunk | None:
        """Return a chunk that is to be repeated before this one: it has the parent's block."""
        first = chunk.blocks[0] if chunk.blocks else None
        if first is None or first.repeat_round == self.number or self._follows_repeated(first):
            return None
        for parent in first.parents:
            if parent.repeat_round != self.number:
                for holder in islice(each(parent.holders), MAX_HOLDERS_READ):
                    is_next = holder not in self._path and holder not in self.unreadable
                    if is_next and holder.description is not None:
                        return holder
        return None


def each(some: OneOrMore[T]) -> Iterator[T]:
    """Iterate over all of them."""
    if isinstance(some, dict):
        return iter(some)
    return iter(() if some is None else (some,))


def runs(flags: list[bool]) -> Iterator[tuple[int, int]]:
    """Yield first index and end of each run of true flags."""
    begin = None
    for i, flag in enumerate([*flags, False]):
        if flag and begin is None:
            begin = i
        elif not flag and begin is not None:
            yield begin, i
            begin = None


def _with(some: OneOrMore[T], one: T) -> OneOrMore[T]:
    if some is None or some is one:
        return one
    if not isinstance(some, dict):
        some = {some: None}
    some[one] = None
    return some


def _without(some: OneOrMore[T], one: T) -> OneOrMore[T]:
    if isinstance(some, dict):
        some.pop(one, None)
        return some if len(some) > 1 else next(iter(some))
    return None if some is one else some


# --------------------------------------------------------------- announcements


class StoredBlocks(NamedTuple):
    """Blocks that can be loaded now, each the parent of the next.

    A chunk that is known by its key alone has one hash, no parent, no tokens and `block_size` 0.
    The other fields are those of `Description`.

    in_tiers: the blocks lie in tiers; else in memory.
    lookahead: for each block the u4 tokens after it that its hash covers; None: it covers none.
    """

    hashes: tuple[bytes, ...]
    parent: bytes
    tokens: bytes
    block_size: int
    group: int
    kind: str = ""
    window: int | None = None
    lora: str | None = None
    extra: tuple[tuple[Any, ...] | None, ...] | None = None
    in_tiers: bool = False
    lookahead: tuple[bytes, ...] | None = None


class RemovedBlocks(NamedTuple):
    """Blocks of one group that cannot be loaded from tiers (`in_tiers`) or memory any more."""

    hashes: tuple[bytes, ...]
    group: int
    in_tiers: bool = False


Announcement: TypeAlias = StoredBlocks | RemovedBlocks
MediumBlocks: TypeAlias = dict[tuple[int, bool], list[bytes]]
"""Hashes of blocks by their group and whether they are in tiers."""


class ChunkContents(NamedTuple):
    """A chunk that is announced: where it lies, and its blocks.

    description: None, and `parent` too: the chunk is known by its key alone.
    """

    key: bytes
    in_tiers: bool
    place: ChunkLocation
    description: Description | None
    group: int
    hashes: tuple[bytes, ...]
    parent: bytes | None


def chunk_contents(
    key: bytes, place: ChunkLocation, description: Description | None, *, in_tiers: bool
) -> ChunkContents:
    """Return the blocks that the chunk has at its place; without description the key's block."""
    if description is not None:
        first, end = place.first, place.first + place.count
        hashes = description.hashes[first:end]
        if len(hashes) == 1 or (hashes and len(set(hashes)) == len(hashes)):
            parent = description.hashes[first - 1] if first else description.parent
            group = description.group
            return ChunkContents(key, in_tiers, place, description, group, hashes, parent)
    block_hash, group = key, 0
    if len(key) > _GROUP_BYTES:
        block_hash, group = key[:-_GROUP_BYTES], int.from_bytes(key[-_GROUP_BYTES:], "big")
    return ChunkContents(key, in_tiers, place, None, group, (block_hash,), None)


def stored_blocks(contents: ChunkContents, begin: int, end: int) -> StoredBlocks:
    """Return the announcement of some of a chunk's blocks."""
    hashes, description = contents.hashes[begin:end], contents.description
    if description is None:
        return StoredBlocks(hashes, b"", b"", 0, contents.group, in_tiers=contents.in_tiers)
    parent = contents.hashes[begin - 1] if begin else contents.parent or b""
    begin, end = contents.place.first + begin, contents.place.first + end
    block_bytes = description.block_size * TOKEN_BYTES
    lookahead = None
    if covered := len(description.lookahead):
        tokens = description.tokens + description.lookahead
        ends = range((begin + 1) * block_bytes, (end + 1) * block_bytes, block_bytes)
        lookahead = tuple(tokens[at : at + covered] for at in ends)
    return StoredBlocks(
        hashes,
        parent,
        description.tokens[begin * block_bytes : end * block_bytes],
        description.block_size,
        contents.group,
        description.kind,
        description.window,
        description.lora,
        None if description.extra is None else description.extra[begin:end],
        contents.in_tiers,
        lookahead,
    )


def reannounced(stored: StoredBlocks) -> tuple[RemovedBlocks, StoredBlocks]:
    """Return the announcements that announce announced blocks again."""
    return RemovedBlocks(stored.hashes, stored.group, stored.in_tiers), stored


def removed_blocks(removed: MediumBlocks) -> list[RemovedBlocks]:
    """Return the announcements that remove these blocks."""
    return [
        RemovedBlocks(tuple(hashes), group, in_tiers)
        for (group, in_tiers), hashes in removed.items()
    ]
