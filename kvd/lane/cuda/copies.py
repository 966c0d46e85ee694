"""A job's runs by address, and the ways to copy those of a piece.

Runs are columns of addresses, computed once a job. Most jobs have the same runs in every layer:
then a column is one addition, and each check of runs is made for all layers together.

One `cuMemcpyBatchAsync` copies a piece; below driver 12.8 each run is one call. The copy engines
move the bytes and do not disturb computing. The driver's functions are called by their addresses:
the bindings take lists of objects, which for a piece of 500 runs cost more than the copy.

Sources of stores are read in stream order only: the engine may reuse its blocks once the event
after the copies is reached, and reads ahead of the stream could see what it has not computed yet.
Sources of loads may be read at any time: the pool does not change while the chunk is leased.
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

    Row HOST: the device's address in the pool, which may differ from this process's. Row DEVICE:
    the address in the worker's memory. Row NBYTES: the length.
    """

    __slots__ = ("_row_addresses", "table")

    def __init__(self, table: Addresses) -> None:
        self.table = table
        # Twice as fast as `ctypes.data`, which makes an object.
        (first, _), row = table.__array_interface__["data"], table.strides[0]
        self._row_addresses = (first, first + row, first + 2 * row)

    def pointers(self, run: int) -> tuple[int, int, int]:
        """Return the address of a run's number in each row."""
        host, device, sizes = self._row_addresses
        offset = _WORD * run
        return host + offset, device + offset, sizes + offset

    @property
    def all(self) -> "RunSlice":
        """All runs."""
        return RunSlice(self, 0, self.table.shape[1])


@dataclass(frozen=True, slots=True)
class RunSlice:
    """Runs begin..end - 1 of these columns."""

    columns: Columns
    begin: int
    end: int

    @property
    def table(self) -> Addresses:
        """Its part of the table: uint64[3, runs]."""
        return self.columns.table[:, self.begin : self.end]

    def pointers(self) -> tuple[int, int, int]:
        """Return the address of the first run's number in each row."""
        return self.columns.pointers(self.begin)

    def __len__(self) -> int:
        return self.end - self.begin


class CudaRuns(PreparedRuns):
    """Runs by address, none across two registrations of the pool."""

    __slots__ = ("columns",)

    def __init__(self, ends: Ends, table: Ints) -> None:
        super().__init__(ends)
        self.columns = Columns(table.view(np.uint64))


class PoolSide(NamedTuple):
    """A job's arena, by the device's addresses.

    base: offset of the arena in the pool.
    registration_bytes: size of one registration of the pool.
    address_bases: uint64[registrations], the device's address of a byte minus its offset in the
        pool.
    """

    base: int
    registration_bytes: int
    address_bases: Addresses


def prepare(copies: Copies, pool: PoolSide, storages: Addresses, max_bytes: int) -> CudaRuns:
    """Return a job's runs by address, of at most `max_bytes` each.

    `storages` has the addresses of the worker's storages: uint64[storages]. The runs' bytes in the
    pool must be pinned.
    """
    starts = storages.view(np.int64)
    runs = None
    if len(copies.grids) == 1:
        runs = _from_grid(copies.grids[0], pool, starts, max_bytes)
    elif copies.few:
        runs = _from_few(copies.runs, pool, starts, max_bytes)
    if runs:
        return runs
    cut = copies.shorten(max_bytes).split(pool.registration_bytes, pool.base)
    return _from_columns(cut, pool, starts)


def _from_grid(grid: Grid, pool: PoolSide, storages: Ints, max_bytes: int) -> CudaRuns | None:
    """Return the runs of equal regions, by adding each region's start to the runs' offsets.

    None if a run may have to be cut.
    """
    regions, nbytes = grid.regions, grid.nbytes
    addresses = grid.arena + (pool.base + regions.first)  # in the pool, until a base is added
    first_registration = addresses // pool.registration_bytes
    last_registration = addresses + nbytes
    last_registration += regions.last - regions.first - 1
    last_registration //= pool.registration_bytes
    # Comparing bytes is fastest for short arrays.
    if grid.longest > max_bytes or last_registration.tobytes() != first_registration.tobytes():
        return None
    table = np.empty((3, len(regions.start), len(nbytes)), np.int64)
    addresses += pool.address_bases[first_registration].view(np.int64)
    addresses -= regions.first
    np.add(regions.start[:, np.newaxis], addresses, out=table[HOST])
    starts = storages[regions.storage] + regions.offset
    np.add(starts[:, np.newaxis], grid.memory, out=table[DEVICE])
    table[NBYTES] = nbytes
    return CudaRuns(table[NBYTES].cumsum(), table.reshape(3, -1))


def _from_few(
    runs: Sequence[Run], pool: PoolSide, storages: Ints, max_bytes: int
) -> CudaRuns | None:
    """Return a few runs, computed one by one; None if a run must be cut."""
    host, device, sizes = [], [], []
    for storage, offset, arena, nbytes in runs:
        registration, offset_inside = divmod(pool.base + arena, pool.registration_bytes)
        if nbytes > max_bytes or offset_inside + nbytes > pool.registration_bytes:
            return None
        host.append((pool.base + arena + int(pool.address_bases[registration])) % 2**64)
        device.append(int(storages[storage]) + offset)
        sizes.append(nbytes)
    table = np.array([host, device, sizes], np.uint64).view(np.int64)
    return CudaRuns(list(accumulate(sizes)), table)


def _from_columns(copies: Copies, pool: PoolSide, storages: Ints) -> CudaRuns:
    storage, offset, arena, nbytes = copies.columns
    table = np.empty((3, len(nbytes)), np.int64)
    np.add(arena, pool.base, out=table[HOST])
    table[HOST] += pool.address_bases[table[HOST] // pool.registration_bytes].view(np.int64)
    np.add(storages[storage], offset, out=table[DEVICE])
    table[NBYTES] = nbytes
    return CudaRuns(nbytes.cumsum(), table)


# Forms of cuMemcpyBatchAsync: the version that introduced it, and whether it returns the index of a
# wrong copy. A driver has the forms that are not newer than itself.
_BATCH_FORMS = ((13000, False), (12080, True))
_TRIAL_BYTES = 2**16
_TRIAL_RUN_BYTES = 1000


class BatchCopy:
    """Copies by `cuMemcpyBatchAsync`, called with columns in memory.

    Args:
        overlap: request CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE: copy by the copy engines, not
            by kernels, which would compete with the engine's. Drivers that do not know the flag
            refuse the first batch.

    Attributes:
        overlap: as requested.
        returns_index: whether this driver's form returns the index of a wrong copy.

    Raises:
        CudaDriverError: this driver lacks the function.
    """

    def __init__(self, *, overlap: bool) -> None:
        driver_version = version()
        # Request a form that the driver has: for a newer one it could return an older form.
        form = next((form for form in _BATCH_FORMS if form[0] <= driver_version), None)
        if form is None:
            attempted = "looking up the driver function cuMemcpyBatchAsync"
            raise CudaDriverError(
                -1, f"not in a driver for CUDA {version_text(driver_version)}", attempted
            )
        since, self.returns_index = form
        self.overlap = overlap
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._function = ctypes.CFUNCTYPE(
            ctypes.c_int,
            *(pointer, pointer, pointer, size),  # targets, sources, sizes, count
            *(pointer, pointer, size),  # attributes, first indices, their number
            *((pointer,) if self.returns_index else ()),
            pointer,  # stream
        )(_address_of("cuMemcpyBatchAsync", since))
        self._attributes = [_copy_attributes(order, overlap=overlap) for order in ("STREAM", "ANY")]
        # The attributes hold from copy 0 on. The driver reads `_first_copy`, writes `_wrong_copy`.
        self._first_copy, self._wrong_copy = ctypes.c_size_t(0), ctypes.c_size_t(0)
        first = ctypes.addressof(self._first_copy)
        wrong_copy = (ctypes.addressof(self._wrong_copy),) if self.returns_index else ()
        # The arguments after the number of copies, indexed by `source_in_any_order`.
        self._trailing = [
            (attribute.getPtr(), first, 1, *wrong_copy) for attribute in self._attributes
        ]

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
        """Enqueue `count` copies, at least one, which may run in any order.

        `targets`, `sources` and `sizes` are the addresses of uint64[count] each: addresses that the
        device knows, and bytes. With `source_in_any_order`, sources may be read at any time until
        the copies have ended; otherwise only when the stream reaches them.

        Raises:
            CudaDriverError: some may have been enqueued.
        """
        trailing = self._trailing[source_in_any_order]
        # Handles of the bindings are numbers.
        code = self._function(targets, sources, sizes, count, *trailing, int(stream))  # type: ignore[call-overload]
        if code:
            check(code, f"enqueueing {count} copies")

    def copy(self, runs: RunSlice, direction: Direction, stream: Stream) -> None:
        """Enqueue copies of runs, at least one.

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
    """Copies by one `cuMemcpyAsync` a run; sources are read when the stream reaches them.

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


def choose_copier(stream: Stream) -> Copier:
    """Return the first copier that works: batches by the copy engines, batches, single copies.

    Batches are tried with a few bytes in both directions on `stream`, for which this waits.

    Raises:
        CudaDriverError: there is no memory for the trial, or this driver has no way to copy.
    """
    reason = ""
    with Undo() as undo:
        trial = _Trial(undo)
        for overlap in (True, False):
            try:
                copier = BatchCopy(overlap=overlap)
                trial.run(copier, stream)
            except CudaDriverError as error:
                driver.wait_for_stream(stream)  # some of the copies may have been enqueued
                reason = str(error)
            else:
                return copier
    _log.info("copies are enqueued one by one: %s", reason)
    return SingleCopies()


class _Trial:
    """Pinned host memory and device memory of the same size, for two copies in each direction."""

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
    """Return the address of a driver function, in the form that a version introduced."""
    attempted = f"looking up the driver function {name}"
    flags = bindings().CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT
    address, status = call(attempted, "cuGetProcAddress", name.encode(), since, flags)
    if not int(address):
        raise CudaDriverError(-1, f"not in this driver ({status.name})", attempted)
    return int(address)


def _copy_attributes(source_order: str, *, overlap: bool) -> Any:
    """Return CUmemcpyAttributes.

    Args:
        source_order: "STREAM": sources are read in the stream's order; "ANY": at any time.
        overlap: prefer copy engines.
    """
    cuda = bindings()
    attributes = cuda.CUmemcpyAttributes()
    attributes.srcAccessOrder = getattr(
        cuda.CUmemcpySrcAccessOrder, f"CU_MEMCPY_SRC_ACCESS_ORDER_{source_order}"
    )
    attributes.flags = int(
        overlap and cuda.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
    )
    return attributes
