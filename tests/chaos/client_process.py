"""A scheduler or a rank as a process of its own, which may be frozen and killed at any moment.

    python -m tests.chaos.client_process FOLDER RUNTIME_DIR ENGINE SEED [RANK]

What they count is in shared memory. A scheduler decides what its ranks store and load, as
carelessly as an engine can: some tickets and leases it never gives back, and some jobs it takes
back at once. A rank does what it is told, and looks at every byte.
"""

import random
import sys
import time
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar

import msgspec

from kvd_client import (
    Fingerprint,
    HostMemory,
    JobBlocks,
    Load,
    LoadTicket,
    RegistrationError,
    Scheduler,
    Store,
    StoreTicket,
    Worker,
)
from kvd_client.attachment import Attachment
from kvd_tools.demo.workload import POISON, page_content, page_seed
from tests.chaos.shared import (
    BATCH,
    BLOCKS,
    GIVEN,
    GROUPS,
    KEYS,
    LARGEST,
    SPECS,
    Answer,
    Count,
    Order,
    Phase,
    Spec,
    counts,
    lives,
    mailbox,
    phase_word,
    post,
)

P = ParamSpec("P")
T = TypeVar("T")
SLACK_SECONDS = 15.0  # a busy machine may keep a process from running for so long
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
        self.name = name
        self.folder = folder
        self.random = random.Random(seed)
        self.phase = phase_word(folder)
        self.counters = counts(folder, name)
        self.mailbox = mailbox(folder, name)
        self.mailbox.settimeout(nap)

    def timed(self, seconds: float, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call; complain where that takes longer, save for time that the process was frozen."""
        self.counters[Count.CALLS] += 1
        frozen = self.counters[Count.STOPPED_NS]
        began = time.monotonic()
        try:
            return call(*args, **kwargs)
        finally:
            away = (self.counters[Count.STOPPED_NS] - frozen) / 1e9
            took = time.monotonic() - began - away
            if took > seconds + SLACK_SECONDS:
                self.complain(f"{call} took {took:.2f} s, {seconds:g} s are allowed")

    def complain(self, text: str) -> None:
        """Say that something is wrong; one line, whole or not at all."""
        line = f"{time.monotonic():.3f} {self.name}: {text}\n"
        with (self.folder / "complaints").open("a", encoding="utf-8") as file:
            file.write(line)


class Conductor(Member):
    """A scheduler, and what its ranks answer."""

    def __init__(self, folder: Path, runtime_dir: Path, engine: str, seed: int) -> None:
        super().__init__(folder, engine, engine, seed, NAP_SECONDS)
        self._pinned: list[LoadTicket] = []  # while it is told to pin
        self._scheduler = self.timed(
            DEADLINE, Scheduler, runtime_dir, engine, deadline=DEADLINE, steps=self.spec.steps
        )

    def run(self) -> None:
        """Until the run ends."""
        while self.phase[0] != Phase.END:
            self.counters[Count.ATTACHED] = self._scheduler.attached
            if self.phase[0] == Phase.REST:
                self._unpin()
                self._end_step()
                self.counters[Count.LOANS] = self._scheduler.reserve(0, 0.0)
                self.counters[Count.RESTS] = 1
                time.sleep(NAP_SECONDS)
                continue
            self.counters[Count.RESTS] = 0
            self._turn()
        self.timed(CLOSE_SECONDS + DEADLINE, self._scheduler.close)

    def _turn(self) -> None:
        if self.counters[Count.PIN]:
            self._pin()
        else:
            self._unpin()
        group = self.random.randrange(GROUPS)
        at = self.random.randrange(KEYS - BATCH)
        keys = self.spec.keys(group)[at : at + self.random.randint(1, BATCH)]
        chance = self.random.random()
        if chance < 0.45:
            self._store(group, keys)
        elif chance < 0.92:
            self._load(group, keys)
        elif chance < 0.99:
            self.timed(0.0, self._scheduler.lookup_many, keys)
            self.timed(0.0, self._scheduler.request_finished, keys)
        elif chance < 0.995:
            self.timed(DEADLINE, self._scheduler.status)
        else:
            self.timed(DEADLINE, self._scheduler.reset)
        self._end_step()
        if not self._scheduler.attached:
            time.sleep(NAP_SECONDS)

    def _end_step(self) -> None:
        if self.spec.steps:
            self.timed(0.0, self._scheduler.end_step)
        self.timed(0.0, self._scheduler.take_changes)

    # ------------------------------------------------------------- transfers

    def _store(self, group: int, keys: list[bytes]) -> None:
        attachment = self._scheduler._attachments.current
        ticket = self.timed(0.0, self._scheduler.prepare_store, keys)
        self._note(attachment, ticket)
        if not ticket.keys or self.random.random() < FORGETFUL:
            return
        success = self._order("store", group, ticket)
        if self.random.random() < FORGETFUL:
            return
        self.timed(0.0, self._scheduler.complete_store, ticket.keys, success=success)

    def _note(self, attachment: Attachment | None, ticket: StoreTicket) -> None:
        """Write down which slots were given, if it is certain whose they are."""
        if attachment is None or attachment is not self._scheduler._attachments.current:
            return
        daemon = attachment.directory.boot_id, self._scheduler.namespace
        given = zip(ticket.slots.tolist(), ticket.generations.tolist(), strict=True)
        with (self.folder / "given").open("ab", buffering=0) as file:
            file.write(b"".join(GIVEN.pack(*daemon, *slot) for slot in given))

    def _load(self, group: int, keys: list[bytes]) -> None:
        ticket = self.timed(0.0, self._scheduler.prepare_load, keys, LEASE_SECONDS)
        if ticket.keys:
            self._order("load", group, ticket)
        if self.random.random() >= FORGETFUL:
            self.timed(0.0, self._scheduler.complete_load, ticket)

    def _pin(self) -> None:
        """Take leases over all that is there; keep them, or leave it to time to end them."""
        for group in range(GROUPS):
            keys = self.spec.keys(group)
            ticket = self.timed(0.0, self._scheduler.prepare_load, keys, LEASE_SECONDS)
            if self.counters[Count.PIN] != PIN_AND_FORGET:
                self._pinned.append(ticket)

    def _unpin(self) -> None:
        while self._pinned:
            self.timed(0.0, self._scheduler.complete_load, self._pinned.pop())

    def _order(
        self, way: Literal["store", "load"], group: int, ticket: StoreTicket | LoadTicket
    ) -> bool:
        """Give the order to every rank and wait; whether all have done it."""
        order = Order(
            number=time.monotonic_ns(),  # no scheduler before this one had it
            way=way,
            group=group,
            keys=tuple(ticket.keys),
            slots=tuple(ticket.slots.tolist()),
            generations=tuple(ticket.generations.tolist()),
            patience=self.random.choice(PATIENCE),
            cancel=self.random.random() < CANCELLED,
        )
        frame = msgspec.json.encode(order)
        ranks = [f"{self.spec.name}-{rank}" for rank in range(self.spec.ranks)]
        waits_for = {name for name in ranks if post(self.mailbox, self.folder, name, frame)}
        done = set()
        end = time.monotonic() + ANSWER_SECONDS
        while waits_for and time.monotonic() < end and self.phase[0] != Phase.END:
            try:
                answer = msgspec.json.decode(self.mailbox.recv(LARGEST), type=Answer)
            except TimeoutError:
                waits_for = {name for name in waits_for if lives(self.folder, name)}
                continue
            if answer.number == order.number:
                waits_for.discard(answer.name)
                if answer.success:
                    done.add(answer.name)
        return len(done) == self.spec.ranks


class Memory:
    """A rank's pages: poison, whatever the daemon does, but for blocks that are lent to jobs."""

    def __init__(self, spec: Spec, rank: int) -> None:
        self._layout = spec.layout
        self._who = 0 if spec.replicated else rank
        self.storages = [HostMemory.allocate(size) for size in self._layout.storages]
        self._pages = [storage.array.reshape(BLOCKS, spec.page) for storage in self.storages]
        self._free: list[int] = []
        self.take_back(range(BLOCKS))
        self._free.remove(0)  # the engine's null block

    def lend(self, chunks: int) -> list[int] | None:
        """Blocks for so many chunks, those longest at home first; None where too few are left."""
        count = chunks * self._layout.blocks_per_chunk
        if count > len(self._free):
            return None
        blocks, self._free = self._free[:count], self._free[count:]
        return blocks

    def take_back(self, blocks: Sequence[int]) -> None:
        """The blocks of a job that can write to them no more: poisoned at once."""
        for pages in self._pages:
            pages[blocks] = POISON
        self._free += blocks

    def fill(self, order: Order, blocks: Sequence[int]) -> None:
        """Compute the chunks' content."""
        for (tensor, block), seed in self._seeds(order, blocks).items():
            page = self._pages[tensor][block]
            page[:] = page_content(seed, len(page))

    def compare(self, order: Order, blocks: Sequence[int]) -> tuple[int, int]:
        """Bytes of the chunks that were compared, and that are wrong; of other tensors, too."""
        seeds, verified, wrong = self._seeds(order, blocks), 0, 0
        for tensor, pages in enumerate(self._pages):
            for block in blocks:
                page, seed = pages[block], seeds.get((tensor, block))
                expected = POISON if seed is None else page_content(seed, len(page))
                wrong += int((page != expected).sum())
                verified += 0 if seed is None else len(page)
        return verified, wrong

    def touched_bytes(self) -> tuple[int, int]:
        """Bytes that changed where nothing was to write, and how many were looked at."""
        home = [pages[[0, *self._free]] for pages in self._pages]
        return sum(int((pages != POISON).sum()) for pages in home), sum(p.size for p in home)

    def _seeds(self, order: Order, blocks: Sequence[int]) -> dict[tuple[int, int], int]:
        """The seed of each page of the chunks, by tensor and block."""
        factor = self._layout.blocks_per_chunk
        return {
            (ref.tensor, block): page_seed(
                order.keys[at // factor], self._who, ref.tensor, at % factor
            )
            for at, block in enumerate(blocks)
            for ref in self._layout.groups[order.group].refs
        }


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
        while self.phase[0] != Phase.END:
            self._worker = self._worker or self._register()
            if self._worker is not None:
                self._turn(self._worker)
        if self._worker is not None:
            self._close(self._worker)

    def _close(self, worker: Worker) -> None:
        self.timed(CLOSE_SECONDS + 2 * DEADLINE, worker.close)

    def _turn(self, worker: Worker) -> None:
        self.counters[Count.ATTACHED] = worker.attached and worker.registered
        if self._overdue:  # loads that have ended by now give their blocks back
            self._ended({result.job_id for result in self.timed(0.0, worker.get_finished)})
        self.counters[Count.RESTS] = not self._overdue
        try:
            order = msgspec.json.decode(self.mailbox.recv(LARGEST), type=Order)
        except TimeoutError:
            pass
        else:
            self.counters[Count.RESTS] = 0
            answer = Answer(order.number, self.name, self._do(worker, order))
            post(self.mailbox, self.folder, self.spec.name, msgspec.json.encode(answer))
        if self.phase[0] == Phase.REST or self.random.random() < LOOK_AT_ALL:
            wrong, looked = self._memory.touched_bytes()
            if wrong:
                self.complain(f"WRONG BYTES: {wrong} in blocks that nothing was to write to")
            self.counters[Count.UNTOUCHED_BYTES] += looked

    def _register(self) -> Worker | None:
        """A new worker; None where the daemon refuses, which a second try may mend."""
        spec = self.spec
        identity = self._runtime_dir, spec.name, self.rank, spec.ranks
        worker = self.timed(DEADLINE, Worker, *identity, deadline=DEADLINE)
        memory = self._memory.storages, spec.layout, Fingerprint(model=spec.model)
        try:
            self.timed(REGISTER_SECONDS, worker.register, *memory, timeout=REGISTER_SECONDS)
        except RegistrationError as error:
            print(f"refused: {error}", file=sys.stderr, flush=True)
            self._close(worker)
            time.sleep(TRY_AGAIN_SECONDS)
            return None
        return worker

    def _do(self, worker: Worker, order: Order) -> bool:
        blocks = self._memory.lend(len(order.keys))
        if blocks is None:
            return False
        if order.way == "store":
            self._memory.fill(order, blocks)
        self._job += 1
        job = self._job
        sizes = [0] * GROUPS
        sizes[order.group] = len(blocks)
        arrays = JobBlocks.of(blocks, sizes, [0] * GROUPS, order.slots, order.generations)
        self.timed(0.0, worker.submit, Store if order.way == "store" else Load, job, arrays)
        if order.cancel:
            self.timed(0.0, worker.cancel, [job])
        unfinished = self.timed(order.patience, worker.wait, [job], order.patience)
        results = {result.job_id: result for result in self.timed(0.0, worker.get_finished)}
        if job in unfinished and job not in results:
            self._overdue[job] = blocks
        if unfinished - {job} or (order.way == "store" and job in unfinished):
            self.complain(f"wait({job}) left {sorted(unfinished)} of a {order.way}")
        self._ended(results.keys())
        result = results.get(job)
        if result is None:
            if job not in unfinished:
                self.complain(f"job {job} has ended and is not reported")
            return False
        self._count(order, blocks, success=result.success)
        self._memory.take_back(blocks)
        return result.success

    def _count(self, order: Order, blocks: list[int], *, success: bool) -> None:
        """Count what a job has done, and look at every byte of a load."""
        if not success:
            self.counters[Count.MISSES] += 1
        elif order.way == "store":
            self.counters[Count.STORES] += len(order.keys)
        else:
            verified, wrong = self._memory.compare(order, blocks)
            if wrong:
                self.complain(f"WRONG BYTES: {wrong} in a load: {order}")
            self.counters[Count.LOADS] += len(order.keys)
            self.counters[Count.VERIFIED_BYTES] += verified

    def _ended(self, jobs: Container[int]) -> None:
        for job in [job for job in self._overdue if job in jobs]:
            self._memory.take_back(self._overdue.pop(job))
            self.counters[Count.MISSES] += 1


def main() -> None:
    """The command line."""
    folder, runtime_dir, engine, seed, *rank = sys.argv[1:]
    which = Rank if rank else Conductor
    which(Path(folder), Path(runtime_dir), engine, int(seed), *map(int, rank)).run()


if __name__ == "__main__":
    main()
