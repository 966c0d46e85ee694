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
        self._refs: list[list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]] = []
        pages = staging.pages
        for group, staged in zip(layout.groups, pages.layout.groups, strict=True):
            views = []
            for ref, staged_ref in zip(group.refs, staged.refs, strict=True):
                tensor = layout.tensors[ref.tensor]
                blocks = _rows(
                    _bytes_at(storages[tensor.storage], layout.storages[tensor.storage]),
                    tensor.offset,
                    ref.page_bytes,
                    tensor.block_stride,
                    layout.num_blocks,
                )
                offset = pages.layout.tensors[staged_ref.tensor].offset
                rows = _rows(
                    staging.window, offset, ref.page_bytes, pages.page_bytes, pages.num_pages
                )
                views.append((blocks, rows))
            self._refs.append(views)

    def gather(self, segments: Segments, page: int, after: Sequence[Any]) -> Copy:
        """See BlockCopier."""
        del after
        at = self._staging.position(page)
        for group, ids in segments:
            for blocks, pages in self._refs[group]:
                rows = pages[at : at + len(ids)]
                if blocks.flags.c_contiguous and rows.flags.c_contiguous:
                    np.take(blocks, ids, out=rows, mode="clip")  # not "raise", which copies twice
                else:
                    rows[:] = blocks[ids]
            at += len(ids)
        return _DONE

    def scatter(self, segments: Segments, page: int, after: Sequence[Any]) -> Copy:
        """See BlockCopier."""
        del after
        at = self._staging.position(page)
        for group, ids in segments:
            for blocks, pages in self._refs[group]:
                blocks[ids] = pages[at : at + len(ids)]
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
    memory: npt.NDArray[np.uint8], offset: int, row_bytes: int, stride: int, count: int
) -> npt.NDArray[Any]:
    """Return [count] rows of `row_bytes`; one item each, so that one call copies many."""
    return np.ndarray((count,), f"V{row_bytes}", memory, offset, (stride,))
