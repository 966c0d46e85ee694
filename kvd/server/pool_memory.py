"""The pool's file on tmpfs, which lanes and tiers map and clients never see.

Behind the chunks lies a trailer in separate pages (`kvd.cache.recovery`), which only the broker
maps. Its pages are allocated first, so no write to it can fail later.

A thread allocates the other pages, so that a full /dev/shm is an error at the start instead of a
SIGBUS under load, and the broker serves meanwhile. `kvd.server.persistent_pool` decides what
happens to the file when the daemon ends.

Pages are placed on the NUMA nodes of the visible GPUs. If an engine's layouts decide the pool's
size, each rank's arena goes to the node of the rank's GPU. If the size is configured, ranks are
unknown: the pool is cut into one equal range for each GPU, in order of bus ids. An engine that uses
all GPUs in this order has each arena on its GPU's node.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from kvd.broker.effects import LogEvent, OpenPool
from kvd.cache.recovery import TRAILER_HEAD_BYTES
from kvd.errors import MemoryShortage, PoolError
from kvd.machine import numa
from kvd.machine.memory import TRAILER_BYTES, Filesystem, PoolLimits, allocated_bytes
from kvd.machine.numa import GpuNode, Node
from kvd.machine.process import is_out_of_files, open_files_remedy, try_lock
from kvd.pool.geometry import FillOrder
from kvd.server.state_files import remove_tree
from kvd_proto.capacity import pinning_lanes, size_pool
from kvd_proto.text import format_size

_STEP = 16 * 2**20
_MAX_FAR_SHARE = 0.05  # of the pool; a smaller share may be sampling error


def shortage_remedy(error: OSError) -> str:
    """Return the remedy for a file that cannot be opened or mapped, as the end of an error."""
    if is_out_of_files(error):
        return f"; {open_files_remedy()}"
    return "; free memory" if error.errno == errno.ENOMEM else ""


@dataclass(frozen=True, slots=True)
class PoolRange:
    """Bytes begin..end - 1 of the pool, and the NUMA node to place them on; None: any."""

    begin: int
    end: int
    node: Node | None


def pool_ranges(
    nbytes: int, filesystem: Filesystem, gpus: Sequence[GpuNode], engine: OpenPool | None
) -> list[PoolRange]:
    """Return the ranges of a pool, in order; a single one without a node if `gpus` is empty.

    Args:
        nbytes: of chunks.
        filesystem: of the pool; ranges are whole pages of it.
        gpus: in order of their bus ids.
        engine: the engine whose layouts decide the size. The ranges are its arenas, unless a rank's
            GPU is not in `gpus` or the ranks share one arena.
    """
    if not gpus:
        return [PoolRange(0, filesystem.whole_pages(nbytes), None)]
    node_of = {gpu.device: gpu.node for gpu in gpus}
    if (
        engine is not None
        and not engine.layouts[0].replicated
        and node_of.keys() >= set(engine.devices)
    ):
        sizes = size_pool(engine.layouts, nbytes)
        ends = [size * sizes.num_chunks for size in accumulate(sizes.slot_bytes)]
        nodes = [node_of[device] for device in engine.devices]
    else:
        ends = [nbytes * (index + 1) // len(gpus) for index in range(len(gpus))]
        nodes = [gpu.node for gpu in gpus]
    ends = [filesystem.whole_pages(end) for end in (*ends[:-1], nbytes)]
    return [
        PoolRange(begin, end, node)
        for begin, end, node in zip((0, *ends), ends, nodes, strict=False)
        if begin < end
    ]


class PoolMemory:
    """The pool's file.

    Args:
        path: of the file. An existing file is used with its contents; a larger one keeps its size
            until `commit`.
        nbytes: of chunks; rounded up to whole pages.
        create_anew: remove an existing file, once the new pool is known to fit.
        engine: the engine whose layouts decide the size; None if the size is configured.

    Attributes:
        nbytes: of the pages with chunks; the trailer follows.
        file_bytes: of the whole file.
        allocated: bytes of chunks that are allocated, in the order of `fill`.
        error: why the allocation failed; empty if it did not.
        fresh: the file had no memory before.
        placement: an event that names the pool's NUMA nodes, once allocated; None on one node.

    Raises:
        PoolError: the file cannot be created or extended; the text has the sizes.
    """

    def __init__(
        self, path: Path, nbytes: int, *, create_anew: bool = False, engine: OpenPool | None = None
    ) -> None:
        self.path = path
        self.allocated = 0
        self.error = ""
        self.placement: LogEvent | None = None
        try:
            filesystem = Filesystem.of(path.parent)
            self.nbytes = filesystem.whole_pages(nbytes)
            self.file_bytes = self.nbytes + filesystem.whole_pages(TRAILER_BYTES)
            self._step = max(_STEP, filesystem.page_bytes)
            self.fill = FillOrder.of(self.nbytes, filesystem.page_bytes)
            lanes = pinning_lanes(engine.layouts, engine.devices) if engine is not None else None
            limits = PoolLimits.of(path.parent, allocated_bytes(path), lanes)
            if shortage := limits.shortage(nbytes):
                raise MemoryShortage(str(shortage))
            gpus = numa.gpu_nodes(os.sched_getaffinity(0))
            self._ranges = pool_ranges(nbytes, filesystem, gpus, engine)
            self._size_before: int | None = self._open_file(create_anew=create_anew)
        except OSError as error:
            kind = MemoryShortage if error.errno in {errno.ENOSPC, errno.ENOMEM} else PoolError
            raise kind(f"{path}: the pool cannot be created: {error.strerror}") from error
        # Lanes touch the allocated prefix. Which pages of a partly allocated file exist is unknown,
        # so lanes wait until all of it is allocated.
        self._partly_allocated = not self.fresh and not self.allocated
        self._had_exclusive_lock = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def _open_file(self, *, create_anew: bool) -> int:
        """Open and extend the file, and allocate the trailer's pages; return the previous size.

        On an error an existing file is as before. A file that `create_anew` replaces is gone: no
        daemon can use it, and the new one needs its memory.

        Raises:
            OSError: the file cannot be opened or extended.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        if create_anew:
            remove_tree(self.path)
            flags |= os.O_EXCL
        created = not self.path.exists()
        self.fd = os.open(self.path, flags, 0o600)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self.fd)
            status = os.fstat(self.fd)
            allocated, size = status.st_blocks * 512, status.st_size
            self.fresh = not allocated
            if created:
                undo.callback(self.path.unlink)
            else:
                undo.callback(os.ftruncate, self.fd, size)
            os.ftruncate(self.fd, max(self.file_bytes, size))
            if allocated >= max(self.file_bytes, size):
                self.allocated = self.nbytes
            else:
                os.posix_fallocate(self.fd, self.nbytes, self.file_bytes - self.nbytes)
            undo.pop_all()
        return size

    def map_trailer(self) -> mmap.mmap:
        """Map the trailer.

        Raises:
            PoolError: it cannot be mapped now.
        """
        return self._map_trailer(self.nbytes)

    def clear_trailer(self, offset: int) -> None:
        """Clear the header of the previous pool's trailer, so that no daemon accepts its manifest.

        The page was allocated with its pool, so the write cannot fail.

        Raises:
            PoolError: the trailer cannot be mapped now; nothing has changed.
        """
        with self._map_trailer(offset) as mapped:
            mapped[:TRAILER_HEAD_BYTES] = bytes(TRAILER_HEAD_BYTES)

    def _map_trailer(self, offset: int) -> mmap.mmap:
        try:
            return mmap.mmap(self.fd, self.file_bytes - self.nbytes, offset=offset)
        except OSError as error:
            raise PoolError(
                f"{self.path}: the pool's trailer cannot be mapped: {error.strerror}"
                f"{shortage_remedy(error)}"
            ) from error

    def start(self, wake: Callable[[], object]) -> None:
        """Start the allocating thread; it calls `wake` after every piece and at its end."""
        self._thread = threading.Thread(
            target=self._allocate, args=(wake,), name="kvd-pool", daemon=True
        )
        self._thread.start()

    @property
    def may_be_used(self) -> bool:
        """Whether lanes may start: no process of a dead daemon can still write to the pool.

        Each lane and tier holds a shared lock on the file as long as it can write to it. The pool
        is also not used before a partly allocated file is complete.
        """
        if not self._had_exclusive_lock:
            if not try_lock(self.fd):
                return False
            fcntl.flock(self.fd, fcntl.LOCK_UN)
            self._had_exclusive_lock = True
        return self.ready or not self._partly_allocated

    def _allocate(self, wake: Callable[[], object]) -> None:
        """Allocate the pool piece by piece, each range on its NUMA node. Runs in a thread."""
        try:
            for piece in self.fill.order if self.allocated < self.nbytes else ():
                begin, end = self.fill.span(piece)
                start = begin
                while start < end:
                    if self._stop.is_set():
                        return
                    pool_range = next(
                        pool_range for pool_range in self._ranges if start < pool_range.end
                    )
                    end_of_step = min(start + self._step, end, pool_range.end)
                    if pool_range.node is not None:
                        numa.run_on(pool_range.node)
                    os.posix_fallocate(self.fd, start, end_of_step - start)
                    start = end_of_step
                self.allocated += end - begin
                wake()
        except OSError as error:
            self.error = (
                f"{self.path}: {error.strerror} after {format_size(self.allocated)} of"
                f" {format_size(self.nbytes)}; choose a smaller --cpu-bytes"
            )
        wake()
        if self.ready and numa.number_of_nodes() > 1:
            self.placement = self._placement_event()
            wake()

    def _placement_event(self) -> LogEvent:
        """Return an event with the pool's nodes; a warning if ranges are far from their GPUs."""
        bytes_on: dict[int, float] = defaultdict(float)  # by node
        far_bytes = 0.0
        for pool_range in self._ranges:
            range_bytes = pool_range.end - pool_range.begin
            for node, share in numa.node_shares(self.fd, pool_range.begin, pool_range.end).items():
                bytes_on[node] += share * range_bytes
                if pool_range.node is not None and node != pool_range.node.number:
                    far_bytes += share * range_bytes
        shares = {node: nbytes / self.nbytes for node, nbytes in sorted(bytes_on.items())}
        text = f"the pool's memory: {numa.describe_shares(shares) or 'its nodes are unknown'}"
        if far_bytes <= _MAX_FAR_SHARE * self.nbytes:
            return LogEvent(text)
        return LogEvent(
            f"{text}; {100 * far_bytes / self.nbytes:.0f} % of it is on another node than its GPU,"
            " so copies are slower: choose a smaller --cpu-bytes or end the processes that fill the"
            " node, then run kvd purge, since a kept pool is not moved",
            "warning",
        )

    @property
    def ready(self) -> bool:
        """Whether every page is allocated."""
        return self.allocated >= self.nbytes and not self.error

    def commit(self) -> None:
        """Truncate the file to the size of this pool."""
        os.ftruncate(self.fd, self.file_bytes)
        self._size_before = None

    def close(self) -> None:
        """Stop allocating and close the file; without `commit`, restore its previous size."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._size_before is not None:
            os.ftruncate(self.fd, self._size_before)
        os.close(self.fd)
