"""A scheduler or a rank as a process of its own, which may be frozen and killed at any moment.

    python -m tests.chaos.client_process FOLDER RUNTIME_DIR ENGINE SEED [RANK]

What they count is in shared memory. A scheduler decides what its ranks store and load, as
carelessly as an engine can: some tickets and leases it never gives back, and some jobs it takes
back at once. A rank does what it is told, and looks at every byte.
"""

import random
import sys
import time
from collections.abc import Container
from pathlib import Path

import msgspec

from kvd_client import (
    Fingerprint,
    JobBlocks,
    Load,
    LoadTicket,
    RegistrationError,
    Scheduler,
    Store,
    StoreAnswer,
    StoreTicket,
    Worker,
)
from kvd_client.attachment import Attachment
from tests.chaos.given import note
from tests.chaos.memory import Memory
from tests.chaos.shared import (
    BATCH,
    GROUPS,
    KEYS,
    LARGEST,
    SPECS,
    Answer,
    Calls,
    Count,
    Order,
    Phase,
    counts,
    lives,
    mailbox,
    phase_word,
    post,
)

DEADLINE = 1.0
CLOSE_SECONDS = 2.5
REGISTER_SECONDS = 5.0
TRY_AGAIN_SECONDS = 0.1
LOOK_AT_ALL = 0.15  # of a rank's turns
PATIENCE = (5.0, 5.0, 5.0, 0.02, 0.0)  # seconds for a job
ANSWER_SECONDS = 8.0
NAP_SECONDS = 0.02
ORDER_SECONDS = 0.1
FORGETFUL = 0.02  # of tickets and leases
CANCELLED = 0.02
PIN_AND_FORGET = 2
LEASE_SECONDS = 30.0  # the daemon's own limit is much lower


class Member:
    """What a scheduler and a rank have alike."""

    def __init__(self, folder: Path, name: str, engine: str, seed: int, nap: float) -> None:
        self.spec = SPECS[engine]
        self._name = name
        self._folder = folder
        self._random = random.Random(seed)
        self._phase = phase_word(folder)
        self._calls = Calls(name, counts(folder, name), folder / "complaints")
        self._mailbox = mailbox(folder, name)
        self._mailbox.settimeout(nap)


class Conductor(Member):
    """A scheduler, and what its ranks answer."""

    def __init__(self, folder: Path, runtime_dir: Path, engine: str, seed: int) -> None:
        super().__init__(folder, engine, engine, seed, NAP_SECONDS)
        self._held: list[LoadTicket] = []  # while it is told to pin
        with self._calls.within(DEADLINE, "Scheduler()"):
            self._scheduler = Scheduler(
                runtime_dir, engine, deadline=DEADLINE, steps=self.spec.steps
            )

    def run(self) -> None:
        """Until the run ends."""
        while self._phase[0] != Phase.END:
            self._calls.counters[Count.ATTACHED] = self._scheduler.attached
            if self._phase[0] == Phase.REST:
                self._let_go()
                self._end_step()
                self._calls.counters[Count.LOANS] = self._scheduler.reserve(0, 0.0)
                self._calls.counters[Count.RESTS] = 1
                time.sleep(NAP_SECONDS)
                continue
            self._calls.counters[Count.RESTS] = 0
            self._turn()
        with self._calls.within(CLOSE_SECONDS + DEADLINE, "Scheduler.close"):
            self._scheduler.close()

    def _turn(self) -> None:
        pin = self._calls.counters[Count.PIN]
        if pin:
            self._pin(forget=pin == PIN_AND_FORGET)
        elif self._held:
            self._let_go()
        group = self._random.randrange(GROUPS)
        at = self._random.randrange(KEYS - BATCH)
        keys = self.spec.keys(group)[at : at + self._random.randint(1, BATCH)]
        chance = self._random.random()
        if chance < 0.45:
            self._store(group, keys)
        elif chance < 0.92:
            self._load(group, keys)
        elif chance < 0.99:
            with self._calls.step("lookup_many"):
                self._scheduler.lookup_many(keys)
            with self._calls.step("request_finished"):
                self._scheduler.request_finished(keys)
        elif chance < 0.995:
            with self._calls.within(DEADLINE, "status"):
                self._scheduler.status()
        else:
            with self._calls.within(DEADLINE, "reset"):
                self._scheduler.reset()
        self._end_step()
        if not self._scheduler.attached:
            time.sleep(NAP_SECONDS)

    def _end_step(self) -> None:
        if self.spec.steps:
            with self._calls.step("end_step"):
                self._scheduler.end_step()
        with self._calls.step("take_changes"):
            self._scheduler.take_changes()

    # ------------------------------------------------------------- transfers

    def _store(self, group: int, keys: list[bytes]) -> None:
        attachment = self._scheduler._attachments.current
        with self._calls.step("prepare_store"):
            ticket = self._scheduler.prepare_store(keys)
        self._calls.add(Count.FULL, ticket.answers.count(StoreAnswer.FULL))
        self._note(attachment, ticket)
        if not ticket.keys or self._random.random() < FORGETFUL:
            return
        slots, generations = ticket.slots.tolist(), ticket.generations.tolist()
        success = self._have_done("store", group, ticket.keys, slots, generations)
        if self._random.random() < FORGETFUL:
            return
        with self._calls.step("complete_store"):
            self._scheduler.complete_store(ticket.keys, success=success)

    def _note(self, attachment: Attachment | None, ticket: StoreTicket) -> None:
        """Write down which slots were given, if it is certain whose they are."""
        namespace = self._scheduler.namespace
        if (
            ticket.keys
            and attachment is not None
            and attachment is self._scheduler._attachments.current
        ):
            given = zip(ticket.slots.tolist(), ticket.generations.tolist(), strict=True)
            boot_id = attachment.directory.boot_id
            note(self._folder, [(boot_id, namespace, *each) for each in given])

    def _load(self, group: int, keys: list[bytes]) -> None:
        with self._calls.step("prepare_load"):
            ticket = self._scheduler.prepare_load(keys, LEASE_SECONDS)
        if ticket.keys:
            slots, generations = ticket.slots.tolist(), ticket.generations.tolist()
            self._have_done("load", group, ticket.keys, slots, generations)
        if self._random.random() >= FORGETFUL:
            with self._calls.step("complete_load"):
                self._scheduler.complete_load(ticket)

    def _pin(self, *, forget: bool) -> None:
        """Take leases over all that is there; keep them, or leave it to time to end them."""
        for group in range(GROUPS):
            with self._calls.step("prepare_load"):
                ticket = self._scheduler.prepare_load(self.spec.keys(group), LEASE_SECONDS)
            if not forget:
                self._held.append(ticket)
            self._calls.counters[Count.PINNED] = max(
                self._calls.counters[Count.PINNED], len(ticket)
            )

    def _let_go(self) -> None:
        while self._held:
            with self._calls.step("complete_load"):
                self._scheduler.complete_load(self._held.pop())

    # ----------------------------------------------------------------- ranks

    def _have_done(
        self,
        way: str,
        group: int,
        keys: tuple[bytes, ...],
        slots: list[int],
        generations: list[int],
    ) -> bool:
        """Give the order to every rank and wait; whether all have done it."""
        order = Order(
            number=time.monotonic_ns(),  # no scheduler before this one had it
            way="store" if way == "store" else "load",
            group=group,
            keys=keys,
            slots=tuple(slots),
            generations=tuple(generations),
            patience=self._random.choice(PATIENCE),
            cancel=self._random.random() < CANCELLED,
        )
        frame = msgspec.json.encode(order)
        ranks = [f"{self.spec.name}-{rank}" for rank in range(self.spec.ranks)]
        waits_for = {name for name in ranks if post(self._mailbox, self._folder, name, frame)}
        done = set()
        end = time.monotonic() + ANSWER_SECONDS
        while waits_for and time.monotonic() < end and self._phase[0] != Phase.END:
            try:
                answer = msgspec.json.decode(self._mailbox.recv(LARGEST), type=Answer)
            except TimeoutError:
                waits_for = {name for name in waits_for if lives(self._folder, name)}
                continue
            if answer.number == order.number:
                waits_for.discard(answer.name)
                if answer.success:
                    done.add(answer.name)
        return len(done) == self.spec.ranks


class Rank(Member):
    """A worker and its memory."""

    def __init__(self, folder: Path, runtime_dir: Path, engine: str, seed: int, rank: int) -> None:
        super().__init__(folder, f"{engine}-{rank}", engine, seed, ORDER_SECONDS)
        self.rank = rank
        self._runtime_dir = runtime_dir
        self._memory = Memory(self.spec, rank)
        self._job = 0
        self._overdue: dict[int, list[int]] = {}  # loads that have not ended: their blocks
        self._worker: Worker | None = None

    def run(self) -> None:
        """Until the run ends."""
        while self._phase[0] != Phase.END:
            self._turn()
        if self._worker is not None:
            with self._calls.within(CLOSE_SECONDS + 2 * DEADLINE, "Worker.close"):
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
            with self._calls.within(CLOSE_SECONDS + 2 * DEADLINE, "Worker.close"):
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
        with self._calls.step(f"submit_{order.way}"):
            worker.submit(kind, job, arrays)
        if order.cancel:
            with self._calls.step("cancel"):
                worker.cancel([job])
        with self._calls.within(order.patience, "wait"):
            unfinished = worker.wait([job], order.patience)
        with self._calls.step("get_finished"):
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
            with self._calls.step("get_finished"):
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
    folder, runtime_dir, engine, seed, *rank = sys.argv[1:]
    which = Rank if rank else Conductor
    which(Path(folder), Path(runtime_dir), engine, int(seed), *map(int, rank)).run()


if __name__ == "__main__":
    main()
