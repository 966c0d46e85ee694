"""Staging pages against models: who owns them, and that a job in pieces is the job."""

import itertools
import mmap
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvd_client import RankLayout, UnsupportedMemory
from kvd_client.errors import InternalError
from kvd_client.staging_layout import PageRing, PageRun, StagingLayout, split_job, staging_layout
from kvd_client.staging_memory import HostCopier, StagingMemory
from kvd_proto.copies import Copies
from kvd_proto.expand import Expander
from kvd_proto.jobs import JobBlocks
from kvd_proto.layout import compare_ranks, validate_layout
from tests.layouts import flat_layout
from tests.proto.test_expand import Job, jobs, sparse_jobs

Bytes = npt.NDArray[np.uint8]
NUM_SLOTS = 41  # those of the jobs
FEW_BYTES = 2**20


class RingMachine(RuleBasedStateMachine):
    """A ring against the pages that are taken: those of runs, until all older runs are free."""

    @initialize(first=st.integers(0, 5), size=st.integers(1, 12))
    def begin(self, first: int, size: int) -> None:
        """Make a ring of any size."""
        self.ring = PageRing(first, size)
        self.runs: list[PageRun] = []  # the oldest first; free ones behind one that is not, too
        self.owned: list[PageRun] = []

    def taken(self) -> set[int]:
        """Pages that cannot be given out."""
        return {page for run in self.runs for page in pages_of(run)}

    @rule(count=st.integers(0, 13))
    def allocate(self, count: int) -> None:
        """Pages come right after the newest ones, or else from the ring's start."""
        taken, last = self.taken(), self.ring.first + self.ring.size
        head = self.runs[-1].first + self.runs[-1].count if self.runs else self.ring.first
        expected = [
            begin
            for begin in (head, self.ring.first)
            if count and begin + count <= last and not taken & set(range(begin, begin + count))
        ]
        run = self.ring.allocate(count)
        assert (run.first if run else None) == (expected[0] if expected else None)
        if run is not None:
            assert run.count == count
            self.runs.append(run)
            self.owned.append(run)
        elif not self.runs:
            assert not 0 < count <= self.ring.size

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Runs are released in any order, each once."""
        run = data.draw(st.sampled_from(self.owned))
        self.owned.remove(run)
        self.ring.release(run)
        while self.runs and self.runs[0] not in self.owned:
            del self.runs[0]
        with pytest.raises(InternalError, match="twice"):
            self.ring.release(run)

    @invariant()
    def no_page_has_two_owners(self) -> None:
        """Nor does one lie outside the ring."""
        pages = [page for run in self.owned for page in pages_of(run)]
        assert len(pages) == len(set(pages)) == self.ring.in_use
        assert all(0 <= page - self.ring.first < self.ring.size for page in pages)
        self.ring.check_integrity()


TestPageRing = RingMachine.TestCase


def pages_of(run: PageRun) -> range:
    """The pages of a run."""
    return range(run.first, run.first + run.count)


def staged(layout: RankLayout, staging_bytes: int = FEW_BYTES) -> StagingLayout:
    """Staging pages for a layout, if it has enough blocks."""
    null_block = layout.null_block
    before, after = null_block or 0, layout.num_blocks - 1 - (null_block or 0)
    available = layout.num_blocks if null_block is None else max(before, after)
    assume(available >= 2 * layout.blocks_per_chunk)
    return staging_layout(layout, staging_bytes)


@given(st.one_of(jobs(), sparse_jobs()), st.integers(0, 40))
def test_staging_pages_are_those_of_a_rank_of_the_same_engine(job: Job, extra_pages: int) -> None:
    """The daemon takes both ranks for one engine's, and sizes a pool as for exported memory."""
    layout = job.layout
    page_bytes = layout.used_bytes // layout.num_blocks
    most = (2 * layout.blocks_per_chunk + extra_pages) * page_bytes + page_bytes // 2
    pages = staged(layout, most)
    validate_layout(pages.layout)
    compare_ranks({0: layout, 1: pages.layout}, {0: 0, 1: 0})
    assert pages.layout.used_bytes == sum(pages.layout.storages) == layout.used_bytes
    assert pages.layout.share_bytes == layout.share_bytes
    assert pages.layout.layers == layout.layers
    offset, nbytes = pages.window
    assert 0 <= offset < offset + nbytes <= layout.used_bytes
    assert nbytes <= most
    stores, loads = pages.rings()
    assert stores.size == loads.size >= layout.blocks_per_chunk
    window = range(pages.first_page, pages.first_page + pages.num_pages)
    assert layout.null_block not in window
    rings = [page for ring in (stores, loads) for page in range(ring.first, ring.first + ring.size)]
    assert len(set(rings)) == len(rings)
    assert set(rings) <= set(window)
    for group in pages.layout.groups:  # back to back from the page's start
        at = 0
        for ref in group.refs:
            tensor = pages.layout.tensors[ref.tensor]
            assert (tensor.offset, tensor.page_bytes, tensor.block_stride) == (
                at,
                ref.page_bytes,
                pages.page_bytes,
            )
            at += ref.page_bytes
        assert at <= pages.page_bytes


TOO_LITTLE = [  # a layout of pages of 64 bytes, staging_bytes, words
    ({"blocks": 16}, 511, "two chunks of 256 B.*raise staging_bytes, now 511 B"),
    ({"blocks": 7}, FEW_BYTES, "has 7 blocks only: lower blocks_per_chunk"),
    ({"blocks": 15, "null_block": 7}, FEW_BYTES, "has 7 blocks only: lower blocks_per_chunk"),
]


def test_too_little_room_is_refused_with_the_remedy() -> None:
    """Both a store and a load need the pages of a chunk, on one side of the null block."""
    for changes, staging_bytes, words in TOO_LITTLE:
        with pytest.raises(UnsupportedMemory, match=words):
            staging_layout(flat_layout(64, factor=4, **changes), staging_bytes)
    for null_block, first_page in ((7, 8), (8, 0), (0, 1), (15, 0)):
        layout = flat_layout(64, factor=4, blocks=16, null_block=null_block)
        assert staging_layout(layout, FEW_BYTES).first_page == first_page


@dataclass(frozen=True)
class Place:
    """A block of a job, and where its bytes lie in the pool."""

    group: int
    index: int
    block: int
    slot: int
    generation: int


def places(blocks: JobBlocks, factor: int) -> Iterator[Place]:
    """Read a job block by block."""
    ids = iter(blocks.block_ids.tolist())
    chunks = zip(blocks.slots.tolist(), blocks.generations.tolist(), strict=True)
    for group, (size, index) in enumerate(zip(blocks.sizes, blocks.indices, strict=True)):
        slot = generation = -1
        for j in range(size):
            if not j or not (index + j) % factor:
                slot, generation = next(chunks)
            yield Place(group, index + j, next(ids), slot, generation)
    assert not list(itertools.chain(ids, chunks))


WRITERS = st.none() | st.sampled_from([(0, 1), (0, 2), (1, 2), (2, 3)])


@given(st.one_of(jobs(), sparse_jobs()), st.integers(1, 12), WRITERS)
def test_pieces_are_the_job(job: Job, max_pages: int, writer: tuple[int, int] | None) -> None:
    """Whole chunks, each in one piece, in order, with pages for the blocks that are copied."""
    layout, factor = job.layout, job.layout.blocks_per_chunk
    blocks = JobBlocks.of(
        job.block_ids,
        job.group_sizes,
        job.block_indices,
        job.slots,
        [slot + 100 for slot in job.slots],
    )
    blocks.check(layout)
    seen: list[Place] = []
    chunks: list[set[int]] = []
    for piece in split_job(blocks, layout, max_pages, writer):
        piece.blocks.check(layout)
        of_piece = list(places(piece.blocks, factor))
        chunks.append({place.slot for place in of_piece})
        assert len(chunks[-1]) <= max(1, max_pages // factor)
        copied = [
            place
            for place in of_piece
            if place.block != layout.null_block
            and (writer is None or place.slot % writer[1] == writer[0])
        ]
        assert piece.num_pages == len(copied) <= max(max_pages, factor)
        assert [(group, block) for group, ids in piece.segments for block in ids.tolist()] == [
            (place.group, place.block) for place in copied
        ]
        run = PageRun(3, piece.num_pages)
        job_of_lane = piece.staged(run, layout.null_block)
        page = iter(pages_of(run))
        for place, mine in zip(places(job_of_lane, factor), of_piece, strict=True):
            assert (place.group, place.index, place.slot, place.generation) == (
                mine.group,
                mine.index,
                mine.slot,
                mine.generation,
            )
            if mine.block == layout.null_block:
                assert place.block == layout.null_block
            elif mine in copied:
                assert place.block == next(page)
        assert not list(page)
        seen += of_piece
    assert sorted(seen, key=lambda place: (place.group, place.index)) == list(
        places(blocks, factor)
    )
    assert sum(map(len, chunks)) == len(set().union(*chunks)) == len(job.slots)


def run(copies: Copies, storages: list[Bytes], arena: Bytes, *, to_pool: bool) -> None:
    """Do what a lane does."""
    for storage, memory, at, nbytes in copies.runs:
        here, there = storages[storage][memory : memory + nbytes], arena[at : at + nbytes]
        if to_pool:
            there[:] = here
        else:
            here[:] = there


def noise(nbytes: int, seed: int) -> Bytes:
    """Bytes that are all different, in all likelihood."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@given(st.one_of(jobs(), sparse_jobs()), st.integers(1, 12), WRITERS)
def test_staged_jobs_move_the_bytes_of_the_job(
    job: Job, max_pages: int, writer: tuple[int, int] | None
) -> None:
    """A gather and the lane's job, or the lane's job and a scatter: byte for byte the direct job.

    Whichever rank writes a replicated chunk; a load moves all chunks into every rank.
    """
    layout, blocks = job.layout, job.blocks
    pages = staged(layout)
    blocks.check(layout)
    only = None
    if writer is not None:
        only = frozenset(slot for slot in job.slots if slot % writer[1] == writer[0])
    memory = StagingMemory(pages)
    file = [np.frombuffer(mmap.mmap(memory.memory.fd, memory.memory.nbytes), np.uint8)]
    storages = [noise(nbytes, index) for index, nbytes in enumerate(layout.storages)]
    copier = HostCopier(
        [storage.ctypes.data for storage in storages], layout, memory, list(storages)
    )
    direct, lane = Expander(layout), Expander(pages.layout)
    ring = pages.rings()[0]
    max_pages = min(max_pages, ring.size)

    arena = np.zeros(NUM_SLOTS * layout.slot_bytes, np.uint8)
    expected = arena.copy()
    run(direct.expand(blocks, only), storages, expected, to_pool=True)
    for piece in split_job(blocks, layout, max_pages, writer):
        borrowed = ring.allocate(piece.num_pages) or PageRun(ring.first, 0)
        copier.gather(piece.segments, borrowed.first, ())
        lane_job = piece.staged(borrowed, layout.null_block)
        lane_job.check(pages.layout)
        run(lane.expand(lane_job, only), file, arena, to_pool=True)
        if borrowed.count:
            ring.release(borrowed)
    np.testing.assert_array_equal(arena, expected)

    arena = noise(len(arena), 99)
    if len(set(job.block_ids) - {layout.null_block}) == len(
        [block for block in job.block_ids if block != layout.null_block]
    ):  # else the order of chunks decides, in any way of copying
        loaded = [storage.copy() for storage in storages]
        run(direct.expand(blocks), loaded, arena, to_pool=False)
        for piece in split_job(blocks, layout, max_pages):
            borrowed = ring.allocate(piece.num_pages) or PageRun(ring.first, 0)
            assert borrowed.count
            lane_job = piece.staged(borrowed, layout.null_block)
            lane_job.check(pages.layout)
            run(lane.expand(lane_job), file, arena, to_pool=False)
            copier.scatter(piece.segments, borrowed.first, ())
            ring.release(borrowed)
        for storage, right in zip(storages, loaded, strict=True):
            np.testing.assert_array_equal(storage, right)
    copier.close()
    memory.memory.close()
