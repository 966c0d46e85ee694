"""The pool's file on tmpfs, which lanes map and clients never see.

Behind the chunks' bytes it has a trailer in pages of its own (`kvd.cache.recovery`), which only the
broker maps. It is in memory before anything else is, so no write to it can fail later.

Its pages are allocated by a thread of its own, so that a full /dev/shm is an error message
at start and not a SIGBUS under load, and so that the broker answers meanwhile. What becomes
of it when the daemon ends is the business of `kvd.server.persistent_pool`.

Pages are asked for on the nodes of the GPUs that this machine or container has. Where an engine
decides the pool's size, each rank's arena goes to the node of the rank's GPU. Where the size is
fixed no rank is known yet: the pool is cut into as many equal parts as there are GPUs, and each
goes to the node of its GPU, in order of bus ids. So an engine that has all GPUs in this order
finds each arena near.
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
from kvd.errors import PoolError
from kvd.machine import numa
from kvd.machine.memory import TRAILER_BYTES, Filesystem, PoolLimits, allocated_bytes
from kvd.machine.numa import GpuNode, Node
from kvd.machine.process import is_out_of_files, open_files_remedy
from kvd.pool.geometry import FillOrder
from kvd.server.state_files import remove_tree
from kvd_proto.capacity import pinning_lanes, size_pool
from kvd_proto.text import format_size

_STEP = 16 * 2**20
_FAR = 0.05  # of the pool; less may be a sample's error


def shortage_remedy(error: OSError) -> str:
    """Return what to do where a file cannot be opened or mapped, for the end of an error."""
    if is_out_of_files(error):
        return f"; {open_files_remedy()}"
    return "; free memory" if error.errno == errno.ENOMEM else ""


@dataclass(frozen=True, slots=True)
class PoolRange:
    """Bytes begin..end - 1 of the pool, and the node that they are to lie on, if any."""

    begin: int
    end: int
    node: Node | None


def pool_ranges(
    nbytes: int, filesystem: Filesystem, gpus: Sequence[GpuNode], engine: OpenPool | None
) -> list[PoolRange]:
    """Return the parts of a pool, in order; one without a node where no GPU's is known.

    Args:
        nbytes: of chunks.
        filesystem: that the pool is on: parts are whole pages.
        gpus: in order of their bus ids.
        engine: that decides the pool's size. Its arenas are the parts, unless a rank's GPU is not
            among `gpus` or the ranks share one arena.
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
        ends = [nbytes * (number + 1) // len(gpus) for number in range(len(gpus))]
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
        path: where it lies; a file that is there is used with what it holds. A larger one keeps
            its size until `settle`.
        nbytes: of chunks; they take whole pages.
        anew: remove what is there, once it is known that the pool fits.
        engine: that decides the pool's size; None where it is fixed.

    Attributes:
        nbytes: of the pages with chunks, where the trailer begins.
        file_bytes: of the file, with the trailer.
        fresh: no memory was there.
        place: on which nodes it lies, once that is known; None where there is one node.

    Raises:
        PoolError: it cannot be made, with the figures.
    """

    def __init__(
        self, path: Path, nbytes: int, *, anew: bool = False, engine: OpenPool | None = None
    ) -> None:
        self.path = path
        self.allocated = 0  # bytes in the order of filling
        self.error = ""
        self.place: LogEvent | None = None
        try:
            filesystem = Filesystem.of(path.parent)
            self.nbytes = filesystem.whole_pages(nbytes)
            trailer_bytes = filesystem.whole_pages(TRAILER_BYTES)
            self.file_bytes = self.nbytes + trailer_bytes
            self._step = max(_STEP, filesystem.page_bytes)
            self.fill = FillOrder.of(self.nbytes, filesystem.page_bytes)
            lanes = pinning_lanes(engine.layouts, engine.devices) if engine is not None else None
            if shortage := PoolLimits.of(path.parent, allocated_bytes(path), lanes).shortage(
                nbytes
            ):
                raise PoolError(str(shortage))
            gpus = numa.gpu_nodes(os.sched_getaffinity(0))
            self._parts = pool_ranges(nbytes, filesystem, gpus, engine)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            if anew:
                remove_tree(path)
                flags |= os.O_EXCL
            self.fd = os.open(path, flags, 0o600)
            with contextlib.ExitStack() as undo:
                undo.callback(os.close, self.fd)
                status = os.fstat(self.fd)
                held, size = status.st_blocks * 512, status.st_size
                self.fresh = not held
                if self.fresh:
                    undo.callback(path.unlink)
                else:
                    undo.callback(os.ftruncate, self.fd, size)
                os.ftruncate(self.fd, max(self.file_bytes, size))
                if held >= max(self.file_bytes, size):
                    self.allocated = self.nbytes
                else:
                    os.posix_fallocate(self.fd, self.nbytes, trailer_bytes)
                undo.pop_all()
        except OSError as error:
            raise PoolError(f"{path}: the pool cannot be made: {error.strerror}") from error
        self._size_before: int | None = size
        # Lanes touch what is allocated, and count it; where some of it is there already and
        # some is not, only a whole pool is safe to touch.
        self._patchy = not self.fresh and not self.allocated
        self._exclusive = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def map_trailer(self) -> mmap.mmap:
        """Map the trailer.

        Raises:
            PoolError: it cannot be mapped now.
        """
        return self._map_trailer(self.nbytes)

    def clear_trailer(self, offset: int) -> None:
        """Clear the header of an older pool's trailer: no manifest of that pool is believed again.

        The header is what a daemon looks for; its page is in memory, so the store cannot fail.

        Raises:
            PoolError: it cannot be mapped now, and nothing is changed.
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
        """Start the thread that allocates; it calls `wake` after every piece and at its end."""
        self._thread = threading.Thread(
            target=self._allocate, args=(wake,), name="kvd-pool", daemon=True
        )
        self._thread.start()

    @property
    def may_be_written(self) -> bool:
        """Whether lanes may start: no lane of a dead daemon can still write here.

        Every lane holds a lock on the pool's file for as long as anything of it can move bytes.
        """
        if not self._exclusive:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            fcntl.flock(self.fd, fcntl.LOCK_UN)
            self._exclusive = True
        return self.ready or not self._patchy

    def _allocate(self, wake: Callable[[], object]) -> None:
        try:
            for piece in self.fill.order if self.allocated < self.nbytes else ():
                begin, end = self.fill.span(piece)
                start = begin
                while start < end:
                    if self._stop.is_set():
                        return
                    part = next(part for part in self._parts if start < part.end)
                    stop = min(start + self._step, end, part.end)
                    if part.node is not None:
                        numa.run_on(part.node)
                    os.posix_fallocate(self.fd, start, stop - start)
                    start = stop
                self.allocated += end - begin
                wake()
        except OSError as error:
            self.error = (
                f"{self.path}: {error.strerror} after {format_size(self.allocated)} of"
                f" {format_size(self.nbytes)}; choose a smaller --cpu-bytes"
            )
        wake()
        if self.ready and numa.number_of_nodes() > 1:
            self.place = self._where()
            wake()

    def _where(self) -> LogEvent:
        """On which nodes the pool lies, and what to do where its parts lie far from their GPUs."""
        bytes_on: dict[int, float] = defaultdict(float)  # by node
        far_bytes = 0.0
        for part in self._parts:
            part_bytes = part.end - part.begin
            for node, share in numa.shares_of(self.fd, part.begin, part.end).items():
                bytes_on[node] += share * part_bytes
                if part.node is not None and node != part.node.number:
                    far_bytes += share * part_bytes
        shares = {node: nbytes / self.nbytes for node, nbytes in sorted(bytes_on.items())}
        text = f"the pool's memory: {numa.described(shares) or 'its nodes are not known'}"
        if far_bytes <= _FAR * self.nbytes:
            return LogEvent(text)
        return LogEvent(
            f"{text}; {100 * far_bytes / self.nbytes:.0f} % of it is on another node than the GPU"
            " that it is for, and copies from there are slower: choose a smaller --cpu-bytes or end"
            " what fills the node, then kvd purge, for a pool that is kept stays where it is",
            "warning",
        )

    @property
    def ready(self) -> bool:
        """Whether every page is allocated."""
        return self.allocated >= self.nbytes and not self.error

    def settle(self) -> None:
        """Cut the file to the size of this pool."""
        os.ftruncate(self.fd, self.file_bytes)
        self._size_before = None

    def close(self) -> None:
        """Stop allocating and close the file; without `settle` it gets its old size again."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._size_before is not None:
            os.ftruncate(self.fd, self._size_before)
        os.close(self.fd)
