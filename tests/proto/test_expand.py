"""From a job's arrays to byte ranges, against an oracle that walks block by block."""

import bisect
import itertools
from collections import Counter
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd_proto.copies import Copies
from kvd_proto.errors import JobShapeError
from kvd_proto.expand import Expander
from kvd_proto.jobs import FEW, JobBlocks, chunks_per_group
from kvd_proto.layout import (
    GroupSpec,
    RankLayout,
    TensorRef,
    TensorSpec,
    validate_layout,
)
from tests.layouts import flat_layout

PAGE = 64
ONE_GROUP = flat_layout(PAGE, blocks=64, factor=4, null_block=0)
Move = tuple[int, int, int]  # storage, byte in the storage, byte in the arena


@dataclass(frozen=True)
class Job:
    """A layout and the arrays of one job on it."""

    layout: RankLayout
    block_ids: list[int]
    group_sizes: list[int]
    block_indices: list[int]
    slots: list[int]

    @property
    def blocks(self) -> JobBlocks:
        """The arrays as they are sent, with generations that nobody looks at."""
        return JobBlocks.of(
            self.block_ids, self.group_sizes, self.block_indices, self.slots, self.slots
        )

    def expand(self) -> Copies:
        """What the job moves, once it was checked."""
        self.blocks.check(self.layout)
        return Expander(self.layout).expand(self.blocks)


def oracle(job: Job) -> list[Move]:
    """Every byte moved, the obvious way."""
    layout, moves, ids, slots = job.layout, [], iter(job.block_ids), iter(job.slots)
    for g, (size, index) in enumerate(zip(job.group_sizes, job.block_indices, strict=True)):
        slot = next(slots) if size else -1
        for j in range(size):
            inside = (index + j) % layout.blocks_per_chunk
            slot = next(slots) if j and not inside else slot
            block = next(ids)
            if block == layout.null_block:
                continue
            for ref, start in zip(layout.groups[g].refs, layout.ref_offsets(g), strict=True):
                t = layout.tensors[ref.tensor]
                memory = t.offset + block * t.block_stride
                arena = slot * layout.slot_bytes + start + inside * ref.page_bytes
                moves += [(t.storage, memory + b, arena + b) for b in range(ref.page_bytes)]
    return moves


@st.composite
def jobs(draw: st.DrawFn, *, sparse: bool = False) -> Job:
    """Random tensors (apart, packed or padded), groups, factors, offsets and null blocks."""
    blocks, factor = draw(st.integers(2, 12)), draw(st.integers(1, 5))
    pages = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    padding = draw(st.integers(0, 2))
    if draw(st.booleans()):  # all tensors packed into one storage, block by block
        stride = sum(pages) + padding
        storages = [stride * blocks]
        tensors = [TensorSpec(0, sum(pages[:i]), p, stride) for i, p in enumerate(pages)]
    else:
        storages = [(p + padding) * blocks for p in pages]
        tensors = [TensorSpec(i, 0, p, p + padding) for i, p in enumerate(pages)]
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        used = draw(st.sets(st.sampled_from(range(len(pages))), min_size=1))
        refs = [
            TensorRef(i, draw(st.integers(max(1, pages[i] - 1), pages[i])), draw(st.integers(0, 3)))
            for i in used
        ]
        groups.append(GroupSpec(tuple(refs), 16))
    null_block = draw(st.integers(0, blocks - 1) if sparse else st.none() | st.just(0))
    shape = tuple(storages), tuple(tensors), tuple(groups)
    layout = RankLayout(blocks, factor, 16, *shape, null_block=null_block)
    validate_layout(layout)
    holding = [block for block in range(blocks) if block != null_block]
    sizes = [draw(st.integers(0, 11)) for _ in groups]
    indices = [draw(st.integers(0, 20)) for _ in groups]
    ids: list[int] = []
    for size in sizes:
        in_order = [holding[i % len(holding)] for i in range(size)]
        any_order = st.lists(st.sampled_from(holding), min_size=size, max_size=size)
        ids += draw(any_order | st.just(in_order))
    count = sum(-(-(n + i % factor) // factor) for n, i in zip(sizes, indices, strict=True) if n)
    any_slots = st.lists(st.integers(0, 40), min_size=count, max_size=count, unique=True)
    return Job(layout, ids, sizes, indices, draw(any_slots | st.just(list(range(count)))))


@st.composite
def sparse_jobs(draw: st.DrawFn) -> Job:
    """Jobs in which some places of chunks are left out, at either end of each."""
    job = draw(jobs(sparse=True))
    null_block = job.layout.null_block
    assert null_block is not None
    factor, ids, at = job.layout.blocks_per_chunk, list(job.block_ids), 0
    for size, index in zip(job.group_sizes, job.block_indices, strict=True):
        chunks: dict[int, list[int]] = {}
        for j in range(size):
            chunks.setdefault((index % factor + j) // factor, []).append(at + j)
        for places in chunks.values():
            begin = draw(st.integers(0, len(places) - 1))
            end = draw(st.integers(begin + 1, len(places)))
            for place in (*places[:begin], *places[end:]):
                ids[place] = null_block
        at += size
    return replace(job, block_ids=ids)


def moves(copies: Copies) -> Counter[Move]:
    """Every byte that these runs move."""
    return Counter((s, m + b, a + b) for s, m, a, size in copies.runs for b in range(size))


@given(st.one_of(jobs(), sparse_jobs()), st.none() | st.frozensets(st.integers(0, 40)))
def test_the_expansion_is_the_oracles(job: Job, only: frozenset[int] | None) -> None:
    """Byte by byte the runs are what a walk over blocks and refs gives: none missing or extra.

    Of some slots those of the chunks in them. One by one they are as by arithmetic on arrays.
    """
    blocks, expander = job.blocks, Expander(job.layout)
    blocks.check(job.layout)
    copies = expander.expand(blocks, only)
    slot_bytes = job.layout.slot_bytes
    expected = [move for move in oracle(job) if only is None or move[2] // slot_bytes in only]
    assert moves(copies) == Counter(expected)
    many = expander.expand_many(blocks, only)
    assert many.runs == copies.runs
    if job.layout.null_block in job.block_ids:  # few runs are made of full chunks
        return
    few = expander.expand_few(blocks, only)
    assert few == many.runs
    one_by_one = Copies.of(few)
    assert (one_by_one.longest, len(few)) == (many.longest, len(many))
    for name in ("storage", "tensor_offset", "arena_offset", "nbytes"):
        np.testing.assert_array_equal(getattr(one_by_one, name), getattr(many, name))
        assert getattr(one_by_one, name).dtype == getattr(many, name).dtype


@given(st.one_of(jobs(), sparse_jobs()))
def test_chunks_are_counted_with_the_blocks_that_are_listed(job: Job) -> None:
    """Of chunks that are full in part: the first listed place, how many, and the group."""
    factor, ids, expected = job.layout.blocks_per_chunk, iter(job.block_ids), []
    for group, (size, index) in enumerate(zip(job.group_sizes, job.block_indices, strict=True)):
        listed = [index % factor + j for j in range(size) if next(ids) != job.layout.null_block]
        for chunk in sorted({place // factor for place in listed}):
            inside = [place % factor for place in listed if place // factor == chunk]
            expected.append((inside[0], len(inside), group))
    blocks = job.blocks
    blocks.check(job.layout)  # which finds what is left out
    chunks = blocks.chunks(factor)
    assert list(zip(chunks.first, chunks.count, chunks.group, strict=True)) == expected


@given(st.one_of(jobs(), sparse_jobs()))
def test_layers_come_one_after_another(job: Job) -> None:
    """Layer by layer the same bytes are moved, and the totals say where each layer ends."""
    blocks = job.blocks
    blocks.check(job.layout)
    expander = Expander(job.layout)
    copies, ends = expander.expand_layers(blocks)
    moved = [(s, m + b, a + b) for s, m, a, size in copies.runs for b in range(size)]
    assert Counter(moved) == moves(expander.expand(blocks))
    assert len(ends) == job.layout.layers
    assert ends[-1] == len(moved)
    for at, (_, _, arena) in enumerate(moved):
        group, _, ref = place(job, arena)
        layer = job.layout.groups[group].refs[ref].layer
        assert ends[layer] - at > 0 >= (ends[layer - 1] - at - 0 if layer else 0)


@given(jobs(), st.data())
def test_what_lies_inside_for_the_layout_does_so_for_every_job(
    job: Job, data: st.DataObject
) -> None:
    """With a layout inside its storages each job's runs are; otherwise some job's are not."""
    layout, num_slots = job.layout, 41
    if data.draw(st.booleans()):
        tensors = list(layout.tensors)
        which = data.draw(st.integers(0, len(tensors) - 1))
        offset = tensors[which].offset + data.draw(st.sampled_from([1, 7, 1000]))
        tensors[which] = msgspec.structs.replace(tensors[which], offset=offset)
        layout = msgspec.structs.replace(layout, tensors=tuple(tensors))
    expander = Expander(layout)
    arena_bytes = layout.slot_bytes * num_slots
    if expander.inside:
        job.blocks.check(layout, num_slots)
        expander.expand(job.blocks).check_bounds(layout.storages, arena_bytes)
        return
    groups = len(layout.groups)
    last = Job(
        layout, [layout.num_blocks - 1] * groups, [1] * groups, [0] * groups, [*range(groups)]
    )
    with pytest.raises(JobShapeError, match="lie outside"):
        last.expand().check_bounds(layout.storages, arena_bytes)


def place(job: Job, arena: int) -> tuple[int, int, int]:
    """The group, slot and ref that a byte of the arena belongs to."""
    slot, inside = divmod(arena, job.layout.slot_bytes)
    counts = chunks_per_group(job.group_sizes, job.block_indices, job.layout.blocks_per_chunk)
    ends = list(itertools.accumulate(counts))
    group = bisect.bisect_right(ends, job.slots.index(slot))
    return group, slot, bisect.bisect_right(job.layout.ref_offsets(group), inside) - 1


@given(jobs())
def test_runs_are_as_long_as_they_can_be(job: Job) -> None:
    """No run is empty, and none could have been part of the one before it in the same ref.

    Nor in the same slot where a chunk is one block: there packed refs are one.
    """
    runs = job.expand().runs
    assert all(run[3] > 0 for run in runs)
    for (s0, m0, a0, n0), (s1, m1, a1, _) in itertools.pairwise(runs):
        if (s0, m0 + n0, a0 + n0) == (s1, m1, a1):
            (group, slot, ref), last = place(job, a1), place(job, a1 - 1)
            assert (group, ref) != (last[0], last[2])
            assert job.layout.blocks_per_chunk > 1 or (group, slot) != last[:2]


def test_offsets_beyond_four_gibibytes_do_not_wrap() -> None:
    """Arrays of 32 bits on the wire still give 64-bit offsets."""
    page = 2**20
    layout = flat_layout(page, blocks=2**16)
    copies = Job(layout, [2**16 - 1], [1], [0], [2**31]).expand()
    assert copies.tensor_offset.tolist() == [page * (2**16 - 1)]
    assert copies.arena_offset.tolist() == [page * 2**31]


def test_a_chunk_with_a_hole_is_refused() -> None:
    """Places are left out at either end of a chunk alone; the error has the figures."""
    job = Job(ONE_GROUP, [1, 2, 3, 4], [4], [0], [1])
    job.blocks.check(job.layout, 9)
    figures = "chunk 0 of the job has 3 blocks other than the null block at positions 0 to 3"
    with pytest.raises(JobShapeError, match=figures):
        replace(job, block_ids=[1, 0, 3, 4]).blocks.check(job.layout, 9)


def test_a_run_outside_its_storage_or_the_arena_is_refused() -> None:
    """Storages of 4 and 8 KiB, an arena of 12: one byte too far is an error with the figures."""
    storages, arena, within = (4096, 8192), 12288, [(0, 0, 0, 4096), (1, 8191, 12287, 1)]
    outside = [(0, 4000, 0, 100), (0, 0, 12200, 100), (2, 0, 0, 1), (-1, 0, 0, 1), (0, -1, 0, 1)]
    outside += [(0, 0, -1, 1), (0, 0, 0, 0)]
    for others in (0, FEW):  # few and many are looked at in two ways
        Copies.of(within * (1 + others)).check_bounds(storages, arena)
        for run in outside:
            copies = Copies.of([*within[:1] * others, run])
            with pytest.raises(JobShapeError, match="of the arena of 12288 bytes lie outside"):
                copies.check_bounds(storages, arena)
