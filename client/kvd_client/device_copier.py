"""Copies between the blocks of an accelerator and staging pages, with torch.

Each direction has a stream of its own, so the engine's streams never wait for a copy. A copy waits
on its stream for the events of the engine's work on the blocks. Two ways lead from blocks to pages:

- vLLM's `swap_blocks_batch`, where its kernels are loaded: one call copies all fragments;
- `index_select` and `index_copy_` through a buffer on the device, everywhere else. Work on one
  stream is in order, so each direction needs one buffer only.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from kvd_client.accelerator import Accelerator, Event, Stream
from kvd_client.errors import UsageError, get_logger, shown
from kvd_client.staging_layout import Ints, StagingLayout
from kvd_client.staging_memory import BlockCopier, Copy, Segments, StagingMemory
from kvd_client.timeline import ControlPage, Signals
from kvd_proto.layout import RankLayout, TensorRef

BUFFER_BYTES = 16 * 2**20  # of each direction on the device; one chunk at least

log = get_logger()


class EventSignals(Signals):
    """Remembers events of the engine's streams by their timeline numbers.

    Args:
        accelerator: whose streams these are.
        page: whose timeline follows the events, when they are queried.
    """

    def __init__(self, accelerator: Accelerator, page: ControlPage) -> None:
        self.device = accelerator.device.index or 0
        self._accelerator = accelerator
        self._page = page
        self._events: deque[tuple[int, Event]] = deque()

    def signal(self, stream: Any, number: int) -> None:
        """Reach `number` when all that is on the torch stream now has finished."""
        if not hasattr(stream, "wait_event"):
            raise UsageError(
                f"stream={shown(stream)}: a torch stream is needed, such as"
                " torch.accelerator.current_stream()"
            )
        event = self._accelerator.new_event()
        event.record(stream)
        self._events.append((number, event))

    def events_until(self, number: int) -> list[Any] | None:
        """See Signals."""
        while self._events and self._events[0][1].query():
            self._page.timeline = max(self._page.timeline, self._events.popleft()[0])
        if number <= self._page.timeline:
            return []
        events = [event for reached, event in self._events if reached <= number]
        return events if self._events and self._events[-1][0] >= number else None

    def close(self) -> None:
        """Forget the events."""
        self._events.clear()


class _DeviceCopy(Copy):
    def __init__(self, event: Event) -> None:
        self._event = event

    def is_done(self) -> bool:
        return self._event.query()


class DeviceCopier(BlockCopier):
    """See the module.

    Args:
        accelerator: that has the memory.
        storages: the engine's, as torch's untyped storages.
        layout: of the engine's memory.
        staging: the pages.
        page: the worker's control page.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        storages: Sequence[Any],
        layout: RankLayout,
        staging: StagingMemory,
        page: ControlPage,
    ) -> None:
        self.signals = EventSignals(accelerator, page)
        self._accelerator = accelerator
        self._staging = staging
        self._pages = staging.pages
        self._host_pages = torch.from_numpy(staging.window).view(
            self._pages.num_pages, self._pages.page_bytes
        )
        # A page's block id, at the page's position: it stays until the page has another owner.
        self._host_ids = torch.zeros(self._pages.num_pages, dtype=torch.int64)
        self._views = [
            [
                _rows(storages, layout, refs, self._pages)
                for refs in zip(group.refs, staged.refs, strict=True)
            ]
            for group, staged in zip(layout.groups, self._pages.layout.groups, strict=True)
        ]
        self._offsets = [
            [self._pages.layout.tensors[ref.tensor].offset for ref in group.refs]
            for group in self._pages.layout.groups
        ]
        self._device = storages[0].device
        self._gathers: Stream
        self._scatters: Stream
        self._swap = swap_blocks_batch()
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def gather(self, segments: Segments, page: int, after: Sequence[Any]) -> Copy:
        """See BlockCopier."""
        return self._start(self._gathers, segments, page, after, to_pages=True)

    def scatter(self, segments: Segments, page: int, after: Sequence[Any]) -> Copy:
        """See BlockCopier."""
        return self._start(self._scatters, segments, page, after, to_pages=False)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """See BlockCopier. Staging memory is pinned meanwhile.

        Whatever calls the driver is made here, in the thread that may call it beside captures.
        """
        address = self._staging.address
        with self._accelerator.current():
            self._make_streams()
            is_pinned = self._accelerator.pin(address, len(self._staging.window))
            if not is_pinned:
                log.info("staging memory is not pinned for %s: slower", self._accelerator.kind)
            try:
                yield
            finally:
                if is_pinned:
                    self._accelerator.unpin(address)

    def _make_streams(self) -> None:
        """Make a stream for each direction and, if fragments need one, its buffer."""
        self._gathers, self._scatters = (self._accelerator.new_stream() for _ in range(2))
        if self._swap is not None:
            return
        pages = self._pages
        buffer_pages = max(BUFFER_BYTES // pages.page_bytes, pages.layout.blocks_per_chunk)
        shape = buffer_pages, pages.page_bytes
        for stream in (self._gathers, self._scatters):
            # Allocate on the stream that uses them: torch's allocator hands memory on in the order
            # of one stream, before another stream's work on it has finished.
            with stream:
                self._buffers[id(stream)] = (
                    torch.empty(shape, dtype=torch.uint8, device=self._device),
                    torch.empty(buffer_pages, dtype=torch.int64, device=self._device),
                )

    def close(self) -> None:
        """See BlockCopier."""
        self._views = []
        self._buffers = {}

    def _start(
        self, stream: Stream, segments: Segments, page: int, after: Sequence[Any], *, to_pages: bool
    ) -> Copy:
        """Put a copy on the stream.

        If that fails half way, wait until what is on the stream has finished, and raise: nothing
        of a failed copy writes later.
        """
        try:
            with torch.inference_mode(), stream:
                for event in after:
                    stream.wait_event(event)
                at = self._staging.position(page)
                for group, ids in segments:
                    if self._swap is not None:
                        self._swap_blocks(self._swap, group, ids, at, to_pages=to_pages)
                    else:
                        self._index_blocks(stream, group, ids, at, to_pages=to_pages)
                    at += len(ids)
                done = self._accelerator.new_event()
                done.record(stream)
        except BaseException:
            with contextlib.suppress(Exception):  # the device is lost: nothing runs there
                stream.synchronize()
            raise
        return _DeviceCopy(done)

    def _index_blocks(
        self, stream: Stream, group: int, ids: Ints, at: int, *, to_pages: bool
    ) -> None:
        """Copy through the stream's buffer, as much as fits at a time."""
        buffer, device_ids = self._buffers[id(stream)]
        self._host_ids[at : at + len(ids)] = torch.from_numpy(ids)
        for begin in range(0, len(ids), len(buffer)):
            count = min(len(buffer), len(ids) - begin)
            part = slice(at + begin, at + begin + count)
            some_ids, rows = device_ids[:count], buffer[:count]
            some_ids.copy_(self._host_ids[part], non_blocking=True)
            if not to_pages:
                rows.copy_(self._host_pages[part], non_blocking=True)
            for view, offset in zip(self._views[group], self._offsets[group], strict=True):
                columns = rows[:, offset : offset + view.shape[1] * view.element_size()]
                columns = columns.view(view.dtype)
                if to_pages:
                    torch.index_select(view, 0, some_ids, out=columns)
                else:
                    view.index_copy_(0, some_ids, columns)
            if to_pages:
                self._host_pages[part].copy_(rows, non_blocking=True)

    def _swap_blocks(
        self, swap: Callable[..., None], group: int, ids: Ints, at: int, *, to_pages: bool
    ) -> None:
        """Copy all fragments by their addresses, in one call."""
        positions = np.arange(at, at + len(ids)) * self._pages.page_bytes + self._staging.address
        device, host, sizes = [], [], []
        for view, offset in zip(self._views[group], self._offsets[group], strict=True):
            device.append(ids * view.stride(0) * view.element_size() + view.data_ptr())
            host.append(positions + offset)
            sizes.append(np.full(len(ids), view.shape[1] * view.element_size(), np.int64))
        sides = [device, host] if to_pages else [host, device]
        dtype = torch.uint64 if self._accelerator.kind == "XPU" else torch.int64
        columns = [torch.from_numpy(np.concatenate(side)).to(dtype) for side in (*sides, sizes)]
        swap(*columns)


def swap_blocks_batch() -> Callable[..., None] | None:
    """Return vLLM's function that copies many fragments in one call; None: it is not loaded."""
    try:
        operation: Callable[..., None] = torch.ops._C_cache_ops.swap_blocks_batch  # noqa: SLF001  # vLLM's name
    except (AttributeError, RuntimeError):
        return None
    return operation


def _rows(
    storages: Sequence[Any],
    layout: RankLayout,
    refs: tuple[TensorRef, TensorRef],
    pages: StagingLayout,
) -> torch.Tensor:
    """Return a ref's bytes of each block as [blocks, items], of 8-byte items where possible.

    Args:
        storages: the engine's.
        layout: of the engine's memory.
        refs: the engine's, and that of the pages.
        pages: whose places must allow 8-byte items too.
    """
    ref, staged = refs
    tensor, nbytes = layout.tensors[ref.tensor], ref.page_bytes
    storage = storages[tensor.storage]
    offset = pages.layout.tensors[staged.tensor].offset
    steps = (tensor.offset, nbytes, tensor.block_stride, offset, pages.page_bytes)
    width = 1 if any(step % 8 for step in steps) else 8
    dtype = torch.int64 if width == 8 else torch.uint8
    return torch.empty(0, dtype=dtype, device=storage.device).set_(
        storage,
        tensor.offset // width,
        (layout.num_blocks, nbytes // width),
        (tensor.block_stride // width, 1),
    )
