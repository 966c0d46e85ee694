"""One daemon with a lane on the test driver, and engines that keep it busy: what the lane uses.

Run by lane.py, in a process of its own with the packages and the bench/harness.py of the tree that
is measured. It takes an order a line (JSON) from standard input and answers with a line:

    {"control": [...]}                       switches of the test driver, from now on
    {"move": "load" | "store" | "both", "workers": n, "jobs": n, "job_bytes": n, "nbytes": n}
    {"jobs": n, "move": "load" | "store", "one_chunk": true}
    {"idle": seconds}

Blocks are at random places, so no two fragments touch. All loads read the same chunks into the same
blocks, and all stores write from the same: nothing is moved, so they need no memory of their own.
"""

import argparse
import contextlib
import json
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import lane_timers
import numpy as np
from harness import SECONDS, Daemon, Engine, Ints, fresh_keys, layout

from kvd_client.cuda_memory import DeviceMemory
from kvd_client.tickets import LoadTicket, StoreTicket
from tests.fakecuda import cudatensor
from tests.fakecuda.harness import write_control

SETTLE_SECONDS, SETTLED_SECONDS = 0.003, 1.0
CONTROL_SECONDS = 0.12  # the test driver has read its file by then, once it is called

AnyTicket = StoreTicket | LoadTicket
Ticket = TypeVar("Ticket", bound=AnyTicket)


def used(pid: int) -> dict[int, int]:
    """Nanoseconds of processor time that each thread of a process has used."""
    threads = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            threads[int(task.name)] = int((task / "schedstat").read_text().split()[0])
    return threads


def settled(pid: int) -> dict[int, int]:
    """The same once it sleeps: while a thread runs, the system counts it some ticks late."""
    end = time.monotonic() + SETTLED_SECONDS
    before = used(pid)
    while True:
        time.sleep(SETTLE_SECONDS)
        now = used(pid)
        if now == before or time.monotonic() > end:
            return now
        before = now


@dataclass
class Spent:
    """What some jobs have taken.

    threads: nanoseconds of processor time by thread of the lane.
    wall_ns: from the first submission to the last end.
    client_ns: processor time of the client's thread meanwhile.
    """

    threads: dict[int, int] = field(default_factory=dict)
    wall_ns: int = 0
    client_ns: int = 0
    nbytes: int = 0
    stages: dict[str, int] = field(default_factory=dict)

    def answer(self) -> dict[str, int]:
        """The figures that lane.py takes."""
        return {
            "busiest_ns": max(self.threads.values(), default=0),
            "lane_ns": sum(self.threads.values()),
            "wall_ns": self.wall_ns,
            "client_ns": self.client_ns,
            "nbytes": self.nbytes,
            **self.stages,
        }


class Load:
    """The engines of one daemon, and the chunks that they load.

    Args:
        daemon: with a pool of CPU memory; its lane of the test driver comes with the first engine.
        options: see `_options`.
        address: of device memory for every engine.
    """

    def __init__(self, daemon: Daemon, options: argparse.Namespace, address: int) -> None:
        self._daemon = daemon
        self._address = address
        self._shape = layout(
            options.tensors, options.fragment, _blocks(options), options.blocks_per_chunk
        )
        self._factor = options.blocks_per_chunk
        self._chunk_bytes = chunk_bytes(options)
        self._model = f"lane-{options.fragment}"
        rng = np.random.default_rng(options.fragment)
        half = (self._shape.num_blocks - 1) // 2
        self._from = 1 + rng.permutation(half)
        self._to = 1 + half + rng.permutation(half)
        self._engines: list[Engine] = []
        self._stages: Path | None = options.stages
        self._ends = contextlib.ExitStack()
        self.engines(1)
        daemon.wait_usable(SECONDS)
        (self._pid,) = (lane["pid"] for lane in daemon.status()["lanes"] if lane["pins"])
        self._chunks = max(1, options.most_bytes // self._chunk_bytes)
        self._keys: list[bytes] = []

    def engines(self, count: int) -> list[Engine]:
        """As many of them; those that were not there before are started."""
        while len(self._engines) < count:
            memory = DeviceMemory.at(self._address, self._shape.storages[0])
            engine = Engine(self._daemon.runtime_dir, self._shape, memory, self._model)
            self._engines.append(self._ends.enter_context(engine))
        return self._engines[:count]

    def _find(self, engines: list[Engine], chunks: int) -> list[LoadTicket]:
        """So many chunks to load, for each of these engines."""
        while True:
            tickets = [engine.scheduler.prepare_load(self._keys[:chunks]) for engine in engines]
            if all(len(ticket) == chunks for ticket in tickets):
                return tickets
            self._complete(engines, tickets)
            # None yet, or the stores of rounds before have evicted some.
            self._keys, engine = fresh_keys(self._chunks), engines[0]
            offered = engine.offer(self._keys)
            engine.finish(engine.submit(offered, self._from[: self._chunks * self._factor]))
            engine.stored(self._keys)

    @staticmethod
    def _complete(engines: list[Engine], tickets: list[LoadTicket]) -> None:
        for engine, ticket in zip(engines, tickets, strict=True):
            engine.scheduler.complete_load(ticket)

    def move(self, order: dict[str, Any]) -> dict[str, int]:
        """Jobs of this size, all that are at a time submitted at once, until so much has moved.

        Args:
            order: `workers`: how many engines; `jobs`: at a time and direction, of all of them;
                `job_bytes`, `nbytes`: of a job, and in all, at least.
        """
        ways = ("load", "store") if order["move"] == "both" else (order["move"],)
        chunks = max(1, order["job_bytes"] // self._chunk_bytes)
        engines = self.engines(order["workers"])
        each = max(1, order["jobs"] // len(engines))
        spent = Spent()
        while spent.nbytes < order["nbytes"]:
            self._round(spent, engines, ways, chunks, each)
        return spent.answer()

    def _timed(self) -> dict[str, int]:
        return lane_timers.read(self._stages) if self._stages else {}

    def _round(
        self, spent: Spent, engines: list[Engine], ways: tuple[str, ...], chunks: int, each: int
    ) -> None:
        """Jobs of `chunks` chunks, `each` of every engine and direction."""
        loads: list[LoadTicket] = []
        stores: list[tuple[list[bytes], StoreTicket]] = []
        if "load" in ways:
            loads = self._find(engines, chunks)
        if "store" in ways:
            keys = [fresh_keys(chunks * each) for _ in engines]
            stores = [(k, engine.offer(k)) for k, engine in zip(keys, engines, strict=True)]
        jobs: list[list[int]] = [[] for _ in engines]
        stages = self._timed()
        before, began, client = settled(self._pid), time.perf_counter_ns(), time.thread_time_ns()
        for number in range(each):
            for i, engine in enumerate(engines):
                if loads:
                    jobs[i].append(self._submit(engine, loads[i], 0, chunks))
                if stores:
                    jobs[i].append(self._submit(engine, stores[i][1], number * chunks, chunks))
        for engine, mine in zip(engines, jobs, strict=True):
            engine.finish(*mine)
        spent.client_ns += time.thread_time_ns() - client
        spent.wall_ns += time.perf_counter_ns() - began
        for thread, now in settled(self._pid).items():
            spent.threads[thread] = spent.threads.get(thread, 0) + now - before.get(thread, 0)
        for stage, total in self._timed().items():
            spent.stages[stage] = spent.stages.get(stage, 0) + total - stages[stage]
        spent.nbytes += sum(map(len, jobs)) * chunks * self._chunk_bytes
        if loads:
            self._complete(engines, loads)
        for engine, (new, _) in zip(engines, stores, strict=False):
            engine.stored(new)

    def _submit(self, engine: Engine, ticket: AnyTicket, begin: int, chunks: int) -> int:
        blocks: Ints = self._from if isinstance(ticket, StoreTicket) else self._to
        part = _part(ticket, begin, chunks)
        return engine.submit(part, blocks[: chunks * self._factor])

    def one_chunk(self, order: dict[str, Any]) -> dict[str, int]:
        """So many jobs of one chunk, each submitted when the one before it has ended."""
        engine, count = self._engines[0], order["jobs"]
        keys = fresh_keys(count) if order["move"] == "store" else []
        ticket: AnyTicket = engine.offer(keys) if keys else self._find([engine], 1)[0]
        spent = Spent(nbytes=count * self._chunk_bytes)
        before, began, client = settled(self._pid), time.perf_counter_ns(), time.thread_time_ns()
        for number in range(count):
            engine.finish(self._submit(engine, ticket, number if keys else 0, 1))
        spent.client_ns = time.thread_time_ns() - client
        spent.wall_ns = time.perf_counter_ns() - began
        after = settled(self._pid)
        spent.threads = {thread: now - before.get(thread, 0) for thread, now in after.items()}
        if isinstance(ticket, LoadTicket):
            engine.scheduler.complete_load(ticket)
        engine.stored(keys)
        return spent.answer()

    def idle(self, seconds: float) -> dict[str, int]:
        """What the lane uses in this time while nobody wants anything of it."""
        before, began = settled(self._pid), time.perf_counter_ns()
        time.sleep(seconds)
        now = used(self._pid)
        wall = time.perf_counter_ns() - began
        return Spent({t: ns - before.get(t, 0) for t, ns in now.items()}, wall).answer()

    def close(self) -> None:
        """End the engines."""
        self._ends.close()


def _part(ticket: Ticket, begin: int, chunks: int) -> Ticket:
    part = slice(begin, begin + chunks)
    return replace(ticket, slots=ticket.slots[part], generations=ticket.generations[part])


def chunk_bytes(options: argparse.Namespace) -> int:
    """Of one chunk."""
    return int(options.fragment * options.tensors * options.blocks_per_chunk)


def _blocks(options: argparse.Namespace) -> int:
    """For the largest load and the largest store, and block 0, which is null."""
    chunks = max(1, options.most_bytes // chunk_bytes(options))
    return int(2 * chunks * options.blocks_per_chunk + 1)


def main() -> None:
    """Serve orders until the end of the input."""
    options = _options()
    # Memory of which nothing is read or written needs no pages.
    write_control(options.control, "copies=instant")
    cudatensor.use_device()
    nbytes = options.fragment * options.tensors * _blocks(options)
    memory = cudatensor.DeviceMemory(nbytes)
    # A lane tries at its start whether copies arrive.
    write_control(options.control, "copies=")
    with Daemon(options.pool_bytes, log=options.log) as daemon:
        load = Load(daemon, options, memory.address)
        try:
            _answer({"ready": 1})
            for line in sys.stdin:
                order = json.loads(line)
                if "control" in order:
                    write_control(options.control, *order["control"])
                    time.sleep(CONTROL_SECONDS)
                    _answer({"ready": 1})
                elif "idle" in order:
                    load.engines(order["workers"])
                    _answer(load.idle(order["idle"]))
                elif "one_chunk" in order:
                    _answer(load.one_chunk(order))
                else:
                    _answer(load.move(order))
        finally:
            load.close()


def _answer(figures: dict[str, int]) -> None:
    print(json.dumps(figures), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fragment", type=int, required=True, help="bytes of a page")
    parser.add_argument("--tensors", type=int, required=True)
    parser.add_argument("--blocks-per-chunk", type=int, default=1)
    parser.add_argument("--most-bytes", type=int, required=True, help="of a job")
    parser.add_argument("--pool-bytes", type=int, required=True)
    parser.add_argument("--control", type=Path, required=True, help="the test driver's file")
    parser.add_argument("--stages", type=Path, help="of lane_timers, where the lane has them")
    parser.add_argument("--log", type=Path, required=True, help="for the daemon's lines")
    return parser.parse_args()


if __name__ == "__main__":
    main()
