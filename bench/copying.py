"""The lane's stores and loads beside the best copy of the same pattern in one process.

1,024 blocks of 32 tensors with pages of 16 KiB are moved between random places
in the tensors and random chunks in the pool. The reference moves the same bytes
between the same offsets of two private arrays, with four methods; the fastest
counts. All are measured in turn, in every round.
"""

import ctypes
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from harness import Daemon, Figures, engine_name, fresh_keys, median, wait_found

from kvd_client.memory import HostMemory
from kvd_client.scheduler import Scheduler
from kvd_client.worker import Worker
from kvd_proto.blocks import JobBlocks
from kvd_proto.expand import Copies, Expander
from kvd_proto.layout import GroupSpec, RankLayout, TensorRef, TensorSpec
from kvd_proto.messages import Fingerprint

TENSORS, PAGE, BLOCKS, BLOCKS_PER_CHUNK = 32, 16384, 1024, 4
NUM_BLOCKS = 2 * BLOCKS + 1  # block 0 is the engine's null block
CHUNKS = BLOCKS // BLOCKS_PER_CHUNK
TOTAL = BLOCKS * TENSORS * PAGE
ROUNDS = 9
SECONDS = 60.0

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]


def layout() -> RankLayout:
    """32 tensors in one storage, one group."""
    size = NUM_BLOCKS * PAGE
    return RankLayout(
        num_blocks=NUM_BLOCKS,
        blocks_per_chunk=BLOCKS_PER_CHUNK,
        hash_block_size=16,
        storages=(TENSORS * size,),
        tensors=tuple(
            TensorSpec(storage=0, offset=i * size, page_bytes=PAGE, block_stride=PAGE)
            for i in range(TENSORS)
        ),
        groups=(
            GroupSpec(
                refs=tuple(TensorRef(tensor=i, page_bytes=PAGE) for i in range(TENSORS)),
                block_size=16,
            ),
        ),
    )


def reference_copies(
    tensors: Bytes, arena: Bytes, copies: Copies, *, store: bool
) -> dict[str, Callable[[], None]]:
    """The same pattern in one process, by method; each moves everything once."""
    source, target = (tensors, arena) if store else (arena, tensors)
    from_at, to_at = (
        (copies.tensor_offset, copies.arena_offset)
        if store
        else (copies.arena_offset, copies.tensor_offset)
    )
    runs = list(zip(to_at.tolist(), from_at.tolist(), copies.nbytes.tolist(), strict=True))
    # By pages, for the methods that know arrays only.
    pages = copies.nbytes // PAGE
    step = np.arange(int(pages.sum())) - np.repeat(np.cumsum(pages) - pages, pages)
    to_page = np.repeat(to_at // PAGE, pages) + step
    from_page = np.repeat(from_at // PAGE, pages) + step
    rows_to, rows_from = target.reshape(-1, PAGE), source.reshape(-1, PAGE)
    by_row = list(zip(to_page.tolist(), from_page.tolist(), strict=True))
    parts = list(zip(np.split(to_page, TENSORS), np.split(from_page, TENSORS), strict=True))
    view_to, view_from = memoryview(target.data), memoryview(source.data)
    to_address, from_address = target.ctypes.data, source.ctypes.data

    def slices() -> None:
        for to, start, size in runs:
            view_to[to : to + size] = view_from[start : start + size]

    def memmove() -> None:
        move = ctypes.memmove
        for to, start, size in runs:
            move(to_address + to, from_address + start, size)

    def numpy_rows() -> None:
        for to, start in by_row:
            rows_to[to] = rows_from[start]

    def numpy_indexing() -> None:
        for to, start in parts:
            rows_to[to] = rows_from[start]

    return {
        "slices": slices,
        "memmove": memmove,
        "numpy_rows": numpy_rows,
        "numpy_indexing": numpy_indexing,
    }


def rate(work: Callable[[], None]) -> float:
    """GB/s (1e9 bytes) of something that moves TOTAL bytes once."""
    started = time.perf_counter()
    work()
    return TOTAL / (time.perf_counter() - started) / 1e9


class Engine:
    """One rank and its scheduler in this process, with CHUNKS chunks in flight at a time."""

    def __init__(self, daemon: Daemon) -> None:
        name = engine_name()
        self.layout = layout()
        self.memory = HostMemory.allocate(self.layout.storages[0])
        self.worker = Worker(daemon.runtime_dir, name, 0, 1)
        self.worker.register(
            [self.memory], self.layout, Fingerprint(model="bench-copying"), required=True
        )
        self.scheduler = Scheduler(daemon.runtime_dir, name)
        if not self.worker.wait_attached(SECONDS) or not self.scheduler.wait_attached(SECONDS):
            raise RuntimeError("the engine does not become complete")
        self._job = 0

    def store(self, blocks: Ints, order: Ints) -> tuple[list[bytes], float]:
        """Store these blocks under new keys, chunks in this order: the keys, GB/s."""
        keys = fresh_keys(CHUNKS)
        ticket = self.scheduler.prepare_store(keys)
        if len(ticket) != CHUNKS:
            raise RuntimeError(f"{ticket!r}: all keys are needed")
        slots, generations = ticket.slots[order], ticket.generations[order]
        gbps = rate(lambda: self._run(self.worker.submit_store, blocks, slots, generations))
        self.scheduler.complete_store(keys)
        wait_found(self.scheduler, keys)
        return [keys[i] for i in order.tolist()], gbps

    def load(self, keys: list[bytes], blocks: Ints) -> tuple[Ints, float]:
        """Load these chunks into these blocks: the slots that they were in, GB/s."""
        ticket = self.scheduler.prepare_load(keys)
        if len(ticket) != CHUNKS:
            raise RuntimeError(f"{ticket!r}: all keys are needed")
        gbps = rate(
            lambda: self._run(self.worker.submit_load, blocks, ticket.slots, ticket.generations)
        )
        self.scheduler.complete_load(ticket)
        return ticket.slots, gbps

    def _run(
        self, submit: Callable[..., bool], blocks: Ints, slots: Ints, generations: Ints
    ) -> None:
        self._job += 1
        submit(self._job, blocks, [BLOCKS], [0], slots, generations)
        self.worker.wait([self._job], SECONDS)
        (result,) = self.worker.get_finished()
        if not result.success or result.bytes != TOTAL:
            raise RuntimeError(f"the job failed: {result}")

    def close(self) -> None:
        """End both sessions."""
        self.scheduler.close()
        self.worker.close()
        self.memory.close()


def measure() -> Figures:
    """Ratios and rates, medians of ROUNDS interleaved rounds."""
    rng = np.random.default_rng(0)
    rates: dict[str, list[float]] = {}
    slot = layout().slot_bytes
    with Daemon(CHUNKS * slot) as daemon:
        engine = Engine(daemon)
        try:
            tensors = engine.memory.array
            for start in range(0, len(tensors), 2**26):
                part = tensors[start : start + 2**26]
                part[:] = np.frombuffer(rng.bytes(len(part)), np.uint8)
            arena = np.ones(CHUNKS * slot, np.uint8)
            halves = np.split(np.arange(1, NUM_BLOCKS), 2)
            order = rng.permutation(CHUNKS)
            # Every page of the pool and of the tensors is touched once before it counts.
            rates["host_store_first"] = [engine.store(half, order)[1] for half in halves][:1]
            for _ in range(ROUNDS):
                _round(engine, arena, rng, rates)
        finally:
            engine.close()
    return _figures(rates)


def _round(
    engine: Engine, arena: Bytes, rng: np.random.Generator, rates: dict[str, list[float]]
) -> None:
    tensors = engine.memory.array
    places = 1 + rng.permutation(NUM_BLOCKS - 1)
    stored, loaded = places[:BLOCKS], places[BLOCKS:]
    keys, store_rate = engine.store(stored, rng.permutation(CHUNKS))
    slots, load_rate = engine.load(keys, loaded)
    rates.setdefault("host_store", []).append(store_rate)
    rates.setdefault("host_load", []).append(load_rate)
    pages = tensors.reshape(TENSORS, NUM_BLOCKS, PAGE)
    for tensor in pages:
        if not np.array_equal(tensor[stored], tensor[loaded]):
            raise RuntimeError("what was loaded is not what was stored")
    for store, blocks in ((True, stored), (False, loaded)):
        arrays = JobBlocks.of(blocks, [BLOCKS], [0], slots, slots)
        copies = Expander(engine.layout).expand(arrays)
        for name, work in reference_copies(tensors, arena, copies, store=store).items():
            kind = "store" if store else "load"
            rates.setdefault(f"{kind}_{name}", []).append(rate(work))
    rates.setdefault("memcpy", []).append(rate(lambda: _copy_halves(arena)))


def _copy_halves(arena: Bytes) -> None:
    """Move TOTAL bytes contiguously: one half over the other, and back."""
    one, other = np.split(arena, 2)
    np.copyto(one, other)
    np.copyto(other, one)


def _figures(rates: dict[str, list[float]]) -> Figures:
    medians = {name: median(values) for name, values in rates.items()}
    figures: Figures = {}
    for kind in ("store", "load"):
        best = max(value for name, value in medians.items() if name.startswith(f"{kind}_"))
        figures[f"host_{kind}_ratio"] = medians[f"host_{kind}"] / best
        figures[f"host_{kind}_GBps"] = medians[f"host_{kind}"]
        figures[f"best_{kind}_GBps"] = best
    figures["host_store_first_GBps"] = medians["host_store_first"]
    figures["memcpy_GBps"] = medians["memcpy"]
    for name, value in medians.items():
        if name.startswith(("store_", "load_")):
            figures[f"{name}_GBps"] = value
    return figures
