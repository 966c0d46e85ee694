"""The announced blocks: which are chained, the order of a repeat round, and announcements.

A block is chained if it and all blocks before it, back to a prompt's first block, are announced in
its KV-cache group, each in memory or in tiers. A router that requires the parent accepts only
chained blocks. `AnnouncedBlock.chained` is the state at the block's last announcement: a block that
was announced unchained, and whose chain is complete now, is in `BlockChains.to_recheck` and is
announced again.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, TypeAlias, TypeVar

from kvd_client.changes import ChunkLocation
from kvd_proto.descriptions import TOKEN_BYTES, Description

_GROUP_BYTES = 4  # at the end of a key that is longer: the index of the group
MAX_HOLDERS_READ = 8  # chunks of a block that are tried to read its description

T = TypeVar("T")
BlockId: TypeAlias = tuple[int, bool, bytes]
"""Group of a block, whether it is in tiers, and its hash."""
SmallSet: TypeAlias = T | dict[T, None] | None
"""A set: None if empty, its one member, or the keys of a dict. Most have one; dicts are large."""


@dataclass(slots=True, eq=False)
class AnnouncedChunk:
    """An announced chunk, in memory or in tiers.

    location: where it lies, and which of its blocks it has.
    blocks: each is the parent of the next; empty: the chunk is not announced any more.
    description: encoded, for a chunk in tiers or that may go there. Empty: it is read at the
        chunk's location in memory; for a chunk in tiers it was too long to remember, and cannot be
        read again. None: the chunk is known by its key alone.
    """

    location: ChunkLocation
    description: bytes | None
    blocks: tuple["AnnouncedBlock", ...] = ()


@dataclass(slots=True, eq=False)
class GroupBlocks:
    """The announced blocks of one KV-cache group.

    number: index of the group.
    media: the blocks in memory, and those in tiers, by hash; `in_tiers` is the index.
    children: blocks in both media that have a description, by the hash of their parent.
    """

    number: int
    media: tuple[dict[bytes, "AnnouncedBlock"], dict[bytes, "AnnouncedBlock"]] = field(
        default_factory=lambda: ({}, {})
    )
    children: "dict[bytes, SmallSet[AnnouncedBlock]]" = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class AnnouncedBlock:
    """An announced block of a group, in memory or in tiers.

    parent: hash of the block before it; empty: it is a prompt's first; None: all its holders are
        known by their keys alone.
    holders: the chunks that have it.
    chained: all blocks before it were announced when it was last announced, and no repeat round has
        left it or one of them out since then.
    repeat_round: number of the last repeat round that announced it, or does not need to.
    """

    group: GroupBlocks
    hash: bytes
    parent: bytes | None
    repeat_round: int
    in_tiers: bool
    holders: SmallSet[AnnouncedChunk] = None
    chained: bool = False

    @property
    def parents(self) -> list["AnnouncedBlock"]:
        """The blocks before it: one in memory, one in tiers, both, or none."""
        parent, media = self.parent, self.group.media
        return [blocks[parent] for blocks in media if parent in blocks] if parent else []

    @property
    def has_chain(self) -> bool:
        """Whether it would be chained if it were announced now."""
        parent = self.parent
        if not parent:
            return parent is not None
        memory, tiers = self.group.media
        block = memory.get(parent)
        if block is not None and block.chained:
            return True
        block = tiers.get(parent)
        return block is not None and block.chained

    @property
    def is_described(self) -> bool:
        """Whether one of its chunks has a description."""
        return any(chunk.description is not None for chunk in members(self.holders))


class BlockChains:
    """All announced blocks.

    Attributes:
        to_recheck: blocks that were announced unchained, and whose chain may be complete now.
        repeat_round: number of the last repeat round; new blocks have it.
    """

    def __init__(self) -> None:
        self.to_recheck: deque[AnnouncedBlock] = deque()
        self.repeat_round = 0
        self._groups: dict[int, GroupBlocks] = {}  # none is empty

    def __iter__(self) -> Iterator[AnnouncedBlock]:
        """Return all announced blocks, group by group, those in memory before those in tiers."""
        for group in self._groups.values():
            for blocks in group.media:
                yield from blocks.values()

    def group(self, number: int) -> GroupBlocks:
        """Return a group's blocks; a new group has none, and the caller must add one."""
        group = self._groups.get(number)
        if group is None:
            group = self._groups[number] = GroupBlocks(number)
        return group

    def is_announced(self, group: int, block_hash: bytes) -> bool:
        """Return whether a block is announced in memory or in tiers."""
        blocks = self._groups.get(group)
        if blocks is None:
            return False
        memory, tiers = blocks.media
        return block_hash in memory or block_hash in tiers

    def add(
        self, group: GroupBlocks, block_hash: bytes, parent: bytes | None, *, in_tiers: bool
    ) -> AnnouncedBlock:
        """Add a block that is announced now, and return it; the caller adds a holder."""
        block = AnnouncedBlock(group, block_hash, parent, self.repeat_round, in_tiers)
        group.media[in_tiers][block_hash] = block
        if parent is not None:
            self._link(block, parent)
        return block

    def describe(self, block: AnnouncedBlock, parent: bytes) -> None:
        """Link to its parent a block that was known by a key alone and is now announced again."""
        block.parent = parent
        self._link(block, parent)

    def undescribe(self, block: AnnouncedBlock) -> None:
        """Unlink from its parent a block that is now announced again by its key alone."""
        self._unlink(block)
        block.parent = None

    def add_holder(self, block: AnnouncedBlock, chunk: AnnouncedChunk) -> None:
        """Record that the chunk has the block."""
        block.holders = _adding(block.holders, chunk)

    def remove_holder(self, block: AnnouncedBlock, chunk: AnnouncedChunk) -> bool:
        """Record that the chunk lost the block; return whether the block is removed with it."""
        block.holders = _removing(block.holders, chunk)
        if block.holders is not None:
            return False
        group = block.group
        memory, tiers = group.media
        del group.media[block.in_tiers][block.hash]
        self._unlink(block)
        if not memory and not tiers:
            del self._groups[group.number]
        return True

    def mark_repeated(self, block: AnnouncedBlock) -> None:
        """Record that the last round has announced a block again."""
        block.repeat_round = self.repeat_round
        self.update_chained(block)

    def update_chained(self, block: AnnouncedBlock) -> bool:
        """Mark a block as chained if its chain is complete; return whether it became chained."""
        if block.chained or not block.has_chain:
            return False
        block.chained = True
        children = block.group.children.get(block.hash)
        if children is not None:
            self.to_recheck.extend(child for child in members(children) if not child.chained)
        return True

    def _link(self, block: AnnouncedBlock, parent: bytes) -> None:
        if parent:
            children = block.group.children
            children[parent] = _adding(children.get(parent), block)
        self.update_chained(block)

    def _unlink(self, block: AnnouncedBlock) -> None:
        """Unlink the block from its parent, and unchain it."""
        children = block.group.children
        if block.parent:
            siblings = _removing(children.pop(block.parent), block)
            if siblings is not None:
                children[block.parent] = siblings
        self.unchain(block)

    def unchain(self, block: AnnouncedBlock) -> None:
        """Mark a block as unchained, and the blocks whose chain breaks with it."""
        if not block.chained:
            return
        children = block.group.children
        block.chained = False
        unchained = [block]
        while unchained:
            for child in members(children.get(unchained.pop().hash)):
                if child.chained and not child.has_chain:
                    child.chained = False
                    unchained.append(child)


class RepeatRound:
    """The order of a repeat round: each chunk comes after the chunks with its parent.

    Args:
        number: of the round; blocks that it has repeated have this `repeat_round`.
        media: for each medium its announced chunks by key.

    Attributes:
        unreadable: chunks that are left out, because their descriptions could not be read.
    """

    def __init__(self, number: int, *media: dict[bytes, AnnouncedChunk]) -> None:
        self.number = number
        self.unreadable: set[AnnouncedChunk] = set()
        self._media = list(media)
        self._chunks: deque[AnnouncedChunk] = deque()  # of the current medium
        self._added: deque[AnnouncedChunk] = deque()  # announced meanwhile, to be repeated
        self._by_key: deque[AnnouncedChunk] = deque()  # known by their keys alone
        self._path: dict[AnnouncedChunk, None] = {}  # each waits for the one after it

    @property
    def num_left(self) -> int:
        """How many chunks are left to visit."""
        queues = (self._path, self._chunks, self._added, self._by_key, *self._media)
        return sum(map(len, queues))

    @property
    def is_finished(self) -> bool:
        """Whether no chunk is left."""
        return not (self._path or self._chunks or self._media or self._added or self._by_key)

    def visit(self) -> AnnouncedChunk | None:
        """Take one step; return a chunk to repeat, or None if this step has none."""
        if not self._chunks and self._media:
            # Copy one medium at a time: a million chunks take some 15 ms.
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

    def note_announced(self, chunk: AnnouncedChunk, blocks: Iterable[AnnouncedBlock]) -> None:
        """Record that blocks of a chunk were announced during the round.

        If their chain is not repeated yet, they are repeated too: routers may not know the chain.
        """
        for block in blocks:
            is_repeated = not block.chained or self._follows_repeated(block)
            block.repeat_round = self.number if is_repeated else self.number - 1
        if any(block.repeat_round != self.number for block in chunk.blocks):
            self._added.append(chunk)

    def _follows_repeated(self, block: AnnouncedBlock) -> bool:
        """Return whether this round has repeated the chain before a block."""
        return block.parent == b"" or any(
            parent.chained and parent.repeat_round == self.number for parent in block.parents
        )

    def follows(self, chunk: AnnouncedChunk) -> bool:
        """Return whether this round has repeated the chain before its blocks that are left."""
        first = next((block for block in chunk.blocks if block.repeat_round != self.number), None)
        return first is None or self._follows_repeated(first)

    def _parent_holder(self, chunk: AnnouncedChunk) -> AnnouncedChunk | None:
        """Return a chunk that must be repeated before this one, because it has the parent block."""
        first = chunk.blocks[0] if chunk.blocks else None
        if first is None or first.repeat_round == self.number or self._follows_repeated(first):
            return None
        for parent in first.parents:
            if parent.repeat_round != self.number:
                for holder in islice(members(parent.holders), MAX_HOLDERS_READ):
                    is_new = holder not in self._path and holder not in self.unreadable
                    if is_new and holder.description is not None:
                        return holder
        return None


def members(group: SmallSet[T]) -> Iterator[T]:
    """Iterate over the members of a set."""
    if isinstance(group, dict):
        return iter(group)
    return iter(() if group is None else (group,))


def runs(flags: list[bool]) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each run of true flags."""
    begin = None
    for i, flag in enumerate([*flags, False]):
        if flag and begin is None:
            begin = i
        elif not flag and begin is not None:
            yield begin, i
            begin = None


def _adding(group: SmallSet[T], member: T) -> SmallSet[T]:
    if group is None or group is member:
        return member
    if not isinstance(group, dict):
        group = {group: None}
    group[member] = None
    return group


def _removing(group: SmallSet[T], member: T) -> SmallSet[T]:
    if isinstance(group, dict):
        group.pop(member, None)
        return group if len(group) > 1 else next(iter(group))
    return None if group is member else group


# --------------------------------------------------------------- announcements


class StoredBlocks(NamedTuple):
    """Blocks that can be loaded now, each the parent of the next.

    For a chunk that is known by its key alone: one hash, no parent, no tokens, `block_size` 0. The
    other fields are those of `Description`.

    in_tiers: the blocks lie in tiers, not in memory.
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
    """A chunk to announce: its location and blocks.

    description, parent: None if the chunk is known by its key alone.
    """

    key: bytes
    in_tiers: bool
    location: ChunkLocation
    description: Description | None
    group: int
    hashes: tuple[bytes, ...]
    parent: bytes | None


def chunk_contents(
    key: bytes, location: ChunkLocation, description: Description | None, *, in_tiers: bool
) -> ChunkContents:
    """Return the blocks that the chunk has at its location; without description the key's block."""
    if description is not None:
        first, end = location.first, location.first + location.count
        hashes = description.hashes[first:end]
        if len(hashes) == 1 or (hashes and len(set(hashes)) == len(hashes)):
            parent = description.hashes[first - 1] if first else description.parent
            group = description.group
            return ChunkContents(key, in_tiers, location, description, group, hashes, parent)
    block_hash, group = key, 0
    if len(key) > _GROUP_BYTES:
        block_hash, group = key[:-_GROUP_BYTES], int.from_bytes(key[-_GROUP_BYTES:], "big")
    return ChunkContents(key, in_tiers, location, None, group, (block_hash,), None)


def stored_blocks(contents: ChunkContents, begin: int, end: int) -> StoredBlocks:
    """Return the announcement of some of a chunk's blocks."""
    hashes, description = contents.hashes[begin:end], contents.description
    if description is None:
        return StoredBlocks(hashes, b"", b"", 0, contents.group, in_tiers=contents.in_tiers)
    parent = contents.hashes[begin - 1] if begin else contents.parent or b""
    begin, end = contents.location.first + begin, contents.location.first + end
    block_bytes = description.block_size * TOKEN_BYTES
    lookahead = None
    if num_bytes := len(description.lookahead):
        tokens = description.tokens + description.lookahead
        ends = range((begin + 1) * block_bytes, (end + 1) * block_bytes, block_bytes)
        lookahead = tuple(tokens[end : end + num_bytes] for end in ends)
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
    """Return the announcements that announce blocks again: they are removed and stored."""
    return RemovedBlocks(stored.hashes, stored.group, stored.in_tiers), stored


def removed_blocks(removed: MediumBlocks) -> list[RemovedBlocks]:
    """Return the announcements that remove these blocks."""
    return [
        RemovedBlocks(tuple(hashes), group, in_tiers)
        for (group, in_tiers), hashes in removed.items()
    ]
