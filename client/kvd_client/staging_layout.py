"""Staging pages: the layout under which they are registered, who owns them, and jobs in pieces.

A staging file has the size of the engine's KV memory and as many blocks, so ranks that stage and
ranks that export agree, and the daemon sizes a pool from the true figures. But it is sparse: only
the blocks of a window are used, the **pages** that jobs borrow. A page holds one block of any
group: the refs' pages back to back.

Stores and loads have a ring of pages each, so loads never wait for the pages of stores. No I/O.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvd_client.errors import InternalError, UnsupportedMemory
from kvd_proto.jobs import JobBlocks, chunks_per_group
from kvd_proto.layout import GroupSpec, RankLayout, TensorRef, TensorSpec
from kvd_proto.text import format_size

Ints: TypeAlias = npt.NDArray[np.int64]
DEFAULT_STAGING_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class StagingLayout:
    """Where staging pages lie.

    Attributes:
        layout: to register; as the engine's, but for the places of its tensors.
        page_bytes: of one page; page p begins at byte p * page_bytes of the file.
        first_page: of the window; no page of the window is the layout's null block.
        num_pages: of the window.
    """

    layout: RankLayout
    page_bytes: int
    first_page: int
    num_pages: int

    @property
    def window(self) -> tuple[int, int]:
        """Offset and size of the bytes that are used, in the file."""
        return self.first_page * self.page_bytes, self.num_pages * self.page_bytes

    def rings(self) -> "tuple[PageRing, PageRing]":
        """Return the pages of stores and those of loads."""
        half = self.num_pages // 2
        return PageRing(self.first_page, half), PageRing(self.first_page + half, half)


def staging_layout(engine: RankLayout, staging_bytes: int) -> StagingLayout:
    """Return the layout of staging pages for an engine's memory.

    Args:
        engine: the layout of the engine's own memory, validated.
        staging_bytes: at most so many bytes are used.

    Raises:
        UnsupportedMemory: stores and loads cannot both have the pages of one chunk.
    """
    page_bytes = engine.used_bytes // engine.num_blocks
    tensors: dict[TensorSpec, int] = {}
    groups: list[GroupSpec] = []
    for group in engine.groups:
        refs: list[TensorRef] = []
        offset = 0
        for ref in group.refs:
            spec = TensorSpec(0, offset, ref.page_bytes, page_bytes)
            number = tensors.setdefault(spec, len(tensors))
            refs.append(TensorRef(number, ref.page_bytes, ref.layer))
            offset += ref.page_bytes
        groups.append(
            GroupSpec(
                tuple(refs), group.block_size, group.kind, group.sliding_window, group.contents
            )
        )
    null_block = engine.null_block
    first_page, available = 0, engine.num_blocks
    if null_block is not None:
        after = engine.num_blocks - null_block - 1
        first_page, available = (null_block + 1, after) if after > null_block else (0, null_block)
    num_pages = min(available, staging_bytes // page_bytes)
    if num_pages < 2 * engine.blocks_per_chunk:
        chunk = format_size(page_bytes * engine.blocks_per_chunk)
        remedy = (
            f"raise staging_bytes, now {format_size(staging_bytes)}"
            if num_pages < available
            else f"the engine has {available} blocks only: lower blocks_per_chunk"
        )
        raise UnsupportedMemory(
            f"staging needs room for two chunks of {chunk}, one to store and one to load; {remedy}"
        )
    layout = RankLayout(
        num_blocks=engine.num_blocks,
        blocks_per_chunk=engine.blocks_per_chunk,
        hash_block_size=engine.hash_block_size,
        storages=(engine.used_bytes,),
        tensors=tuple(tensors),
        groups=tuple(groups),
        replicated=engine.replicated,
        null_block=null_block,
    )
    return StagingLayout(layout, page_bytes, first_page, num_pages)


# ---------------------------------------------------------------------- pages


@dataclass(slots=True, eq=False)
class PageRun:
    """Consecutive pages with one owner, from `PageRing.allocate` to `PageRing.release`."""

    first: int
    count: int
    is_free: bool = False


class PageRing:
    """Consecutive pages, given out in a circle as consecutive runs.

    Runs may be released in any order. Pages can be given out again when all runs before them are
    released too.

    Args:
        first: page of the ring.
        size: number of pages.
    """

    def __init__(self, first: int, size: int) -> None:
        self.first = first
        self.size = size
        self._runs: deque[PageRun] = deque()  # the oldest first; gaps at the ring's end are free

    def allocate(self, count: int) -> PageRun | None:
        """Return `count` consecutive pages; None: there are none now.

        None for more than `size` pages at any time.
        """
        end = self.first + self.size
        begin = self.first
        if self._runs:
            oldest, newest = self._runs[0].first, self._runs[-1]
            begin = newest.first + newest.count
            if newest.first < oldest:  # the newest run is behind the ring's end already
                end = oldest
            elif begin + count > end:
                begin, end = self.first, oldest
        if count < 1 or begin + count > end:
            return None
        run = PageRun(begin, count)
        self._runs.append(run)
        return run

    def release(self, run: PageRun) -> None:
        """Give a run back, once."""
        if run.is_free:
            raise InternalError(f"pages {run.first}.. are released twice")
        run.is_free = True
        while self._runs and self._runs[0].is_free:
            self._runs.popleft()

    @property
    def in_use(self) -> int:
        """Number of pages that have an owner."""
        return sum(run.count for run in self._runs if not run.is_free)

    def check_integrity(self) -> None:
        """Check that no page is in two runs, and that all lie in the ring.

        Raises:
            InternalError: otherwise.
        """
        pages = [page for run in self._runs for page in range(run.first, run.first + run.count)]
        if len(set(pages)) != len(pages):
            raise InternalError("a staging page is in two runs")
        if any(not self.first <= page < self.first + self.size for page in pages):
            raise InternalError("a run of staging pages leaves its ring")


# ------------------------------------------------------------------------ jobs


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a job: whole chunks, as a job of its own.

    Attributes:
        blocks: of the engine.
        is_copied: bool[blocks], the blocks that take a page; the others are null blocks, or lie in
            chunks that another rank stores.
        segments: for each group with copied blocks its number and these block ids, in the order of
            the pages.
    """

    blocks: JobBlocks
    is_copied: npt.NDArray[np.bool_]
    segments: tuple[tuple[int, Ints], ...]

    @property
    def num_pages(self) -> int:
        """Number of pages that it takes."""
        return sum(len(ids) for _, ids in self.segments)

    def staged(self, run: PageRun, null_block: int | None) -> JobBlocks:
        """Return the lane's job: the run's pages in place of the engine's blocks.

        Blocks of chunks that another rank stores get any page: the lane does not touch it.
        """
        ids = self.blocks.block_ids.numpy().astype(np.int64)
        is_null = ids == null_block if null_block is not None else np.zeros(len(ids), np.bool_)
        pages = np.where(is_null, ids, run.first)
        pages[self.is_copied] = np.arange(run.first, run.first + self.num_pages)
        blocks = self.blocks
        return JobBlocks.of(
            pages,
            blocks.group_sizes.numpy(),
            blocks.block_indices.numpy(),
            blocks.slots.numpy(),
            blocks.generations.numpy(),
        )


def split_job(
    blocks: JobBlocks, layout: RankLayout, max_pages: int, writer: tuple[int, int] | None = None
) -> Iterator[Piece]:
    """Yield a job's pieces, of at most `max_pages` pages or one chunk.

    Args:
        blocks: of the engine, checked against the layout.
        layout: the engine's, or that of its staging pages.
        max_pages: of a piece.
        writer: of a store with replicated shares: the rank and the world size. Ranks take turns to
            write: slot s is written by rank s % world size.
    """
    factor, null_block = layout.blocks_per_chunk, layout.null_block
    chunks_per_piece = max(1, max_pages // factor)
    sizes, indices = blocks.sizes, blocks.indices
    counts = chunks_per_group(sizes, indices, factor)
    ids = blocks.block_ids.numpy().astype(np.int64)
    slots, generations = blocks.slots.numpy(), blocks.generations.numpy()
    num_chunks = sum(counts)
    chunk_begins = np.concatenate(([0], np.cumsum(counts)))
    block_begins = np.concatenate(([0], np.cumsum(sizes)))
    for begin in range(0, num_chunks, chunks_per_piece):
        end = min(begin + chunks_per_piece, num_chunks)
        piece_sizes, piece_indices = [0] * len(sizes), [0] * len(sizes)
        piece_ids: list[Ints] = []
        is_copied: list[npt.NDArray[np.bool_]] = []
        segments: list[tuple[int, Ints]] = []
        for group, (size, index) in enumerate(zip(sizes, indices, strict=True)):
            first = max(begin - int(chunk_begins[group]), 0)
            last = min(end - int(chunk_begins[group]), counts[group])
            if first >= last:
                continue
            skip = index % factor
            low, high = max(first * factor - skip, 0), min(last * factor - skip, size)
            group_ids = ids[int(block_begins[group]) + low : int(block_begins[group]) + high]
            piece_sizes[group], piece_indices[group] = high - low, index + low
            copied = np.ones(len(group_ids), np.bool_)
            if null_block is not None:
                copied &= group_ids != null_block
            if writer is not None:
                rank, world_size = writer
                chunk = (np.arange(low, high) + skip) // factor + int(chunk_begins[group])
                copied &= slots[chunk] % world_size == rank
            piece_ids.append(group_ids)
            is_copied.append(copied)
            if copied.any():
                segments.append((group, group_ids[copied]))
        yield Piece(
            JobBlocks.of(
                np.concatenate(piece_ids),
                piece_sizes,
                piece_indices,
                slots[begin:end],
                generations[begin:end],
            ),
            np.concatenate(is_copied),
            tuple(segments),
        )
