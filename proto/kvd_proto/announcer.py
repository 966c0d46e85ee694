"""From chunks that came and went to blocks that routers are told of.

A router knows blocks by their hashes and finds them by their tokens, from a prompt's first block
on. One that is told of a block whose parent it does not know drops it (llm-d's indexer, Dynamo's
router), and one that is told that a block is gone may drop what follows it, too (Dynamo). So a
block that was told while its chain was not there is told once more when the chain is. Routers may
also count how often a block was stored and removed (Dynamo, llm-d): whatever is told again is
removed just before, so that the count stays one.

`kvd_proto.chains` says of which blocks the chain is there.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from kvd_proto.chains import Block, Chains, each
from kvd_proto.change_reader import Differences, Place
from kvd_proto.descriptions import Description
from kvd_proto.errors import ReaderFault

MOST_REPEATED = 500
"""Runs of blocks that one call tells again; the next calls go on."""

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


Announcement: TypeAlias = StoredBlocks | RemovedBlocks
Describe: TypeAlias = Callable[[Place], Description | None]


class _Chunk:
    """A chunk that is told: where it lies, and its blocks, which follow each other."""

    __slots__ = ("blocks", "place")

    def __init__(self, place: Place, blocks: tuple[Block, ...]) -> None:
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
        self._chains = Chains()

    @property
    def waiting(self) -> bool:
        """Whether `announce` has blocks to tell again, without any differences."""
        return bool(self._chains.due)

    @property
    def announced(self) -> Iterator[tuple[int, bytes]]:
        """Group and hash of every block that is told; nothing may be announced meanwhile."""
        return ((block.group, block.hash) for block in self._chains)

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
        if self._chains.due:
            self._tell_again(told)
        return told

    def everything(self) -> Iterator[StoredBlocks]:
        """Yield all blocks that are told, parents first.

        Differences may be announced between two of them: what they remove is left out, and what
        they add may be left out, too.
        """
        done: set[Block] = set()
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
            if not offer.parent or self._chains.get(offer.group, offer.parent):
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

    def _tell(self, key: bytes, offer: _Offer, told: list[Announcement]) -> None:
        """Tell the blocks of a chunk that are not told yet; those that it has no more are not."""
        chains, group, parent = self._chains, offer.group, offer.parent
        old = self._chunks.get(key)
        held, new = [], []
        for block_hash in offer.hashes:
            block = chains.get(group, block_hash)
            is_new = block is None
            if block is None:
                block = chains.add(group, block_hash, parent)
            elif block.parent is None and parent is not None:
                is_new = True  # until now nothing was known but its hash
                chains.describe(block, parent)
                told.append(RemovedBlocks((block_hash,), group))
            chains.hold(block, key)
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

    # ----------------------------------------------------------------- removed

    def _let_go(self, key: bytes, blocks: Sequence[Block], gone: dict[int, list[bytes]]) -> None:
        """A chunk has these blocks no more; collect those that no chunk has."""
        for block in blocks:
            if self._chains.let_go(block, key):
                gone.setdefault(block.group, []).append(block.hash)

    # ------------------------------------------------------------------- again

    def _tell_again(self, told: list[Announcement]) -> None:
        """Tell blocks again whose chain is there now, a bounded number."""
        chains, left = self._chains, MOST_REPEATED
        while chains.due and left:
            block = chains.due.popleft()
            if block.holders is None or chains.level(block) <= block.level:
                continue
            left -= 1
            chunk = self._chunks[next(each(block.holders))]
            offer = self._offer_of(chunk)
            if offer is None:
                continue  # it is on its way out, or nobody can read what is known of it
            begin = end = chunk.blocks.index(block)
            while end < len(chunk.blocks) and chains.rise(chunk.blocks[end]):
                end += 1
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

    def _holder_before(self, chunk: _Chunk, done: set[Block]) -> bytes | None:
        """A chunk whose blocks come before this one's and are not done."""
        first = chunk.blocks[0]
        if not first.parent or first in done:
            return None
        for group in (first.group, *self._chains.groups):
            before = self._chains.get(group, first.parent)
            if before is not None and before not in done:
                return next(each(before.holders))
        return None

    # --------------------------------------------------------------- integrity

    def check_integrity(self) -> None:
        """Raise ReaderFault where what is held contradicts itself."""
        self._chains.check_integrity()
        held = {(block, key) for block in self._chains for key in each(block.holders)}
        if held != {(b, key) for key, chunk in self._chunks.items() for b in chunk.blocks}:
            raise ReaderFault(f"chunks and blocks do not agree: {self!r}")

    def __repr__(self) -> str:
        return f"<Announcer of {len(self._chunks)} chunks: {self._chains!r}>"


def _owners(offers: dict[bytes, _Offer]) -> dict[bytes, list[bytes]]:
    """The keys of the chunks that have a block, by its hash."""
    owners: dict[bytes, list[bytes]] = {}
    for key, offer in offers.items():
        if offer.parent is not None:
            for block_hash in offer.hashes:
                owners.setdefault(block_hash, []).append(key)
    return owners


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
