"""An engine's scheduler as a process of its own: decides what its ranks store and load.

    python -m tests.chaos.scheduler_process FOLDER RUNTIME_DIR ENGINE SEED

May be frozen and killed at any moment. It is as careless as an engine can be: some
tickets and leases it never gives back, and some jobs it takes back at once.
"""

import random
import sys
import time
from pathlib import Path

import msgspec

from kvd_client import LoadTicket, Scheduler, StoreAnswer
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
PATIENCE = (5.0, 5.0, 5.0, 0.02, 0.0)  # seconds for a job
ANSWER_SECONDS = 8.0
NAP_SECONDS = 0.02
FORGETFUL = 0.02  # of tickets and leases
CANCELLED = 0.02
PIN_AND_FORGET = 2
LEASE_SECONDS = 30.0  # the daemon's own limit is much lower


class Conductor:
    """A scheduler, and what its ranks answer."""

    def __init__(self, folder: Path, runtime_dir: Path, engine: str, seed: int) -> None:
        self.spec = SPECS[engine]
        self._random = random.Random(seed)
        self._phase = phase_word(folder)
        counters = counts(folder, engine)
        self._calls = Calls(engine, counters, folder / "complaints")
        self._folder = folder
        self._mailbox = mailbox(folder, engine)
        self._mailbox.settimeout(NAP_SECONDS)
        self._held: list[LoadTicket] = []  # while it is told to pin
        with self._calls.within(DEADLINE, "Scheduler()"):
            self._scheduler = Scheduler(runtime_dir, engine, deadline=DEADLINE)

    def run(self) -> None:
        """Until the run ends."""
        while self._phase[0] != Phase.END:
            self._calls.counters[Count.ATTACHED] = self._scheduler.attached
            if self._phase[0] == Phase.REST:
                self._let_go()
                self._calls.counters[Count.RESTS] = 1
                time.sleep(NAP_SECONDS)
                continue
            self._calls.counters[Count.RESTS] = 0
            self._turn()
        with self._calls.within(2.5 + DEADLINE, "Scheduler.close"):
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
            with self._calls.within(0.0, "lookup_many"):
                self._scheduler.lookup_many(keys)
            with self._calls.within(DEADLINE, "request_finished"):
                self._scheduler.request_finished(keys)
        elif chance < 0.995:
            with self._calls.within(DEADLINE, "status"):
                self._scheduler.status()
        else:
            with self._calls.within(DEADLINE, "reset"):
                self._scheduler.reset()
        if not self._scheduler.attached:
            time.sleep(NAP_SECONDS)

    # ------------------------------------------------------------- transfers

    def _store(self, group: int, keys: list[bytes]) -> None:
        with self._calls.within(DEADLINE, "prepare_store"):
            ticket = self._scheduler.prepare_store(keys)
        self._calls.add(Count.FULL, ticket.answers.count(StoreAnswer.FULL))
        if not ticket.keys or self._random.random() < FORGETFUL:
            return
        slots, generations = ticket.slots.tolist(), ticket.generations.tolist()
        success = self._have_done("store", group, ticket.keys, slots, generations)
        if self._random.random() < FORGETFUL:
            return
        with self._calls.within(DEADLINE, "complete_store"):
            self._scheduler.complete_store(ticket.keys, success=success)

    def _load(self, group: int, keys: list[bytes]) -> None:
        with self._calls.within(DEADLINE, "prepare_load"):
            ticket = self._scheduler.prepare_load(keys, LEASE_SECONDS)
        if ticket.keys:
            slots, generations = ticket.slots.tolist(), ticket.generations.tolist()
            self._have_done("load", group, ticket.keys, slots, generations)
        if self._random.random() >= FORGETFUL:
            with self._calls.within(DEADLINE, "complete_load"):
                self._scheduler.complete_load(ticket)

    def _pin(self, *, forget: bool) -> None:
        """Take leases over all that is there; keep them, or leave it to time to end them."""
        for group in range(GROUPS):
            with self._calls.within(DEADLINE, "prepare_load"):
                ticket = self._scheduler.prepare_load(self.spec.keys(group), LEASE_SECONDS)
            if not forget:
                self._held.append(ticket)
            self._calls.counters[Count.PINNED] = max(
                self._calls.counters[Count.PINNED], len(ticket)
            )

    def _let_go(self) -> None:
        while self._held:
            with self._calls.within(DEADLINE, "complete_load"):
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


def main() -> None:
    """The command line."""
    folder, runtime_dir, engine, seed = sys.argv[1:]
    Conductor(Path(folder), Path(runtime_dir), engine, int(seed)).run()


if __name__ == "__main__":
    main()
