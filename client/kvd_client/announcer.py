"""Turns differences of chunks into announcements of blocks, for routers.

A router knows blocks by their hashes and finds them by their tokens, from a prompt's first block
on. What follows from routers' rules:

- Some drop a block whose parent they do not know (llm-d, Dynamo), or the blocks after a removed one
  (Dynamo). So a block that was announced before its parent is announced again after it
  (`kvd_client.block_chains`).
- Some count how often a block was stored and removed (Dynamo). So a block that is announced again
  is removed just before, and its count stays one.
- Tiers are a medium of their own: a router has a block until no medium has it.

The description of a chunk is read when the chunk comes into memory. If there are tiers, it is
remembered, because the chunk may leave memory before the engine reads that a tier has it, and
because tiers do not give descriptions. It is remembered for chunks that tiers have lost, too: a
restart of the daemon or of a tier, or a long detachment, removes chunks that come back. A chunk
whose description could not be read is announced by its key alone.

A repeat round announces everything again, for a router that started late or lost messages:

1. Removed blocks are removed again: the router may have lost the removal.
2. Every chunk that was announced when the round began, after the chunks with its parent.
3. Chunks that were announced meanwhile, if a block before them was not repeated yet.
4. Chunks that are known by their keys alone.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from itertools import compress, islice
from typing import TypeAlias

from kvd_client.block_chains import (
    MAX_HOLDERS_READ,
    AnnouncedBlock,
    AnnouncedChunk,
    Announcement,
    BlockChains,
    BlockId,
    ChunkContents,
    GroupBlocks,
    MediumBlocks,
    RemovedBlocks,
    RepeatRound,
    StoredBlocks,
    chunk_contents,
    members,
    reannounced,
    removed_blocks,
    runs,
    stored_blocks,
)
from kvd_client.changes import ChunkLocation, Differences
from kvd_proto.descriptions import Description, decode, encode
from kvd_proto.errors import DescriptionError

MAX_REANNOUNCED_RUNS = 500  # of blocks that one call of `announce` announces again
MAX_REMEMBERED_REMOVALS = 65_536  # the newest, which repeat rounds repeat
# Descriptions of chunks that left memory, the newest: a tier may report such a chunk later. And so
# many more descriptions of chunks that tiers have or had than tiers ever had chunks.
MAX_DEPARTED = 4096
REMOVALS_PER_CHUNK = 16  # removals that cost as much in a repeat round as one chunk
_VISITS_PER_CHUNK = 8  # steps of a round in one part, for each chunk that the part may repeat


Describe: TypeAlias = Callable[[ChunkLocation], Description | None]


class Announcer:
    """Announces the blocks of a namespace's chunks.

    Args:
        describe: returns the description of the chunk at a location; None: there is none.
        tier_groups: groups whose chunks in tiers are announced; None: all.

    Attributes:
        has_tiers: chunks in memory may go to tiers, so their descriptions are remembered.
    """

    def __init__(self, describe: Describe, tier_groups: Collection[int] | None = None) -> None:
        self.has_tiers = False
        self._describe = describe
        self._tier_groups = tier_groups
        self._memory: dict[bytes, AnnouncedChunk] = {}  # by key
        self._tiers: dict[bytes, AnnouncedChunk] = {}
        # Descriptions of chunks that left memory, and of chunks that left tiers, newest last.
        self._departed: OrderedDict[bytes, bytes] = OrderedDict()
        self._departed_from_tiers: OrderedDict[bytes, bytes] = OrderedDict()
        self._most_in_tiers = 0  # the largest number of chunks in tiers so far
        self._chains = BlockChains()
        self._removals: OrderedDict[BlockId, None] = OrderedDict()  # newest last
        self._num_removals_left = 0  # of the round: the oldest removals
        self._round: RepeatRound | None = None

    def __len__(self) -> int:
        return len(self._memory) + len(self._tiers)

    @property
    def waiting(self) -> bool:
        """Whether `announce` has blocks to announce again, even without differences."""
        return bool(self._chains.to_recheck)

    @property
    def announced(self) -> Iterator[tuple[int, bytes, bool]]:
        """Group and hash of every announced block, and whether it is in tiers.

        Do not announce anything while you iterate.
        """
        for block in self._chains:
            yield block.group.number, block.hash, block.in_tiers

    def announce(self, differences: Differences) -> list[Announcement]:
        """Return the announcements of differences.

        1. Stored blocks, parents first.
        2. Removed blocks.
        3. Blocks whose chain is complete only now: removed and stored. There is a limit, so call it
           while it is `waiting`, also without differences.
        """
        announcements: list[Announcement] = []
        dropped: list[AnnouncedChunk] = []
        if differences.stored or differences.stored_in_tiers:
            for contents in self._parents_first(self._read_differences(differences)):
                self._store(contents, announcements, dropped)
            self._most_in_tiers = max(self._most_in_tiers, len(self._tiers))
        tiers, memory = self._tiers, self._memory
        left_tiers = {key: tiers.pop(key) for key in differences.removed_from_tiers if key in tiers}
        left_memory = {key: memory.pop(key) for key in differences.removed if key in memory}
        self._remember_departed(left_memory, left_tiers)
        dropped += [*left_tiers.values(), *left_memory.values()]
        if dropped:
            self._drop(dropped, announcements)
        if self._chains.to_recheck:
            self._announce_chained(announcements)
        return announcements

    def forget(self) -> None:
        """Treat nothing as announced, as routers do after AllBlocksCleared; keep descriptions."""
        memory, tiers = self._memory, self._tiers
        self._memory, self._tiers = {}, {}
        self._remember_departed(memory, tiers)
        self._chains = BlockChains()
        self._removals.clear()
        self._num_removals_left, self._round = 0, None

    # ----------------------------------------------------------- repeat rounds

    @property
    def repeating(self) -> bool:
        """Whether a repeat round is under way."""
        return self._round is not None

    @property
    def num_to_repeat(self) -> int:
        """Chunks left in the repeat round; REMOVALS_PER_CHUNK removals count as one."""
        if self._round is None:
            return 0
        return -(-self._num_removals_left // REMOVALS_PER_CHUNK) + self._round.num_left

    def begin_repeat(self) -> None:
        """Begin a repeat round; one that is under way starts again."""
        self._chains.repeat_round += 1
        self._num_removals_left = len(self._removals)
        self._round = RepeatRound(self._chains.repeat_round, self._memory, self._tiers)

    def repeat(self, num_chunks: int) -> list[Announcement]:
        """Return the next part of the repeat round: removals, then blocks of chunks.

        Each run of blocks is removed and stored. The part may be empty while the round goes on:
        see `repeating`. Differences may be announced between two parts. Call it only while the
        engine is attached: a chunk whose description cannot be read is left out, until it is
        stored again.

        Args:
            num_chunks: about how many to repeat; REMOVALS_PER_CHUNK removals count as one.
        """
        announcements: list[Announcement] = []
        repeat_round = self._round
        if repeat_round is None:
            return announcements
        if self._num_removals_left:
            num_removals = min(self._num_removals_left, num_chunks * REMOVALS_PER_CHUNK)
            announcements += self._repeat_removals(num_removals)
            num_chunks -= -(-num_removals // REMOVALS_PER_CHUNK)
        num_visits = _VISITS_PER_CHUNK * num_chunks
        while num_chunks > 0 and num_visits > 0:
            num_visits -= 1
            chunk = repeat_round.visit()
            if chunk is not None:
                num_chunks -= self._repeat_chunk(chunk, repeat_round, announcements)
            elif repeat_round.is_finished:
                break
        if repeat_round.is_finished and not self._num_removals_left:
            self._round = None
        return announcements

    def _repeat_removals(self, count: int) -> list[RemovedBlocks]:
        """Return announcements of the oldest `count` removals, which become the newest."""
        removals, removed = self._removals, MediumBlocks()
        self._num_removals_left -= count
        for _ in range(min(count, len(removals))):
            group, in_tiers, block_hash = block = next(iter(removals))
            removals.move_to_end(block)
            removed.setdefault((group, in_tiers), []).append(block_hash)
        return removed_blocks(removed)

    def _repeat_chunk(
        self, chunk: AnnouncedChunk, repeat_round: RepeatRound, announcements: list[Announcement]
    ) -> bool:
        """Announce again a chunk's blocks that this round has not; return whether there are any.

        A chunk that cannot be read stays with the round as unreadable. Routers that start with this
        round do not know its blocks, so these become unchained, with the blocks after them.
        """
        unrepeated = [block.repeat_round != repeat_round.number for block in chunk.blocks]
        if not any(unrepeated):
            return False
        contents = self._read_chunk(chunk)
        if contents is None:
            repeat_round.unreadable.add(chunk)
            for block in compress(chunk.blocks, unrepeated):
                self._chains.unchain(block)
            return True
        if chunk.description == b"":  # not remembered: it was read at its location
            chunk.description = self._description_to_remember(contents)
        for begin, end in runs(unrepeated):
            for block in chunk.blocks[begin:end]:
                self._chains.mark_repeated(block)
            announcements += reannounced(stored_blocks(contents, begin, end))
        return True

    # ------------------------------------------------------------------ stored

    def _read_differences(self, differences: Differences) -> list[ChunkContents]:
        """Return the chunks to announce: those stored in memory, then those in tiers."""
        describe, tiers = self._describe, self._tiers
        stored = {
            key: chunk_contents(key, location, describe(location), in_tiers=False)
            for key, location in differences.stored.items()
        }
        tier_contents: list[ChunkContents] = []
        for key, location in differences.stored_in_tiers.items():
            description = stored[key].description if key in stored else None
            if description is None:
                description = self._known_description(key, differences.last_locations.get(key))
            contents = chunk_contents(key, location, description, in_tiers=True)
            if self._is_announced_in_tiers(contents):
                tier_contents.append(contents)
        for key, contents in stored.items() if tiers else ():
            chunk, description = tiers.get(key), contents.description
            if chunk is None or chunk.description is not None or description is None:
                continue
            if key not in differences.stored_in_tiers:  # announced in tiers by its key until now
                tier_contents.append(
                    chunk_contents(key, chunk.location, description, in_tiers=True)
                )
        return [*stored.values(), *tier_contents]

    def _is_announced_in_tiers(self, contents: ChunkContents) -> bool:
        return self._tier_groups is None or contents.group in self._tier_groups

    def _known_description(
        self, key: bytes, last_location: ChunkLocation | None
    ) -> Description | None:
        """Return the description of a chunk that came into tiers; None: it is unknown.

        The first of: of its chunk in memory, in tiers, as remembered since it left memory or tiers,
        and in the slot that it has left now.
        """
        for chunk in (self._memory.get(key), self._tiers.get(key)):
            if chunk is not None and (description := self._description(chunk)) is not None:
                return description
        encoded = self._departed.get(key) or self._departed_from_tiers.get(key)
        if encoded is not None:
            return decode(encoded)
        return None if last_location is None else self._describe(last_location)

    def _description(self, chunk: AnnouncedChunk) -> Description | None:
        """Return a chunk's description, as remembered or read at its location; None: unknown."""
        if chunk.description is None:
            return None
        return decode(chunk.description) if chunk.description else self._describe(chunk.location)

    def _parents_first(self, chunks: list[ChunkContents]) -> Iterator[ChunkContents]:
        """Yield the chunks, each after those that have its parent; store each before the next."""
        owners: dict[bytes, list[int]] | None = None
        visited: set[int] = set()
        for i, contents in enumerate(chunks):
            if i in visited:
                continue
            visited.add(i)
            parent = contents.parent
            if not parent or self._chains.is_announced(contents.group, parent):
                yield contents
                continue
            if owners is None:
                owners = _owners(chunks)
            path = [i]
            while path:
                parent_owners = [
                    owner
                    for owner in owners.get(chunks[path[-1]].parent or b"", ())
                    if owner not in visited
                ]
                if parent_owners:
                    path += parent_owners
                    visited.update(parent_owners)
                else:
                    yield chunks[path.pop()]

    def _store(
        self,
        contents: ChunkContents,
        announcements: list[Announcement],
        dropped: list[AnnouncedChunk],
    ) -> None:
        """Announce the new blocks of a chunk; append the chunk that it replaces to `dropped`."""
        key, in_tiers, location, _, group, hashes, parent = contents
        chunk = AnnouncedChunk(location, self._description_to_remember(contents))
        group_blocks = self._chains.group(group)
        blocks: list[AnnouncedBlock] = []
        is_announced: list[bool] = []
        removed: list[bytes] = []
        for block_hash in hashes:
            block, announced = self._block(
                group_blocks, block_hash, parent, removed, in_tiers=in_tiers
            )
            self._chains.add_holder(block, chunk)
            blocks.append(block)
            is_announced.append(announced)
            if parent is not None:
                parent = block_hash
        chunk.blocks = tuple(blocks)
        chunks = self._tiers if in_tiers else self._memory
        if key in chunks:
            dropped.append(chunks[key])
        chunks[key] = chunk
        if in_tiers:
            self._departed_from_tiers.pop(key, None)
        if removed:
            announcements.append(RemovedBlocks(tuple(removed), group, in_tiers))
        for begin, end in runs(is_announced):
            announcements.append(stored_blocks(contents, begin, end))
        if self._round is not None:
            self._round.note_announced(chunk, compress(blocks, is_announced))

    def _block(
        self,
        group: GroupBlocks,
        block_hash: bytes,
        parent: bytes | None,
        removed: list[bytes],
        *,
        in_tiers: bool,
    ) -> tuple[AnnouncedBlock, bool]:
        """Return the block, new or known, and whether to announce it.

        If routers may have it already, its hash is appended to `removed`, to remove it first.
        """
        chains, block = self._chains, group.media[in_tiers].get(block_hash)
        in_round = self._round is not None
        if block is None:
            block = chains.add(group, block_hash, parent, in_tiers=in_tiers)
            if (group.number, in_tiers, block_hash) in self._removals:
                del self._removals[group.number, in_tiers, block_hash]
                if in_round:  # the round does not repeat the removal any more
                    removed.append(block_hash)
            return block, True
        if parent is not None and block.parent is None:
            chains.describe(block, parent)
        elif parent is not None and block.repeat_round < chains.repeat_round - in_round:
            chains.undescribe(block)  # the last complete round could not read it, nor its children
            chains.describe(block, parent)
            block.repeat_round = chains.repeat_round
        else:
            if not block.chained:
                # Descriptions of its other chunks may have been unreadable.
                chains.to_recheck.append(block)
            return block, False
        removed.append(block_hash)
        return block, True

    def _description_to_remember(self, contents: ChunkContents) -> bytes | None:
        """Return `AnnouncedChunk.description` for a chunk, the same object in both media."""
        if contents.description is None:
            return None
        if not (contents.in_tiers or (self.has_tiers and self._is_announced_in_tiers(contents))):
            return b""
        try:
            encoded = encode(contents.description)
        except DescriptionError:  # another client wrote it, and its encoding here is too long
            return b""
        for chunk in (self._memory.get(contents.key), self._tiers.get(contents.key)):
            if chunk is not None and chunk.description == encoded:
                return chunk.description
        return encoded

    # ----------------------------------------------------------------- removed

    def _remember_departed(
        self, left_memory: dict[bytes, AnnouncedChunk], left_tiers: dict[bytes, AnnouncedChunk]
    ) -> None:
        """Remember the descriptions of chunks that have left, a bounded number.

        Those that left tiers have a bound of their own: a daemon's restart may remove all chunks of
        both, and tiers' chunks come back.
        """
        max_from_tiers = self._most_in_tiers + MAX_DEPARTED - len(self._tiers)
        for departed, chunks, max_departed in (
            (self._departed, left_memory, MAX_DEPARTED),
            (self._departed_from_tiers, left_tiers, max_from_tiers),
        ):
            for key, chunk in islice(chunks.items(), max(0, len(chunks) - max_departed), None):
                if chunk.description:
                    departed[key] = chunk.description
                    departed.move_to_end(key)
            while len(departed) > max_departed:
                departed.popitem(last=False)

    def _drop(self, chunks: list[AnnouncedChunk], announcements: list[Announcement]) -> None:
        """Announce the removal of blocks that only these chunks had."""
        chains, removals, removed = self._chains, self._removals, MediumBlocks()
        for chunk in chunks:
            for block in chunk.blocks:
                group, in_tiers, block_hash = block.group.number, block.in_tiers, block.hash
                is_removed = chains.remove_holder(block, chunk)
                loses_tokens = block.parent is not None and not block.is_described
                if (is_removed or loses_tokens) and self._round is not None:
                    self._repeat_other_medium(block, self._round, announcements)
                if is_removed:
                    removed.setdefault((group, in_tiers), []).append(block_hash)
                    removals[group, in_tiers, block_hash] = None
                    if len(removals) > MAX_REMEMBERED_REMOVALS:
                        removals.popitem(last=False)
                elif loses_tokens:
                    chains.undescribe(block)
                    by_key = StoredBlocks((block_hash,), b"", b"", 0, group, in_tiers=in_tiers)
                    announcements += reannounced(by_key)
            chunk.blocks = ()
            if chunk.description is not None:
                chunk.description = b""  # a round may keep the chunk for long
        announcements += removed_blocks(removed)

    def _repeat_other_medium(
        self, removed: AnnouncedBlock, repeat_round: RepeatRound, announcements: list[Announcement]
    ) -> None:
        """Repeat a block in the other medium before this medium loses the block or its tokens.

        A router that knows only what this round has repeated would drop the block's children. If
        the round has not repeated the chain yet, the block keeps its turn: nothing follows it yet.
        """
        block = removed.group.media[not removed.in_tiers].get(removed.hash)
        if block is None or removed.repeat_round != repeat_round.number:
            return
        for chunk in islice(members(block.holders), MAX_HOLDERS_READ):
            is_due = block.repeat_round != repeat_round.number and repeat_round.follows(chunk)
            if is_due and chunk.description is not None:
                self._repeat_chunk(chunk, repeat_round, announcements)

    # ----------------------------------------------------------- chained later

    def _announce_chained(self, announcements: list[Announcement]) -> None:
        """Announce again blocks whose chain is complete only now, a bounded number of runs."""
        chains, runs_left = self._chains, MAX_REANNOUNCED_RUNS
        while chains.to_recheck and runs_left:
            block = chains.to_recheck.popleft()
            if block.holders is None or block.chained or not block.has_chain:
                continue
            runs_left -= 1
            for chunk in islice(members(block.holders), MAX_HOLDERS_READ):
                contents = None if chunk.description is None else self._read_chunk(chunk)
                if contents is not None:
                    begin = end = chunk.blocks.index(block)
                    while end < len(chunk.blocks) and chains.update_chained(chunk.blocks[end]):
                        chunk.blocks[end].repeat_round = chains.repeat_round
                        end += 1
                    announcements += reannounced(stored_blocks(contents, begin, end))
                    if self._round is not None:
                        self._round.note_announced(chunk, chunk.blocks[begin:end])
                    break

    def _read_chunk(self, chunk: AnnouncedChunk) -> ChunkContents | None:
        """Return an announced chunk's contents; None: its description cannot be read any more."""
        first, location = chunk.blocks[0], chunk.location
        hashes = tuple(block.hash for block in chunk.blocks)
        description = self._description(chunk)
        if chunk.description is not None:
            end = location.first + location.count
            if description is None or description.hashes[location.first : end] != hashes:
                return None
        group, parent = first.group.number, first.parent
        return ChunkContents(b"", first.in_tiers, location, description, group, hashes, parent)


def _owners(chunks: list[ChunkContents]) -> dict[bytes, list[int]]:
    """Return the indices of the chunks that have a block, by its hash."""
    owners: dict[bytes, list[int]] = {}
    for i, contents in enumerate(chunks):
        if contents.parent is not None:
            for block_hash in contents.hashes:
                owners.setdefault(block_hash, []).append(i)
    return owners
