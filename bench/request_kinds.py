"""The kinds of requests that `request_cost.py` asks of a daemon."""

import time

from harness import SECONDS
from raw_session import RawEngine
from step_messages import Steps, places

from kvd_proto.messages import Ping, Step

KEYS = 8
AT_ONCE = 4096  # chunks that are written to fill the pool


class Kind:
    """Requests of one kind, one after another."""

    name: str

    def begin(self, under_way: int) -> None:
        """With so many at a time from now on."""

    def next(self) -> bytes:
        """The next request."""
        raise NotImplementedError

    def took(self, frame: bytes) -> None:
        """The reply to one."""

    def settle(self) -> None:
        """The round is over: bring the daemon back to where it was; not measured."""


class Pings(Kind):
    """The least that a request can be."""

    name = "Ping"

    def __init__(self, engine: RawEngine) -> None:
        self._scheduler = engine.scheduler

    def next(self) -> bytes:
        """Without news."""
        return self._scheduler.frame(Ping())


class StepsKind(Kind):
    """Steps that are alike. What they begin is given up after the round, while there is room."""

    def __init__(self, name: str, engine: RawEngine, steps: Steps) -> None:
        self.name = name
        self._engine = engine
        self._scheduler = engine.scheduler
        self._steps = steps

    def begin(self, under_way: int) -> None:
        """Have loans enough, and not many more."""
        self._steps.under_way = under_way
        self._steps.forget_lost()
        while self._steps.stores and self._steps.at_hand > self._steps.wanted:
            self.took(self._scheduler.exchange(self.next()))
        end = time.monotonic() + SECONDS
        while 2 * self._steps.at_hand < self._steps.wanted:
            frame = self._scheduler.frame(Step(wanted=self._steps.wanted))
            self._steps.took(self._scheduler.exchange(frame))
            if time.monotonic() > end:
                raise RuntimeError(f"only {self._steps.at_hand} slots are lent")

    def next(self) -> bytes:
        """The next step."""
        return self._scheduler.frame(self._steps.next())

    def took(self, frame: bytes) -> None:
        """Take the loans in."""
        self._steps.took(frame)

    def settle(self) -> None:
        """Give all stores up."""
        begun, self._steps.begun = self._steps.begun, []
        self._scheduler.ask(Step(dropped=tuple(chunk.key for chunk in begun)))


class WrittenSteps(StepsKind):
    """The same in a full pool: what they begin becomes READY, and others have to go for it."""

    def settle(self) -> None:
        """Write what was begun, so that it is READY."""
        begun, self._steps.begun = self._steps.begun, []
        if begun:
            self._engine.worker.write(*places(begun))
            self._steps.ready = begun

    def fill(self, slots: int) -> None:
        """Fill the pool with READY chunks."""
        self.begin(1)
        for _ in range(0, slots + KEYS, KEYS):
            self.took(self._scheduler.exchange(self.next()))
            if len(self._steps.begun) >= AT_ONCE:
                self.settle()
        self.settle()


def kinds_of(engine: RawEngine) -> list[Kind]:
    """What a daemon can be asked that has room."""
    empty, stores = Steps(engine.directory), Steps(engine.directory, stores=KEYS)
    empty.loans = stores.loans  # they are the engine's
    return [
        Pings(engine),
        StepsKind("empty Step", engine, empty),
        StepsKind(f"Step, {KEYS} stores", engine, stores),
    ]


def kinds_when_full(engine: RawEngine, slots: int) -> list[Kind]:
    """What is asked of a daemon whose pool is full of READY chunks; fills it."""
    steps = Steps(engine.directory, stores=KEYS)
    stores = WrittenSteps(f"Step, {KEYS} stores, pool full", engine, steps)
    stores.fill(slots)
    busy = Steps(engine.directory, 2, 2, KEYS, ready=steps.ready, loans=steps.loans)
    name = "Step, 2 stores, 2 pins, 2 unpinned, 8 used, pool full"
    return [stores, WrittenSteps(name, engine, busy)]
