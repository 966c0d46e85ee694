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
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from harness import SECONDS, Daemon, Engine, Ints, fresh_keys, layout
from lane_meter import Meter, Spent

from kvd_client import DeviceMemory
from kvd_client.tickets import LoadTicket, StoreTicket
from tests.fakecuda import cudatensor
from tests.fakecuda.harness import write_control

CONTROL_SECONDS = 0.12  # the test driver has read its file by then, once it is called

AnyTicket = StoreTicket | LoadTicket
Ticket = TypeVar("Ticket", bound=AnyTicket)


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
        self._ends = contextlib.ExitStack()
        self.engines(1)
        daemon.wait_usable(SECONDS)
        (pid,) = (lane["pid"] for lane in daemon.status()["lanes"] if lane["pins"])
        self._meter = Meter(pid, options.stages)
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
        with self._meter.running(spent):
            for number in range(each):
                for i, engine in enumerate(engines):
                    if loads:
                        jobs[i].append(self._submit(engine, _part(loads[i], 0, chunks)))
                    if stores:
                        part = _part(stores[i][1], number * chunks, chunks)
                        jobs[i].append(self._submit(engine, part))
            for engine, mine in zip(engines, jobs, strict=True):
                engine.finish(*mine)
        spent.nbytes += sum(map(len, jobs)) * chunks * self._chunk_bytes
        if loads:
            self._complete(engines, loads)
        for engine, (new, _) in zip(engines, stores, strict=False):
            engine.stored(new)

    def _submit(self, engine: Engine, ticket: AnyTicket) -> int:
        blocks: Ints = self._from if isinstance(ticket, StoreTicket) else self._to
        return engine.submit(ticket, blocks[: len(ticket.slots) * self._factor])

    def one_chunk(self, order: dict[str, Any]) -> dict[str, int]:
        """So many jobs of one chunk, each submitted when the one before it has ended."""
        engine, count = self._engines[0], order["jobs"]
        keys = fresh_keys(count) if order["move"] == "store" else []
        ticket: AnyTicket = engine.offer(keys) if keys else self._find([engine], 1)[0]
        spent = Spent(nbytes=count * self._chunk_bytes)
        parts = [_part(ticket, number if keys else 0, 1) for number in range(count)]
        with self._meter.running(spent):
            for part in parts:
                engine.finish(self._submit(engine, part))
        if isinstance(ticket, LoadTicket):
            engine.scheduler.complete_load(ticket)
        engine.stored(keys)
        return spent.answer()

    def idle(self, seconds: float) -> dict[str, int]:
        """What the lane uses in this time while nobody wants anything of it."""
        spent = Spent()
        with self._meter.running(spent):
            time.sleep(seconds)
        return spent.answer()

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
