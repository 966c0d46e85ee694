"""A job's runs as the driver takes them, and how those of a piece are copied.

Runs are columns of addresses, made once a job. Most jobs have the same runs in every layer. Then a
column is one addition for all of it, and what must hold of every run is asked for all layers
together.

A piece's runs are copied by one `cuMemcpyBatchAsync`, or below driver 12.8 one by one. The copy
engines move the bytes and disturb no computing. The driver's functions are called by their
addresses: the bindings take lists of objects, which for a piece of 500 runs cost more than the
copy.

Sources of stores are read in stream order only: the engine may reuse its blocks as soon as the
event after the copies is reached, and reads ahead of the stream could see what it has not computed
yet. Sources of loads lie in the pool, which does not change while the chunk is leased; they may be
read at any time.
"""

import ctypes
import logging
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvd.errors import CudaDriverError
from kvd.lane.cuda import driver
from kvd.lane.cuda.driver import Addresses, Stream
from kvd.lane.device import Direction, Ends, PreparedRuns
from kvd.machine.cuda import Undo, bindings, call, check, version, version_text
from kvd_proto.copies import Copies, Grid, Run

_log = logging.getLogger(__name__)
Ints = npt.NDArray[np.int64]

HOST, DEVICE, NBYTES = range(3)
_WORD = 8


class Columns:
    """Runs by address: uint64[3, runs], each row contiguous.

    Row HOST: the pool's side, where the device finds it, which need not be where this process
    does. Row DEVICE: the worker's side. Row NBYTES: the length.
    """

    __slots__ = ("_begins", "table")

    def __init__(self, table: Addresses) -> None:
        self.table = table
        # Half as long as by `ctypes.data`, which makes an object.
        (first, _), row = table.__array_interface__["data"], table.strides[0]
        self._begins = (first, first + row, first + 2 * row)

    def pointers(self, run: int) -> tuple[int, int, int]:
        """Where the numbers of a run and of those behind it lie, by row."""
        host, device, nbytes = self._begins
        skip = _WORD * run
        return host + skip, device + skip, nbytes + skip

    @property
    def all(self) -> "RunSlice":
        """All of them."""
        return RunSlice(self, 0, self.table.shape[1])


@dataclass(frozen=True, slots=True)
class RunSlice:
    """Runs begin..end - 1 of these columns."""

    columns: Columns
    begin: int
    end: int

    @property
    def table(self) -> Addresses:
        """Their part of the table: uint64[3, runs]."""
        return self.columns.table[:, self.begin : self.end]

    def pointers(self) -> tuple[int, int, int]:
        """Where their numbers begin, by row."""
        return self.columns.pointers(self.begin)

    def __len__(self) -> int:
        return self.end - self.begin


class CudaRuns(PreparedRuns):
    """Runs by address, none across two registrations of the pool.

    ends: see Moves.
    columns: see Columns.
    """

    __slots__ = ("columns",)

    def __init__(self, ends: Ends, table: Ints) -> None:
        super().__init__(ends)
        self.columns = Columns(table.view(np.uint64))


class PoolSide(NamedTuple):
    """Where a job's arena lies, as the device finds it.

    base: where the arena begins in the pool.
    unit: bytes of one registration of the pool.
    where: uint64[registrations], what to add to an offset in the pool for an address.
    """

    base: int
    unit: int
    where: Addresses


def prepare(copies: Copies, pool: PoolSide, storages: Addresses, longest: int) -> CudaRuns:
    """Turn runs into addresses; what they touch of the pool is pinned.

    Args:
        copies: a job's runs.
        pool: see PoolSide.
        storages: uint64[storages], where the worker's storages begin.
        longest: bytes of a run, at most.
    """
    starts = storages.view(np.int64)
    moves = None
    if len(copies.grids) == 1:
        moves = _of_grid(copies.grids[0], pool, starts, longest)
    elif copies.few:
        moves = _of_few(copies.runs, pool, starts, longest)
    return moves or _of_columns(copies.shorten(longest).split(pool.unit, pool.base), pool, starts)


def _of_grid(grid: Grid, pool: PoolSide, storages: Ints, longest: int) -> CudaRuns | None:
    """The same runs in each region: additions of what differs by region to what differs by run.

    None if one run may have to be cut.
    """
    regions, nbytes = grid.regions, grid.nbytes
    begin = grid.arena + (pool.base + regions.first)
    registration = begin // pool.unit
    end = begin + nbytes
    end += regions.last - regions.first - 1
    end //= pool.unit
    # Of short arrays, bytes are compared fastest.
    if grid.longest > longest or end.tobytes() != registration.tobytes():
        return None
    count, runs = len(regions.start), len(nbytes)
    table = np.empty((3, count, runs), np.int64)
    begin += pool.where[registration].view(np.int64)
    begin -= regions.first
    np.add(regions.start[:, np.newaxis], begin, out=table[HOST])
    starts = storages[regions.storage] + regions.offset
    np.add(starts[:, np.newaxis], grid.memory, out=table[DEVICE])
    table[NBYTES] = nbytes
    return CudaRuns(table[NBYTES].cumsum(), table.reshape(3, -1))


def _of_few(runs: Sequence[Run], pool: PoolSide, storages: Ints, longest: int) -> CudaRuns | None:
    """One by one; None if one run must be cut."""
    host, device, sizes = [], [], []
    for storage, offset, arena, nbytes in runs:
        number, inside = divmod(pool.base + arena, pool.unit)
        if nbytes > longest or inside + nbytes > pool.unit:
            return None
        host.append((pool.base + arena + int(pool.where[number])) % 2**64)
        device.append(int(storages[storage]) + offset)
        sizes.append(nbytes)
    table = np.array([host, device, sizes], np.uint64).view(np.int64)
    return CudaRuns(list(accumulate(sizes)), table)


def _of_columns(copies: Copies, pool: PoolSide, storages: Ints) -> CudaRuns:
    storage, offset, arena, nbytes = copies.columns
    table = np.empty((3, len(nbytes)), np.int64)
    np.add(arena, pool.base, out=table[HOST])
    table[HOST] += pool.where[table[HOST] // pool.unit].view(np.int64)
    np.add(storages[storage], offset, out=table[DEVICE])
    table[NBYTES] = nbytes
    return CudaRuns(nbytes.cumsum(), table)


# Forms of cuMemcpyBatchAsync: the version that brought one, and whether that also tells which copy
# was wrong. A driver has those that are not newer than itself.
_BATCH_FORMS = ((13000, False), (12080, True))
_TRIAL_BYTES = 2**16
_TRIAL_RUN_BYTES = 1000


class BatchCopy:
    """`cuMemcpyBatchAsync`, called with columns of numbers as they lie in memory.

    Args:
        overlap: request CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE: the copy engines, where the
            driver might copy by kernels, which take the device from those who compute. Drivers
            that do not know the flag refuse the first batch.

    Attributes:
        overlap: as requested.
        tells_index: whether this driver's form tells which copy was wrong.

    Raises:
        CudaDriverError: this driver lacks the function.
    """

    def __init__(self, *, overlap: bool) -> None:
        have = version()
        # The newest that the driver has: asked for a newer one, it could answer with an older form.
        form = next((form for form in _BATCH_FORMS if form[0] <= have), None)
        if form is None:
            attempted = "looking for cuMemcpyBatchAsync"
            raise CudaDriverError(-1, f"not in a driver for CUDA {version_text(have)}", attempted)
        since, self.tells_index = form
        self.overlap = overlap
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._function = ctypes.CFUNCTYPE(
            ctypes.c_int,
            *(pointer, pointer, pointer, size),  # targets, sources, sizes, count
            *(pointer, pointer, size),  # attributes, first indices, their number
            *((pointer,) if self.tells_index else ()),
            pointer,  # stream
        )(_address_of("cuMemcpyBatchAsync", since))
        self._attributes = [_attributes(order, overlap=overlap) for order in ("STREAM", "ANY")]
        # The attributes count from copy 0 on. The driver reads `_first`, and writes `_wrong`.
        self._first, self._wrong = ctypes.c_size_t(0), ctypes.c_size_t(0)
        first = ctypes.addressof(self._first)
        ends = (ctypes.addressof(self._wrong),) if self.tells_index else ()
        # By whether the order is any: what follows the number of copies.
        self._rest = [(one.getPtr(), first, 1, *ends) for one in self._attributes]

    def enqueue(
        self,
        targets: int,
        sources: int,
        sizes: int,
        count: int,
        stream: Stream,
        *,
        source_in_any_order: bool,
    ) -> None:
        """Enqueue copies, in any order among themselves.

        Args:
            targets: where uint64[count] lie, each an address as the device knows it.
            sources: the same.
            sizes: the same, in bytes.
            count: of copies, at least one.
            stream: where.
            source_in_any_order: sources may be read at any time until the copies have ended;
                otherwise not before the stream gets there.

        Raises:
            CudaDriverError: some may have been enqueued.
        """
        rest = self._rest[source_in_any_order]
        # The bindings' handles are numbers.
        code = self._function(targets, sources, sizes, count, *rest, int(stream))  # type: ignore[call-overload]
        if code:
            check(code, f"enqueueing {count} copies")

    def copy(self, runs: RunSlice, direction: Direction, stream: Stream) -> None:
        """Enqueue runs, one at least.

        Raises:
            CudaDriverError: some may have been enqueued.
        """
        host, device, sizes = runs.pointers()
        load = direction is Direction.LOAD
        target, source = (device, host) if load else (host, device)
        self.enqueue(target, source, sizes, len(runs), stream, source_in_any_order=load)

    def __repr__(self) -> str:
        return f"copies in batches{', by the copy engines only' if self.overlap else ''}"


class SingleCopies:
    """`cuMemcpyAsync`, called for each run; sources are read when the stream gets there.

    Raises:
        CudaDriverError: this driver lacks the function.
    """

    def __init__(self) -> None:
        number = ctypes.c_uint64
        self._function = ctypes.CFUNCTYPE(
            ctypes.c_int, number, number, ctypes.c_size_t, ctypes.c_void_p
        )(_address_of("cuMemcpyAsync", version()))

    def copy(self, runs: RunSlice, direction: Direction, stream: Stream) -> None:
        """See BatchCopy."""
        host, device, sizes = runs.table.tolist()
        targets, sources = (device, host) if direction is Direction.LOAD else (host, device)
        function, handle = self._function, int(stream)  # type: ignore[call-overload]
        for target, source, nbytes in zip(targets, sources, sizes, strict=True):
            code = function(target, source, nbytes, handle)
            if code:
                check(code, "enqueueing a copy")

    def __repr__(self) -> str:
        return "copies one by one"


Copier: TypeAlias = BatchCopy | SingleCopies


def choose(stream: Stream) -> Copier:
    """Return the first way that works: batches by the copy engines, batches, one by one.

    Batches are tried with a few bytes, there and back.

    Args:
        stream: for the trial; this function waits for it.

    Raises:
        CudaDriverError: there is no memory for the trial, or this driver has no way to copy.
    """
    why = ""
    with Undo() as undo:
        trial = _Trial(undo)
        for overlap in (True, False):
            try:
                copier = BatchCopy(overlap=overlap)
                trial.run(copier, stream)
            except CudaDriverError as error:
                driver.wait_for_stream(stream)  # some of the copies may be on their way
                why = str(error)
            else:
                return copier
    _log.info("copies are enqueued one by one: %s", why)
    return SingleCopies()


class _Trial:
    """Pinned host memory and as much device memory, for two copies there and back."""

    def __init__(self, undo: Undo) -> None:
        self._memory = mmap.mmap(-1, _TRIAL_BYTES)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        address = self._bytes.ctypes.data
        driver.register_host(address, _TRIAL_BYTES)
        undo.add(driver.unregister_host, address)
        device = driver.allocate(_TRIAL_BYTES)
        undo.add(driver.free, device)
        self._offsets = np.arange(2, dtype=np.uint64) * np.uint64(_TRIAL_BYTES // 2)
        table = np.empty((3, 2), np.uint64)
        table[HOST] = self._offsets + np.uint64(driver.device_address(address))
        table[DEVICE] = self._offsets + np.uint64(device)
        table[NBYTES] = _TRIAL_RUN_BYTES
        self._runs = Columns(table).all

    def run(self, copier: Copier, stream: Stream) -> None:
        """Load and store a pattern, and wait.

        Raises:
            CudaDriverError: the driver refuses, or moves the wrong bytes.
        """
        expected = np.zeros(_TRIAL_BYTES, np.uint8)
        for begin in self._offsets.tolist():
            expected[begin : begin + _TRIAL_RUN_BYTES] = np.arange(_TRIAL_RUN_BYTES) % 251 + 1
        self._bytes[:] = expected
        copier.copy(self._runs, Direction.LOAD, stream)
        driver.wait_for_stream(stream)
        self._bytes[:] = 0
        copier.copy(self._runs, Direction.STORE, stream)
        driver.wait_for_stream(stream)
        if not np.array_equal(self._bytes, expected):
            raise CudaDriverError(-1, "it moved the wrong bytes", f"trying {copier!r}")


def _address_of(name: str, since: int) -> int:
    """The address of a driver function, in the form that a version brought."""
    attempted = f"looking for {name}"
    flags = bindings().CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT
    address, status = call(attempted, "cuGetProcAddress", name.encode(), since, flags)
    if not int(address):
        raise CudaDriverError(-1, f"not in this driver ({status.name})", attempted)
    return int(address)


def _attributes(order: str, *, overlap: bool) -> Any:
    cuda = bindings()
    attributes = cuda.CUmemcpyAttributes()
    attributes.srcAccessOrder = getattr(
        cuda.CUmemcpySrcAccessOrder, f"CU_MEMCPY_SRC_ACCESS_ORDER_{order}"
    )
    attributes.flags = int(
        overlap and cuda.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
    )
    return attributes
