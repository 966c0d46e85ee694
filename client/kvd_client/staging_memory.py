"""Staging memory, and the interface of what copies between it and the engine's blocks.

`BlockCopier` has two implementations: `HostCopier` here, for host memory, and `DeviceCopier` in
`torch_memory.py`, for memory that an accelerator copies.
"""

import ctypes
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvd_client.errors import UnsupportedMemory
from kvd_client.memory import HostMemory, Memory, sealed_file
from kvd_client.staging_layout import Ints, StagingLayout
from kvd_client.timeline import ControlPage, Signals
from kvd_proto.layout import RankLayout

Segments: TypeAlias = Sequence[tuple[int, Ints]]
"""For each group its number and block ids: the blocks of consecutive pages."""

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, linux/mman.h; since Linux 5.14
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class StagingMemory:
    """The host memory of staging pages, a sparse file that the daemon maps.

    Only the window is mapped here: a core dump of this process does not fill the rest.

    Args:
        pages: where they lie.

    Attributes:
        memory: the whole file, to register.
        window: u8[bytes of the window].

    Raises:
        UnsupportedMemory: the system has no memory for it.
    """

    def __init__(self, pages: StagingLayout) -> None:
        self.pages = pages
        offset, nbytes = pages.window
        begin = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        fd = -1
        try:
            fd = sealed_file("kvd-staging", pages.layout.used_bytes)
            mapping = mmap.mmap(fd, offset + nbytes - begin, offset=begin)
            mapping.madvise(mmap.MADV_DONTDUMP)
        except (OSError, ValueError, OverflowError) as error:
            if fd >= 0:
                os.close(fd)
            raise UnsupportedMemory(
                f"a file of {pages.layout.used_bytes} bytes for staging cannot be made: {error}"
            ) from error
        self.memory = HostMemory(fd, pages.layout.used_bytes)
        self.window = np.frombuffer(mapping, np.uint8)[offset - begin :]

    @property
    def address(self) -> int:
        """The address of the window's first page."""
        return int(self.window.ctypes.data)

    def populate(self) -> None:
        """Allocate the window now, so that no copy has to. Without effect on older systems."""
        begin = self.address // mmap.PAGESIZE * mmap.PAGESIZE
        _libc.madvise(begin, self.address + len(self.window) - begin, _POPULATE_WRITE)

    def position(self, page: int) -> int:
        """Return a page's number in the window."""
        return page - self.pages.first_page


class Copy(ABC):
    """A copy that a `BlockCopier` has started."""

    @abstractmethod
    def is_done(self) -> bool:
        """Return whether it has ended, and touches nothing any more.

        Raises:
            Exception: it has failed, and touches nothing any more.
        """


class BlockCopier(ABC):
    """Copies between an engine's blocks and staging pages.

    For one thread, which enters it as a context, but for `signals` and the last `close`.
    """

    signals: Signals | None = None
    """Of the engine's streams; None: the host signals, for the memory is host memory."""

    @abstractmethod
    def gather(self, segments: Segments, page: int, after: Sequence[Any]) -> Copy:
        """Start to copy blocks to consecutive pages from `page` on, after these events."""

    @abstractmethod
    def scatter(self, segments: Segments, page: int, after: Sequence[Any]) -> Copy:
        """Start to copy consecutive pages from `page` on to blocks, after these events."""

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Prepare this thread for copies; at the end no copy may be running."""
        yield

    @abstractmethod
    def close(self) -> None:
        """Free what it has; no copy may be running. May be called again."""


class KvTensors(ABC):
    """An engine's KV memory as its library's tensors; `torch_memory.TorchTensors`.

    Attributes:
        storages: their sizes in bytes; for `RankLayout.storages`.
    """

    storages: tuple[int, ...]

    @property
    @abstractmethod
    def is_host(self) -> bool:
        """Whether it is host memory."""

    @abstractmethod
    def share(self) -> list[Memory]:
        """Make the memory mappable; return it, one for each storage."""

    @abstractmethod
    def open_copier(
        self, layout: RankLayout, staging: StagingMemory, page: ControlPage
    ) -> BlockCopier:
        """Return what copies between this memory's blocks and staging pages.

        Args:
            layout: of this memory.
            staging: the pages.
            page: the worker's control page.
        """


class _Done(Copy):
    def is_done(self) -> bool:
        return True


_DONE = _Done()


@dataclass(frozen=True, slots=True)
class _HostRef:
    """One ref's rows: `row_bytes` of each block, and of each page.

    numpy keeps the GIL when it copies strided void items, or picks them without `take`. Those
    copies go through bytes.

    Attributes:
        blocks, block_bytes: of the engine's memory, as void items and as bytes[blocks, row_bytes].
        pages, page_bytes: of the window, alike.
    """

    row_bytes: int
    blocks: npt.NDArray[Any]
    block_bytes: npt.NDArray[np.uint8]
    pages: npt.NDArray[Any]
    page_bytes: npt.NDArray[np.uint8]

    def gather(self, ids: Ints, page: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Copy blocks to consecutive positions of the window; `buffer` has room for them."""
        end = page + len(ids)
        if not self.blocks.flags.c_contiguous:  # `take` would copy all of them first
            self.page_bytes[page:end] = self.block_bytes[ids]
            return
        rows = self.pages[page:end]
        is_dense = rows.flags.c_contiguous
        if not is_dense:
            buffer = buffer[: len(ids) * self.row_bytes]
            rows = buffer.view(self.blocks.dtype)
        np.take(self.blocks, ids, out=rows, mode="clip")  # not "raise", which copies twice
        if not is_dense:
            self.page_bytes[page:end] = buffer.reshape(len(ids), self.row_bytes)

    def scatter(self, ids: Ints, page: int) -> None:
        """Copy consecutive positions of the window to blocks."""
        self.blocks[ids] = self.pages[page : page + len(ids)]


class HostCopier(BlockCopier):
    """Copies in host memory, at once. numpy releases the GIL meanwhile.

    Args:
        storages: addresses of the engine's storages; its memory stays as long as `owner`.
        layout: of the engine's memory.
        staging: the pages.
        owner: kept.
    """

    def __init__(
        self, storages: Sequence[int], layout: RankLayout, staging: StagingMemory, owner: object
    ) -> None:
        self._owner = owner
        self._staging = staging
        self._buffer = np.empty(0, np.uint8)
        self._refs: list[list[_HostRef]] = []
        pages = staging.pages
        for group, staged in zip(layout.groups, pages.layout.groups, strict=True):
            refs = []
            for ref, staged_ref in zip(group.refs, staged.refs, strict=True):
                tensor = layout.tensors[ref.tensor]
                memory = _bytes_at(storages[tensor.storage], layout.storages[tensor.storage])
                blocks = memory, tensor.offset, tensor.block_stride, layout.num_blocks
                offset = pages.layout.tensors[staged_ref.tensor].offset
                window = staging.window, offset, pages.page_bytes, pages.num_pages
                refs.append(
                    _HostRef(
                        ref.page_bytes,
                        _rows(ref.page_bytes, *blocks),
                        _bytes_of_rows(ref.page_bytes, *blocks),
                        _rows(ref.page_bytes, *window),
                        _bytes_of_rows(ref.page_bytes, *window),
                    )
                )
            self._refs.append(refs)

    def gather(self, segments: Segments, page: int, after: Sequence[Any]) -> Copy:
        """See BlockCopier."""
        del after
        at = self._staging.position(page)
        for group, ids in segments:
            refs = self._refs[group]
            nbytes = len(ids) * max(ref.row_bytes for ref in refs)
            if len(self._buffer) < nbytes:
                self._buffer = np.empty(nbytes, np.uint8)
            for ref in refs:
                ref.gather(ids, at, self._buffer)
            at += len(ids)
        return _DONE

    def scatter(self, segments: Segments, page: int, after: Sequence[Any]) -> Copy:
        """See BlockCopier."""
        del after
        at = self._staging.position(page)
        for group, ids in segments:
            for ref in self._refs[group]:
                ref.scatter(ids, at)
            at += len(ids)
        return _DONE

    def close(self) -> None:
        """See BlockCopier."""
        self._refs = []
        self._owner = None


def _bytes_at(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    return np.frombuffer(memory, np.uint8)


def _rows(
    row_bytes: int, memory: npt.NDArray[np.uint8], offset: int, stride: int, count: int
) -> npt.NDArray[Any]:
    """Return [count] rows of `row_bytes`; one item each, so that one call copies many."""
    return np.ndarray((count,), f"V{row_bytes}", memory, offset, (stride,))


def _bytes_of_rows(
    row_bytes: int, memory: npt.NDArray[np.uint8], offset: int, stride: int, count: int
) -> npt.NDArray[np.uint8]:
    """Return the same rows as bytes[count, row_bytes]."""
    return np.ndarray((count, row_bytes), np.uint8, memory, offset, (stride, 1))
