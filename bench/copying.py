"""The lane's stores and loads beside the best copy of the same pattern in one process.

1,024 blocks of 32 tensors with pages of 16 KiB are moved between random places
in the tensors and random chunks in the pool. The reference moves the same bytes
between the same offsets of two private arrays, with four methods; the fastest
counts. All are measured in turn, in every round.
"""

import ctypes
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from harness import Daemon, Engine, Figures, Ints, fresh_keys, layout, median

from kvd_client.memory import HostMemory
from kvd_proto.copies import Copies
from kvd_proto.expand import Expander
from kvd_proto.jobs import JobBlocks

TENSORS, PAGE, BLOCKS, BLOCKS_PER_CHUNK = 32, 16384, 1024, 4
NUM_BLOCKS = 2 * BLOCKS + 1  # block 0 is the engine's null block
CHUNKS = BLOCKS // BLOCKS_PER_CHUNK
TOTAL = BLOCKS * TENSORS * PAGE
ROUNDS = 9

Bytes = npt.NDArray[np.uint8]


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


def store(engine: Engine, blocks: Ints, order: Ints) -> tuple[list[bytes], float]:
    """Store these blocks under new keys, chunks in this order: the keys, GB/s."""
    keys = fresh_keys(CHUNKS)
    ticket = engine.offer(keys)
    slots, generations = ticket.slots[order], ticket.generations[order]
    ticket = replace(ticket, slots=slots, generations=generations)
    gbps = rate(lambda: engine.finish(engine.submit(ticket, blocks)))
    engine.stored(keys)
    return [keys[i] for i in order.tolist()], gbps


def measure() -> Figures:
    """Ratios and rates, medians of ROUNDS interleaved rounds."""
    rng = np.random.default_rng(0)
    rates: dict[str, list[float]] = {}
    shape = layout(TENSORS, PAGE, NUM_BLOCKS, BLOCKS_PER_CHUNK)
    pool = CHUNKS * shape.slot_bytes
    with Daemon(pool) as daemon, Engine(daemon.runtime_dir, shape) as engine:
        assert isinstance(engine.memory, HostMemory)
        tensors = engine.memory.array
        for start in range(0, len(tensors), 2**26):
            part = tensors[start : start + 2**26]
            part[:] = np.frombuffer(rng.bytes(len(part)), np.uint8)
        arena = np.ones(pool, np.uint8)
        halves = np.split(np.arange(1, NUM_BLOCKS), 2)
        order = rng.permutation(CHUNKS)
        # Every page of the pool and of the tensors is touched once before it counts.
        rates["host_store_first"] = [store(engine, half, order)[1] for half in halves][:1]
        for _ in range(ROUNDS):
            _round(engine, tensors, arena, rng, rates)
    return _figures(rates)


def _round(
    engine: Engine,
    tensors: Bytes,
    arena: Bytes,
    rng: np.random.Generator,
    rates: dict[str, list[float]],
) -> None:
    places = 1 + rng.permutation(NUM_BLOCKS - 1)
    stored, loaded = places[:BLOCKS], places[BLOCKS:]
    keys, store_rate = store(engine, stored, rng.permutation(CHUNKS))
    with engine.find(keys) as ticket:
        load_rate = rate(lambda: engine.finish(engine.submit(ticket, loaded)))
    rates.setdefault("host_store", []).append(store_rate)
    rates.setdefault("host_load", []).append(load_rate)
    pages = tensors.reshape(TENSORS, NUM_BLOCKS, PAGE)
    for tensor in pages:
        if not np.array_equal(tensor[stored], tensor[loaded]):
            raise RuntimeError("what was loaded is not what was stored")
    for kind, blocks in (("store", stored), ("load", loaded)):
        arrays = JobBlocks.of(blocks, [BLOCKS], [0], ticket.slots, ticket.generations)
        copies = Expander(engine.layout).expand(arrays)
        for name, work in reference_copies(tensors, arena, copies, store=kind == "store").items():
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
