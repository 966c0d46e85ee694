"""One rank as a process of its own: does what its scheduler orders, and looks at every byte.

    python -m tests.chaos.rank_process FOLDER RUNTIME_DIR ENGINE RANK SEED

May be frozen and killed at any moment. What it counts is in shared memory.
"""

import random
import sys
import time
from collections.abc import Container
from pathlib import Path

import msgspec

from kvd_client import Fingerprint, JobBlocks, Load, RegistrationError, Store, Worker
from tests.chaos.memory import Memory
from tests.chaos.shared import (
    LARGEST,
    SPECS,
    Answer,
    Calls,
    Count,
    Order,
    Phase,
    counts,
    mailbox,
    phase_word,
    post,
)

DEADLINE = 1.0
REGISTER_SECONDS = 5.0
TRY_AGAIN_SECONDS = 0.1
NAP_SECONDS = 0.1
LOOK_AT_ALL = 0.15  # of the turns


class Rank:
    """A worker and its memory."""

    def __init__(self, folder: Path, runtime_dir: Path, engine: str, rank: int, seed: int) -> None:
        self._name = name = f"{engine}-{rank}"
        self.spec = SPECS[engine]
        self.rank = rank
        self._folder = folder
        self._runtime_dir = runtime_dir
        self._random = random.Random(seed)
        self._phase = phase_word(folder)
        self._calls = Calls(name, counts(folder, name), folder / "complaints")
        self._memory = Memory(self.spec, rank)
        self._job = 0
        self._overdue: dict[int, list[int]] = {}  # loads that have not ended: their blocks
        self._mailbox = mailbox(folder, name)
        self._mailbox.settimeout(NAP_SECONDS)
        self._worker: Worker | None = None

    def run(self) -> None:
        """Until the run ends."""
        while self._phase[0] != Phase.END:
            self._turn()
        if self._worker is not None:
            with self._calls.within(2.5 + 2 * DEADLINE, "Worker.close"):
                self._worker.close()
        self._memory.close()

    def _turn(self) -> None:
        worker = self._worker
        if worker is None:
            self._worker = self._register()
            return
        self._calls.counters[Count.ATTACHED] = worker.attached and worker.registered
        self._settle(worker)
        self._calls.counters[Count.RESTS] = not self._overdue
        order = self._next_order()
        if order is not None:
            self._calls.counters[Count.RESTS] = 0
            success = self._do(worker, order)
            answer = msgspec.json.encode(Answer(order.number, self._name, success))
            post(self._mailbox, self._folder, self.spec.name, answer)
        if self._phase[0] == Phase.REST or self._random.random() < LOOK_AT_ALL:
            self._look()

    def _register(self) -> Worker | None:
        """A new worker; None where the daemon refuses, which a second try may mend."""
        with self._calls.within(DEADLINE, "Worker()"):
            worker = Worker(
                self._runtime_dir,
                self.spec.name,
                self.rank,
                self.spec.ranks,
                deadline=DEADLINE,
            )
        try:
            with self._calls.within(REGISTER_SECONDS, "Worker.register"):
                worker.register(
                    self._memory.storages,
                    self.spec.layout,
                    Fingerprint(model=self.spec.model),
                    timeout=REGISTER_SECONDS,
                )
        except RegistrationError as error:
            print(f"refused: {error}", file=sys.stderr, flush=True)
            with self._calls.within(2.5 + 2 * DEADLINE, "Worker.close"):
                worker.close()
            time.sleep(TRY_AGAIN_SECONDS)
            return None
        return worker

    # --------------------------------------------------------------- orders

    def _next_order(self) -> Order | None:
        try:
            return msgspec.json.decode(self._mailbox.recv(LARGEST), type=Order)
        except TimeoutError:
            return None

    # ----------------------------------------------------------------- jobs

    def _do(self, worker: Worker, order: Order) -> bool:
        keys = list(order.keys)
        blocks = self._memory.lend(len(keys))
        if blocks is None:
            return False
        if order.way == "store":
            self._memory.fill(keys, blocks, order.group)
        self._job += 1
        job = self._job
        sizes, indices = [0, 0], [0, 0]
        sizes[order.group] = len(blocks)
        kind = Store if order.way == "store" else Load
        arrays = JobBlocks.of(blocks, sizes, indices, order.slots, order.generations)
        with self._calls.within(0.0, f"submit_{order.way}"):
            worker.submit(kind, job, arrays)
        if order.cancel:
            with self._calls.within(0.0, "cancel"):
                worker.cancel([job])
        with self._calls.within(order.patience, "wait"):
            unfinished = worker.wait([job], order.patience)
        with self._calls.within(0.0, "get_finished"):
            results = {result.job_id: result for result in worker.get_finished()}
        if job in unfinished and job not in results:
            self._overdue[job] = blocks
        if unfinished - {job} or (order.way == "store" and job in unfinished):
            self._calls.complain(f"wait({job}) left {sorted(unfinished)} of a {order.way}")
        self._ended(results.keys())
        result = results.get(job)
        if result is None:
            if job not in unfinished:
                self._calls.complain(f"job {job} has ended and is not reported")
            return False
        if result.success:
            self._done(order, keys, blocks)
        else:
            self._calls.add(Count.VOIDED if result.status == "void" else Count.MISSES)
        self._memory.take_back(blocks)
        return result.success

    def _done(self, order: Order, keys: list[bytes], blocks: list[int]) -> None:
        if order.way == "store":
            self._calls.add(Count.STORES, len(keys))
            return
        wrong = self._memory.wrong_bytes(keys, blocks, order.group)
        if wrong:
            self._calls.complain(f"WRONG BYTES: {wrong} in a load of {len(keys)} chunks: {order}")
        self._calls.add(Count.LOADS, len(keys))
        self._calls.add(Count.VERIFIED_BYTES, self._memory.bytes_of(len(keys), order.group))

    def _settle(self, worker: Worker) -> None:
        """Loads that were late and have ended by now give their blocks back."""
        if self._overdue:
            with self._calls.within(0.0, "get_finished"):
                results = worker.get_finished()
            self._ended({result.job_id for result in results})

    def _ended(self, jobs: Container[int]) -> None:
        for job in [job for job in self._overdue if job in jobs]:
            self._memory.take_back(self._overdue.pop(job))
            self._calls.add(Count.MISSES)

    def _look(self) -> None:
        wrong, looked = self._memory.touched_bytes()
        if wrong:
            self._calls.complain(f"WRONG BYTES: {wrong} in blocks that nothing was to write to")
        self._calls.add(Count.UNTOUCHED_BYTES, looked)


def main() -> None:
    """The command line."""
    folder, runtime_dir, engine, rank, seed = sys.argv[1:]
    Rank(Path(folder), Path(runtime_dir), engine, int(rank), int(seed)).run()


if __name__ == "__main__":
    main()
