"""An engine that stores each chunk more than once, in every order that a worker can ask for.

    python -m tests.chaos.hostile FOLDER RUNTIME_DIR ENGINE SEED

Its model is its own. A store that wrote on after its chunk is READY would write over the chunks of
others, once a reset has freed its slots.
"""

import os
import random
import sys
import time
from itertools import count
from pathlib import Path

import numpy as np

from kvd_client import (
    Fingerprint,
    HostMemory,
    JobBlocks,
    RegistrationError,
    Scheduler,
    Store,
    StoreTicket,
    Worker,
)
from tests.chaos.shared import Count, Phase, counts, phase_word
from tests.layouts import flat_layout

PAGE, TENSORS, FACTOR, NULL_BLOCK = 16, 64, 16, 0
LAYOUT = flat_layout(*[PAGE] * TENSORS, blocks=FACTOR + 1, factor=FACTOR, null_block=NULL_BLOCK)
GARBAGE = 0xBD
NAP_SECONDS = 0.02
REGISTER_SECONDS = 5.0
LONG, SHORT = list(range(FACTOR, 0, -1)), [1] + [NULL_BLOCK] * (FACTOR - 1)
"""The blocks of each chunk, of which no two are one run: all, or one."""


class Hostile:
    """A scheduler and a worker, which asks for what no engine needs."""

    def __init__(self, folder: Path, runtime_dir: Path, engine: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.phase = phase_word(folder)
        self.counters = counts(folder, engine)
        self.storages = [HostMemory.allocate(size) for size in LAYOUT.storages]
        for storage in self.storages:
            storage.array[:] = GARBAGE
        self.jobs = count(1)
        self.runtime_dir, self.engine = runtime_dir, engine
        self.scheduler = Scheduler(runtime_dir, engine, steps=True)

    def run(self) -> None:
        """Until the run ends."""
        worker: Worker | None = None
        while self.phase[0] != Phase.END:
            worker = worker or self._register()
            if worker is None:
                continue
            self.counters[Count.ATTACHED] = self.scheduler.attached and worker.registered
            if self.phase[0] == Phase.REST or not self.scheduler.attached:
                self.scheduler.end_step()
                self.counters[Count.RESTS] = 1
                time.sleep(NAP_SECONDS)
                continue
            self.counters[Count.RESTS] = 0
            self._attack(worker)
        if worker is not None:
            worker.close()
        self.scheduler.close()

    def _register(self) -> Worker | None:
        worker = Worker(self.runtime_dir, self.engine, rank=0, world_size=1)
        try:
            worker.register(
                self.storages, LAYOUT, Fingerprint(model=self.engine), timeout=REGISTER_SECONDS
            )
        except RegistrationError as error:
            print(f"refused: {error}", file=sys.stderr, flush=True)
            worker.close()
            time.sleep(NAP_SECONDS)
            return None
        return worker

    def _attack(self, worker: Worker) -> None:
        """Store new chunks several times, wait for any of the stores, and drop all chunks."""
        keys = [os.urandom(16) for _ in range(self.random.randint(1, 400))]
        self.scheduler.reserve(len(keys), 0.2)
        ticket = self.scheduler.prepare_store(keys)
        self.scheduler.end_step()
        if not ticket.keys:
            time.sleep(NAP_SECONDS)
            return
        jobs: list[int] = []
        for blocks in self.random.choices((LONG, SHORT), k=self.random.randint(2, 4)):
            jobs.append(self._store(worker, ticket, blocks))
            if self.random.random() < 0.4:
                worker.wait(jobs[-1:], 0.05)
        chosen = self.random.choice(jobs)
        if self.random.random() < 0.1:
            worker.cancel([chosen])
        unfinished = worker.wait([chosen], 0.1)
        if self.random.random() < 0.8:
            self.scheduler.reset()
        else:
            self.scheduler.complete_store(ticket.keys, success=not unfinished)
        results = worker.get_finished()
        self.counters[Count.REPEATED] += sum("has had its store" in r.text for r in results)

    def _store(self, worker: Worker, ticket: StoreTicket, blocks: list[int]) -> int:
        job = next(self.jobs)
        worker.submit(Store, job, repeated_job(ticket, blocks))
        return job


def repeated_job(ticket: StoreTicket, blocks: list[int]) -> JobBlocks:
    """Return the job that stores the same blocks in each chunk of a ticket."""
    block_ids = np.tile(np.array(blocks), len(ticket.keys))
    return JobBlocks.of(block_ids, [len(block_ids)], [0], ticket.slots, ticket.generations)


if __name__ == "__main__":
    folder, runtime_dir, engine, seed = sys.argv[1:]
    Hostile(Path(folder), Path(runtime_dir), engine, int(seed)).run()
