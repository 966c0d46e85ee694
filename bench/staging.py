"""What staging costs beside export: prints a table, writes bench/out/staging.json.

One run takes in turns, on the same daemon and in the same namespace:

- **export**: the lane copies between the engine's memory and the pool;
- **staging**: the engine's process copies between its memory and staging pages, the lane between
  those and the pool;
- **in-process**: the best copy of the same bytes in one process.

Two shapes: `blocks`, where a block is one fragment of 512 KiB, as vLLM lays it out for kvd; and
`layers`, where it is 32 pages of 16 KiB in as many tensors. Processor time is of the engine's
process and of the lane together.

Then steps of an engine: Python and a product of matrices, with the store of what the step has
written, and now and then a load. A step is measured from its begin to its end, so what staging's
thread takes of the interpreter and of the cores counts. Figures are medians of the rounds.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from copying import reference_copies
from harness import (
    Daemon,
    Engine,
    Figures,
    Ints,
    cpu_seconds,
    fresh_keys,
    layout,
    median,
)
from rich.console import Console
from rich.table import Table

from kvd_client import LoadTicket, StoreTicket
from kvd_client.memory import HostMemory
from kvd_client.routes import EXPORT, STAGING, Transfer
from kvd_proto.expand import Expander
from kvd_proto.jobs import JobBlocks
from kvd_proto.layout import RankLayout

OUT = Path(__file__).parent / "out" / "staging.json"
BLOCKS, BLOCKS_PER_CHUNK = 256, 4
NUM_BLOCKS = 2 * BLOCKS + 1
CHUNKS = BLOCKS // BLOCKS_PER_CHUNK
ROUNDS = 9
SHAPES = {"blocks": (1, 512 * 1024), "layers": (32, 16 * 1024)}
WAYS: tuple[Transfer, ...] = (EXPORT, STAGING)
STEPS, STEP_ROUNDS, STEP_BLOCKS, STEPS_PER_LOAD = 400, 5, 4, 20
GOALS = {
    "staging_store_ratio": "at least 0.6 of export",
    "staging_load_ratio": "at least 0.6 of export",
    "step_p99_ratio": "at most 1.1 of export",
}

Rates = dict[str, list[float]]


@dataclass
class Side:
    """An engine, and the processes whose time its jobs take."""

    engine: Engine
    pids: tuple[int, ...]

    def timed(self, work: Callable[[], None]) -> tuple[float, float]:
        """Seconds of work, and processor seconds of the processes meanwhile."""
        cpu = sum(map(cpu_seconds, self.pids))
        started = time.perf_counter()
        work()
        seconds = time.perf_counter() - started
        return seconds, sum(map(cpu_seconds, self.pids)) - cpu


def main() -> None:
    """Measure, print, write."""
    console = Console()
    figures: Figures = {}
    for name, (tensors, page) in SHAPES.items():
        with console.status(f"measuring: {name}"):
            figures |= {
                f"{name}_{figure}": value
                for figure, value in measure_copies(
                    layout(tensors, page, NUM_BLOCKS, BLOCKS_PER_CHUNK)
                ).items()
            }
    with console.status("measuring: steps"):
        figures |= measure_steps(layout(*SHAPES["blocks"], NUM_BLOCKS, BLOCKS_PER_CHUNK))
    figures = {name: round(value, 3) for name, value in figures.items()}
    table = Table("figure", "value", "goal", title=f"staging, {os.cpu_count()} CPUs")
    table.columns[1].justify = "right"
    for name, value in figures.items():
        goal = next((goal for end, goal in GOALS.items() if name.endswith(end)), "")
        table.add_row(name, f"{value:,}", goal)
    console.print(table)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(figures, indent=2) + "\n")
    console.print(f"written to {OUT}")


def measure_copies(shape: RankLayout) -> Figures:
    """Rates, processor time a GB, and ratios of staging to export."""
    rng = np.random.default_rng(0)
    rates: Rates = {}
    with Daemon(3 * CHUNKS * shape.slot_bytes) as daemon:
        lane = int(daemon.status()["lanes"][0]["pid"])
        memory = HostMemory.allocate(shape.storages[0])
        memory.array[:] = rng.integers(0, 256, len(memory.array), np.uint8)
        with (
            Engine(daemon.runtime_dir, shape, memory) as exporting,
            Engine(daemon.runtime_dir, shape, memory, transfer=STAGING) as staging,
        ):
            sides = {EXPORT: Side(exporting, (os.getpid(), lane))}
            sides[STAGING] = Side(staging, (os.getpid(), lane))
            arena = np.ones(CHUNKS * shape.slot_bytes, np.uint8)
            for number in range(ROUNDS + 1):
                measured: Rates = {}
                for way, side in sides.items():
                    ticket = _copy_round(way, side, memory, rng, measured)
                _reference_round(shape, memory, arena, ticket, measured)
                if number:  # in the first one pages are touched for the first time
                    for name, values in measured.items():
                        rates.setdefault(name, []).extend(values)
    figures = {name: median(values) for name, values in rates.items()}
    for kind in ("store", "load"):
        references = [name for name in figures if name.startswith(f"in_process_{kind}_")]
        figures[f"in_process_{kind}_GBps"] = max(figures.pop(name) for name in references)
        ratios = np.divide(rates[f"staging_{kind}_GBps"], rates[f"export_{kind}_GBps"])
        figures[f"staging_{kind}_ratio"] = median(ratios)
    return figures


def _copy_round(
    way: Transfer, side: Side, memory: HostMemory, rng: np.random.Generator, rates: Rates
) -> StoreTicket:
    engine, shape = side.engine, side.engine.layout
    total = BLOCKS * sum(ref.page_bytes for ref in shape.groups[0].refs)
    places = 1 + rng.permutation(NUM_BLOCKS - 1)
    stored, loaded = places[:BLOCKS], places[BLOCKS:]
    keys = fresh_keys(CHUNKS)
    ticket = engine.offer(keys)
    order = rng.permutation(CHUNKS)
    ticket = replace(ticket, slots=ticket.slots[order], generations=ticket.generations[order])
    note(rates, f"{way}_store", total, side.timed(lambda: _move(engine, ticket, stored)))
    engine.stored(keys)
    with engine.find([keys[i] for i in order.tolist()]) as found:
        note(rates, f"{way}_load", total, side.timed(lambda: _move(engine, found, loaded)))
    for tensor in shape.tensors:
        pages = memory.array[tensor.offset :][: NUM_BLOCKS * tensor.block_stride]
        pages = pages.reshape(NUM_BLOCKS, tensor.block_stride)
        if not np.array_equal(pages[stored], pages[loaded]):
            raise RuntimeError(f"{way}: what was loaded is not what was stored")
    return ticket


def _move(engine: Engine, ticket: object, blocks: Ints) -> None:
    engine.finish(engine.submit(ticket, blocks))  # type: ignore[arg-type]  # either kind


def _reference_round(
    shape: RankLayout,
    memory: HostMemory,
    arena: "np.typing.NDArray[np.uint8]",
    ticket: StoreTicket,
    rates: Rates,
) -> None:
    total = BLOCKS * sum(ref.page_bytes for ref in shape.groups[0].refs)
    blocks = 1 + np.random.default_rng(1).permutation(NUM_BLOCKS - 1)[:BLOCKS]
    slots = np.arange(CHUNKS)
    arrays = JobBlocks.of(blocks, [BLOCKS], [0], slots, ticket.generations)
    copies = Expander(shape).expand(arrays)
    for kind in ("store", "load"):
        work = reference_copies(memory.array, arena, copies, store=kind == "store")
        for method in ("slices", "memmove"):
            started = time.perf_counter()
            work[method]()
            seconds = time.perf_counter() - started
            rates.setdefault(f"in_process_{kind}_{method}", []).append(total / seconds / 1e9)


def note(rates: Rates, name: str, nbytes: int, times: tuple[float, float]) -> None:
    """Add a rate, and processor milliseconds a GB."""
    seconds, cpu = times
    rates.setdefault(f"{name}_GBps", []).append(nbytes / seconds / 1e9)
    rates.setdefault(f"{name}_cpu_ms_per_GB", []).append(cpu * 1e3 / (nbytes / 1e9))


# ------------------------------------------------------------------------- steps


def measure_steps(shape: RankLayout) -> Figures:
    """Steps of engines that export and stage, in turns."""
    times: dict[Transfer, list[list[float]]] = {way: [] for way in WAYS}
    with Daemon(3 * CHUNKS * shape.slot_bytes, "--policy", "lru") as daemon:
        memory = HostMemory.allocate(shape.storages[0])
        memory.array[:] = 1
        with (
            Engine(daemon.runtime_dir, shape, memory) as exporting,
            Engine(daemon.runtime_dir, shape, memory, transfer=STAGING) as staging,
        ):
            for number in range(STEP_ROUNDS + 1):
                for way, engine in ((EXPORT, exporting), (STAGING, staging)):
                    steps = _steps(engine)
                    if number:
                        times[way].append(steps)
    figures: Figures = {}
    for way, rounds in times.items():
        for percent in (50, 99):
            figures[f"{way}_step_p{percent}_ms"] = median(
                float(np.percentile(steps, percent)) for steps in rounds
            )
    for percent in (50, 99):
        figures[f"step_p{percent}_ratio"] = median(
            float(np.percentile(staged, percent) / np.percentile(exported, percent))
            for exported, staged in zip(times[EXPORT], times[STAGING], strict=True)
        )
    return figures


def _steps(engine: Engine) -> list[float]:
    """Milliseconds of each step; every one stores a chunk, some load chunks."""
    weights = np.ones((512, 512), np.float32)
    blocks = np.arange(1, NUM_BLOCKS)
    running: dict[int, LoadTicket | None] = {}  # a load's with its ticket
    keys: list[bytes] = []
    times = []
    for step in range(STEPS):
        new = fresh_keys(STEP_BLOCKS // BLOCKS_PER_CHUNK)
        ticket = engine.offer(new)
        at = step * STEP_BLOCKS % BLOCKS
        started = time.perf_counter()
        running[engine.submit(ticket, blocks[at : at + STEP_BLOCKS])] = None
        if step % STEPS_PER_LOAD == STEPS_PER_LOAD - 1:
            found = engine.find(keys[-8:-4])
            some = blocks[BLOCKS : BLOCKS + 4 * BLOCKS_PER_CHUNK]
            running[engine.submit(found, some)] = found
        for _ in range(4):
            weights @ weights
        sum(i * i for i in range(10_000))  # what the scheduler does in Python
        finished = engine.worker.get_finished()
        times.append((time.perf_counter() - started) * 1e3)
        for result in finished:
            if (loaded := running.pop(result.job_id)) is not None:
                engine.scheduler.complete_load(loaded)
        engine.stored(new)
        keys += new
    engine.worker.wait(running, 10)
    engine.worker.get_finished()
    return times


if __name__ == "__main__":
    main()
