"""From chunks that came and went to blocks that routers are told of.

A router knows blocks by their hashes and finds them by their tokens, from a prompt's first block
on. One that is told of a block whose parent it does not know drops it (llm-d's indexer, Dynamo's
router), and one that is told that a block is gone may drop what follows it, too (Dynamo). So a
block that was told while its chain was not there is told once more when the chain is. Routers may
also count how often a block was stored and removed (Dynamo, llm-d): whatever is told again is
removed just before, so that the count stays one.

`level` of a block is what routers can have made of it when it was told last:

- WHOLE: its chain was there, from the prompt's first block on, in the block's own group;
- MIXED: the chain was there with blocks of several groups, which is enough for a router that does
  not tell groups apart;
- APART: neither, or nothing is known of the block but its hash.

Levels of what follows a block fall when it goes, and rise, with a repetition, when it comes again.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from kvd_proto.change_reader import Differences, Place
from kvd_proto.descriptions import Description
from kvd_proto.errors import ReaderFault

MOST_REPEATED = 500
"""Runs of blocks that one call tells again; the next calls go on."""

APART: Final = 0
MIXED: Final = 1
WHOLE: Final = 2
_GROUP_BYTES = 4
_TOKEN_BYTES = 4


class StoredBlocks(NamedTuple):
    """Blocks that are there, each the parent of the next.

    Without a description, of a chunk that nobody described, there is one hash, the tokens are
    empty and `block_size` is 0. The other fields are those of `Description`.
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


class RemovedBlocks(NamedTuple):
    """Blocks of one group that are not there any more."""

    hashes: tuple[bytes, ...]
    group: int


_T = TypeVar("_T")
OneOrMore: TypeAlias = _T | dict[_T, None] | None
"""Nothing, one, or the keys of a dict: nearly always one, for which a dict would be large."""

Announcement: TypeAlias = StoredBlocks | RemovedBlocks
Describe: TypeAlias = Callable[[Place], Description | None]


class _Block:
    """A block of a group: what comes before it, who holds it, and what was told of it.

    parent: hash of the block before it; empty: it is a prompt's first; None: it is not described.
    holders: keys of the chunks that have it.
    """

    __slots__ = ("group", "hash", "holders", "level", "parent")

    def __init__(self, block_hash: bytes, group: int, parent: bytes | None) -> None:
        self.hash, self.group, self.parent = block_hash, group, parent
        self.holders: OneOrMore[bytes] = None
        self.level = APART


class _Chunk:
    """A chunk that is told: where it lies, and its blocks, which follow each other."""

    __slots__ = ("blocks", "place")

    def __init__(self, place: Place, blocks: tuple[_Block, ...]) -> None:
        self.place, self.blocks = place, blocks


class _Offer(NamedTuple):
    """A chunk that is to be told."""

    place: Place
    description: Description | None
    group: int
    hashes: tuple[bytes, ...]
    parent: bytes | None


class Announcer:
    """Tells what of a namespace's blocks is there; pure but for `describe`.

    Args:
        describe: what is known of the chunk at a place; None: nothing, or nothing any more.
    """

    def __init__(self, describe: Describe) -> None:
        self._describe = describe
        self._chunks: dict[bytes, _Chunk] = {}
        self._groups: dict[int, dict[bytes, _Block]] = {}
        self._children: dict[bytes, OneOrMore[_Block]] = {}  # of described blocks, by parent
        self._due: deque[_Block] = deque()  # whose level may rise

    @property
    def waiting(self) -> bool:
        """Whether `announce` has blocks to tell again, without any differences."""
        return bool(self._due)

    @property
    def announced(self) -> Iterator[tuple[int, bytes]]:
        """Group and hash of every block that is told; nothing may be announced meanwhile."""
        return ((group, each) for group, blocks in self._groups.items() for each in blocks)

    def announce(self, differences: Differences) -> list[Announcement]:
        """Return what is to be told, in this order: what was stored, parents first, then removed.

        Call it also without differences while it is `waiting`.
        """
        told: list[Announcement] = []
        if differences.stored:
            offers = {key: self._offer(key, place) for key, place in differences.stored.items()}
            self._tell_all(offers, told)
        gone: dict[int, list[bytes]] = {}
        for key in differences.removed:
            chunk = self._chunks.pop(key, None)
            if chunk is not None:
                self._let_go(key, chunk.blocks, gone)
        told += [RemovedBlocks(tuple(hashes), group) for group, hashes in gone.items()]
        if self._due:
            self._tell_again(told)
        return told

    def everything(self) -> Iterator[StoredBlocks]:
        """Yield all blocks that are told, parents first.

        Differences may be announced between two of them: what they remove is left out, and what
        they add may be left out, too.
        """
        done: set[_Block] = set()
        for first in list(self._chunks):
            path = [first]
            on_path = {first}
            while path:
                chunk = self._chunks.get(path[-1])
                before = None if chunk is None else self._holder_before(chunk, done)
                if before is not None and before not in on_path:
                    path.append(before)
                    on_path.add(before)
                    continue
                path.pop()
                if chunk is None:
                    continue
                rest = [block not in done for block in chunk.blocks]
                offer = self._offer_of(chunk) if any(rest) else None
                if offer is not None:
                    done.update(chunk.blocks)
                    for run in _runs(rest):
                        yield _stored(offer, *run)

    # ------------------------------------------------------------------ stored

    def _offer(self, key: bytes, place: Place) -> _Offer:
        description = self._describe(place)
        if description is not None:
            first, end = place.first, place.first + place.count
            hashes = description.hashes[first:end]
            if len(hashes) == 1 or (hashes and len(set(hashes)) == len(hashes)):
                parent = description.hashes[first - 1] if first else description.parent
                return _Offer(place, description, description.group, hashes, parent)
        if len(key) > _GROUP_BYTES:
            group = int.from_bytes(key[-_GROUP_BYTES:], "big")
            return _Offer(place, None, group, (key[:-_GROUP_BYTES],), None)
        return _Offer(place, None, 0, (key,), None)

    def _tell_all(self, offers: dict[bytes, _Offer], told: list[Announcement]) -> None:
        """Tell these chunks: before each those that have its parent."""
        owners: dict[bytes, list[bytes]] | None = None
        done: set[bytes] = set()
        for key, offer in offers.items():
            if key in done:
                continue
            if not offer.parent or self._has(offer.parent, offer.group):
                done.add(key)
                self._tell(key, offer, told)
                continue
            if owners is None:
                owners = _owners(offers)
            path = [key]
            seen = {key}
            while path:
                parent = offers[path[-1]].parent
                before = [
                    each
                    for each in (owners.get(parent, ()) if parent else ())
                    if each not in seen and each not in done
                ]
                if before:
                    path += before
                    seen.update(before)
                else:
                    each = path.pop()
                    done.add(each)
                    self._tell(each, offers[each], told)

    def _has(self, block_hash: bytes, group: int) -> bool:
        blocks = self._groups.get(group)
        return blocks is not None and block_hash in blocks

    def _tell(self, key: bytes, offer: _Offer, told: list[Announcement]) -> None:
        """Tell the blocks of a chunk that are not told yet; those that it has no more are not."""
        blocks = self._groups.get(offer.group)
        if blocks is None:
            blocks = self._groups[offer.group] = {}
        old = self._chunks.get(key)
        parent, held, new = offer.parent, [], []
        for block_hash in offer.hashes:
            block = blocks.get(block_hash)
            if block is None:
                block = blocks[block_hash] = _Block(block_hash, offer.group, parent)
                is_new = True
            else:
                is_new = block.parent is None and parent is not None
                if is_new:  # until now nothing was known but its hash
                    block.parent = parent
                    told.append(RemovedBlocks((block_hash,), offer.group))
            block.holders = _with(block.holders, key)
            if is_new:
                if parent:
                    self._children[parent] = _with(self._children.get(parent), block)
                block.level = self._level(block)
                if block.level:
                    self._wake_children(block)
            held.append(block)
            new.append(is_new)
            if parent is not None:
                parent = block_hash
        self._chunks[key] = _Chunk(offer.place, tuple(held))
        for begin, end in _runs(new):
            told.append(_stored(offer, begin, end))
        if old is not None:
            rest = [block for block in old.blocks if block not in held]
            gone: dict[int, list[bytes]] = {}
            self._let_go(key, rest, gone)
            told += [RemovedBlocks(tuple(hashes), group) for group, hashes in gone.items()]

    def _level(self, block: _Block) -> int:
        """What routers make of a block that is told now."""
        parent = block.parent
        if not parent:
            return APART if parent is None else WHOLE
        before = self._groups[block.group].get(parent)
        if before is not None and before.level == WHOLE:
            return WHOLE
        if len(self._groups) > 1:
            for blocks in self._groups.values():
                before = blocks.get(parent)
                if before is not None and before.level:
                    return MIXED
        return MIXED if before is not None and before.level else APART

    def _wake_children(self, block: _Block) -> None:
        children = self._children.get(block.hash)
        if children is not None:
            self._due.extend(_each(children))

    # ----------------------------------------------------------------- removed

    def _let_go(self, key: bytes, blocks: Sequence[_Block], gone: dict[int, list[bytes]]) -> None:
        """A chunk has these blocks no more; collect those that no chunk has."""
        for block in blocks:
            block.holders = _without(block.holders, key)
            if block.holders is not None:
                continue
            group = self._groups[block.group]
            del group[block.hash]
            if not group:
                del self._groups[block.group]
            if block.parent:
                siblings = _without(self._children.pop(block.parent), block)
                if siblings is not None:
                    self._children[block.parent] = siblings
            block.level = APART
            self._lower_children(block)
            gone.setdefault(block.group, []).append(block.hash)

    def _lower_children(self, block: _Block) -> None:
        fallen = [block]
        while fallen:
            for child in _each(self._children.get(fallen.pop().hash)):
                if child.level and (level := self._level(child)) < child.level:
                    child.level = level
                    fallen.append(child)

    # ------------------------------------------------------------------- again

    def _tell_again(self, told: list[Announcement]) -> None:
        """Tell blocks again whose chain is there now, a bounded number."""
        due, left = self._due, MOST_REPEATED
        while due and left:
            block = due.popleft()
            if block.holders is None or self._level(block) <= block.level:
                continue
            left -= 1
            chunk = self._chunks[next(_each(block.holders))]
            offer = self._offer_of(chunk)
            if offer is None:
                continue  # it is on its way out, or nobody can read what is known of it
            begin = end = chunk.blocks.index(block)
            for block in chunk.blocks[begin:]:
                level = self._level(block)
                if level <= block.level:
                    break
                block.level, end = level, end + 1
                self._wake_children(block)
            stored = _stored(offer, begin, end)
            told += (RemovedBlocks(stored.hashes, stored.group), stored)

    def _offer_of(self, chunk: _Chunk) -> _Offer | None:
        """A chunk as it was told; None where what was known of it cannot be read any more."""
        first, place = chunk.blocks[0], chunk.place
        hashes = tuple(block.hash for block in chunk.blocks)
        if first.parent is None:
            return _Offer(place, None, first.group, hashes, None)
        description = self._describe(place)
        end = place.first + place.count
        if description is None or description.hashes[place.first : end] != hashes:
            return None
        return _Offer(place, description, first.group, hashes, first.parent)

    def _holder_before(self, chunk: _Chunk, done: set[_Block]) -> bytes | None:
        """A chunk whose blocks come before this one's and are not done."""
        first = chunk.blocks[0]
        if not first.parent or first in done:
            return None
        for group in (first.group, *self._groups):
            before = self._groups.get(group, {}).get(first.parent)
            if before is not None and before not in done:
                return next(_each(before.holders))
        return None

    # --------------------------------------------------------------- integrity

    def check_integrity(self) -> None:
        """Raise ReaderFault where what is held contradicts itself."""
        blocks = [block for group in self._groups.values() for block in group.values()]
        held = {(block, key) for block in blocks for key in _each(block.holders)}
        if held != {(b, key) for key, chunk in self._chunks.items() for b in chunk.blocks}:
            raise ReaderFault(f"chunks and blocks do not agree: {self!r}")
        if any(block.holders is None for block in blocks) or not all(self._groups.values()):
            raise ReaderFault(f"a block that no chunk has, or an empty group: {self!r}")
        children = {(parent, b) for parent, some in self._children.items() for b in _each(some)}
        if children != {(block.parent, block) for block in blocks if block.parent}:
            raise ReaderFault(f"blocks and their parents do not agree: {self!r}")
        for block in blocks:
            level = self._level(block)
            if block.level > level:
                raise ReaderFault(f"{block.hash.hex()} has level {block.level}, not {level}")

    def __repr__(self) -> str:
        blocks = sum(map(len, self._groups.values()))
        return f"<Announcer of {len(self._chunks)} chunks, {blocks} blocks, {len(self._due)} due>"


def _owners(offers: dict[bytes, _Offer]) -> dict[bytes, list[bytes]]:
    """The keys of the chunks that have a block, by its hash."""
    owners: dict[bytes, list[bytes]] = {}
    for key, offer in offers.items():
        if offer.parent is not None:
            for block_hash in offer.hashes:
                owners.setdefault(block_hash, []).append(key)
    return owners


def _with(some: OneOrMore[_T], one: _T) -> OneOrMore[_T]:
    if some is None or some == one:
        return one
    if not isinstance(some, dict):
        some = {some: None}
    some[one] = None
    return some


def _without(some: OneOrMore[_T], one: _T) -> OneOrMore[_T]:
    if isinstance(some, dict):
        some.pop(one, None)
        return some if len(some) > 1 else next(iter(some))
    return None if some == one else some


def _each(some: OneOrMore[_T]) -> Iterator[_T]:
    if isinstance(some, dict):
        return iter(some)
    return iter(() if some is None else (some,))


def _runs(which: list[bool]) -> Iterator[tuple[int, int]]:
    """First index and end of each run of true ones."""
    begin = None
    for i, wanted in enumerate([*which, False]):
        if wanted and begin is None:
            begin = i
        elif not wanted and begin is not None:
            yield begin, i
            begin = None


def _stored(offer: _Offer, begin: int, end: int) -> StoredBlocks:
    """Some of a chunk's blocks that are held."""
    hashes, description = offer.hashes[begin:end], offer.description
    if description is None:
        return StoredBlocks(hashes, b"", b"", 0, offer.group)
    parent = offer.hashes[begin - 1] if begin else offer.parent or b""
    begin, end = offer.place.first + begin, offer.place.first + end
    size = description.block_size
    extra = None if description.extra is None else description.extra[begin:end]
    return StoredBlocks(
        hashes,
        parent,
        description.tokens[begin * size * _TOKEN_BYTES : end * size * _TOKEN_BYTES],
        size,
        offer.group,
        description.kind,
        description.window,
        description.lora,
        extra,
    )
