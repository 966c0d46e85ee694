"""From chunks that came and went to blocks that routers are told of.

A router knows blocks by their hashes and finds them by their tokens, from a prompt's first block
on. One that is told of a block whose parent it does not know drops it (llm-d's indexer, Dynamo's
router), and one that is told that a block is gone may drop what follows it, too (Dynamo). So a
block that was told while its chain was not there is told once more when the chain is. Routers may
also count how often a block was stored and removed (Dynamo, llm-d): whatever is told again is
removed just before, so that the count stays one.

`kvd_proto.chains` says of which blocks the chain is there.

What lies in tiers is told of its own, as of another medium: a router has a block until it is in no
medium any more. A chain may go on from one medium in the other. The description of a chunk is read
while the chunk is in memory, and kept as long as tiers hold it. Where it was not there to be read
the chunk is told by its key alone, until it comes into memory again.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from kvd_proto.announcements import (
    BELOW,
    Announcement,
    Offer,
    RemovedBlocks,
    StoredBlocks,
    below,
    offer_of,
    removed,
    runs,
    stored_blocks,
)
from kvd_proto.chains import WHOLE, Block, Chains, each
from kvd_proto.descriptions import Description, decode, encode
from kvd_proto.errors import ReaderFault
from kvd_proto.said import Differences, Place

MOST_REPEATED = 500
"""Runs of blocks that one call tells again; the next calls go on."""

Describe: TypeAlias = Callable[[Place], Description | None]


class _Chunk:
    """A chunk that is told: where it lies, and its blocks, which follow each other.

    encoded: of a chunk in tiers its description, where it is known.
    """

    __slots__ = ("blocks", "encoded", "place")

    def __init__(self, place: Place, blocks: tuple[Block, ...], encoded: bytes | None) -> None:
        self.place, self.blocks, self.encoded = place, blocks, encoded

    @property
    def is_bare(self) -> bool:
        """It lies in tiers, and nothing is known of it but its key."""
        return self.encoded is None and self.blocks[0].group >= BELOW

    @property
    def kept_description(self) -> Description | None:
        """Of a chunk in tiers, where it is known."""
        return None if self.encoded is None else decode(self.encoded)


class Announcer:
    """Tells what of a namespace's blocks is there; pure but for `describe`.

    Args:
        describe: what is known of the chunk at a place; None: nothing, or nothing any more.
    """

    def __init__(self, describe: Describe) -> None:
        self._describe = describe
        self._chunks: dict[bytes, _Chunk] = {}  # by key; those in tiers by `below` of it
        self._bare: set[bytes] = set()  # chunks in tiers that are told by their keys alone
        self._chains = Chains()

    @property
    def waiting(self) -> bool:
        """Whether `announce` has blocks to tell again, without any differences."""
        return bool(self._chains.due)

    @property
    def announced(self) -> Iterator[tuple[int, bytes, bool]]:
        """Group and hash of every block that is told, and whether that is of one in tiers.

        Nothing may be announced meanwhile.
        """
        for block in self._chains:
            yield block.group & ~BELOW, block.hash, block.group >= BELOW

    def announce(self, differences: Differences) -> list[Announcement]:
        """Return what is to be told, in this order: what was stored, parents first, then removed.

        Call it also without differences while it is `waiting`.
        """
        told: list[Announcement] = []
        if differences.stored or differences.kept:
            describe = self._describe
            offers = {
                key: offer_of(key, place, describe(place), 0)
                for key, place in differences.stored.items()
            }
            if self._bare or differences.kept:
                offers |= self._offers_below(differences, offers)
            self._tell_all(offers, told)
        gone: dict[int, list[bytes]] = {}
        if differences.released:
            names = list(map(below, differences.released))
            self._bare.difference_update(names)
            self._end(names, gone)
        self._end(differences.removed, gone)
        told += removed(gone)
        if self._chains.due:
            self._tell_again(told)
        return told

    def everything(self) -> Iterator[StoredBlocks]:
        """Yield all blocks that are told, parents first.

        Differences may be announced between two of them: what they remove is left out, and what
        they add may be left out, too.
        """
        done: set[Block] = set()
        # What is told by its key alone is another tier of a block that routers know: it comes last.
        for first in sorted(self._chunks, key=self._bare.__contains__):
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
                if offer is None and chunk.is_bare:
                    offer = _bare_offer(chunk)
                if offer is not None:
                    done.update(chunk.blocks)
                    for run in runs(rest):
                        yield stored_blocks(offer, *run)

    # ------------------------------------------------------------------ stored

    def _offers_below(
        self, differences: Differences, offers: dict[bytes, Offer]
    ) -> dict[bytes, Offer]:
        """Chunks that tiers keep, and those of which more is known now that they are in memory.

        Args:
            differences: of which `kept` counts.
            offers: of chunks in memory.
        """
        found: dict[bytes, Offer] = {}
        for key, place in differences.kept.items():
            offer, name = offers.get(key), below(key)
            description = None if offer is None else offer.description
            if offer is None and (chunk := self._chunks.get(key)) is not None:
                description = self._describe(chunk.place)
            if description is None and (chunk := self._chunks.get(name)) is not None:
                description = chunk.kept_description
            found[name] = offer_of(key, place, description, BELOW)
        for key, offer in offers.items():
            name = below(key)
            if name in self._bare and name not in found and offer.description is not None:
                found[name] = offer_of(key, self._chunks[name].place, offer.description, BELOW)
        return found

    def _tell_all(self, offers: dict[bytes, Offer], told: list[Announcement]) -> None:
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

    def _tell(self, key: bytes, offer: Offer, told: list[Announcement]) -> None:
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
                told += removed({group: [block_hash]})
            elif block.level < WHOLE:
                chains.due.append(block)  # nobody could describe it, maybe, when its chain came
            chains.hold(block, key)
            held.append(block)
            new.append(is_new)
            if parent is not None:
                parent = block_hash
        encoded = None
        if group >= BELOW:
            if offer.description is None:
                self._bare.add(key)
            else:
                self._bare.discard(key)
                encoded = encode(offer.description)
        self._chunks[key] = _Chunk(offer.place, tuple(held), encoded)
        for begin, end in runs(new):
            told.append(stored_blocks(offer, begin, end))
        if old is not None:
            rest = [block for block in old.blocks if block not in held]
            gone: dict[int, list[bytes]] = {}
            self._let_go(key, rest, gone)
            told += removed(gone)

    # ----------------------------------------------------------------- removed

    def _end(self, names: Iterable[bytes], gone: dict[int, list[bytes]]) -> None:
        """These chunks are there no more."""
        for name in names:
            chunk = self._chunks.pop(name, None)
            if chunk is not None:
                self._let_go(name, chunk.blocks, gone)

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
            name = self._holder(block)
            chunk = None if name is None else self._chunks[name]
            offer = None if chunk is None else self._offer_of(chunk)
            if chunk is None or offer is None:
                continue  # it is on its way out, or nobody can read what is known of it
            begin = end = chunk.blocks.index(block)
            while end < len(chunk.blocks) and chains.rise(chunk.blocks[end]):
                end += 1
            stored = stored_blocks(offer, begin, end)
            told += (RemovedBlocks(stored.hashes, stored.group, stored.below), stored)

    def _offer_of(self, chunk: _Chunk) -> Offer | None:
        """A chunk as it was told; None where what was known of it cannot be read any more."""
        first, place = chunk.blocks[0], chunk.place
        hashes = tuple(block.hash for block in chunk.blocks)
        if first.parent is None:
            return _bare_offer(chunk)
        description = chunk.kept_description or self._describe(place)
        end = place.first + place.count
        if description is None or description.hashes[place.first : end] != hashes:
            return None
        return Offer(place, description, first.group, hashes, first.parent)

    def _holder_before(self, chunk: _Chunk, done: set[Block]) -> bytes | None:
        """A chunk whose blocks come before this one's and are not done."""
        first = chunk.blocks[0]
        if not first.parent or first in done:
            return None
        for group in (first.group, *self._chains.groups):
            before = self._chains.get(group, first.parent)
            if before is not None and before not in done:
                return self._holder(before)
        return None

    def _holder(self, block: Block) -> bytes | None:
        """A chunk that has this block and may be described; None: none."""
        return next((name for name in each(block.holders) if name not in self._bare), None)

    # --------------------------------------------------------------- integrity

    def check_integrity(self) -> None:
        """Raise ReaderFault where what is held contradicts itself."""
        self._chains.check_integrity()
        held = {(block, key) for block in self._chains for key in each(block.holders)}
        if held != {(b, key) for key, chunk in self._chunks.items() for b in chunk.blocks}:
            raise ReaderFault(f"chunks and blocks do not agree: {self!r}")
        for name, chunk in self._chunks.items():
            if chunk.is_bare != (name in self._bare):
                raise ReaderFault(f"{name.hex()} has a description, or has none: {self!r}")
        if not self._bare <= self._chunks.keys():
            raise ReaderFault(f"chunks without description are not told: {self!r}")

    def __repr__(self) -> str:
        return f"<Announcer of {len(self._chunks)} chunks: {self._chains!r}>"


def _bare_offer(chunk: _Chunk) -> Offer:
    """A chunk of which only the hashes are told."""
    hashes = tuple(block.hash for block in chunk.blocks)
    return Offer(chunk.place, None, chunk.blocks[0].group, hashes, None)


def _owners(offers: dict[bytes, Offer]) -> dict[bytes, list[bytes]]:
    """The keys of the chunks that have a block, by its hash."""
    owners: dict[bytes, list[bytes]] = {}
    for key, offer in offers.items():
        if offer.parent is not None:
            for block_hash in offer.hashes:
                owners.setdefault(block_hash, []).append(key)
    return owners
