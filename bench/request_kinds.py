"""The kinds of requests that `request_cost.py` asks of a daemon."""

from typing import ClassVar

import numpy as np
from harness import fresh_keys
from raw_session import RawEngine, reply_to

from kvd_proto.messages import (
    CompleteStore,
    Ping,
    PrepareStore,
    StoreCompleted,
    StorePrepared,
)

KEYS = 8


class Kind:
    """Requests of one kind, one after another."""

    name: ClassVar[str]

    def begin(self, count: int) -> None:
        """So many are asked next."""

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


class Offers(Kind):
    """Slots for eight new keys, of which there are enough; what was begun is given up later."""

    name = "PrepareStore, 8 keys"

    def __init__(self, engine: RawEngine) -> None:
        self._engine = engine
        self._scheduler = engine.scheduler
        self._keys: list[bytes] = []
        self._at = 0
        self._replies: list[bytes] = []

    def begin(self, count: int) -> None:
        """Make the keys beforehand."""
        self._keys, self._at = fresh_keys(KEYS * count), 0

    def next(self) -> bytes:
        """With the next keys."""
        self._at += KEYS
        return self._scheduler.frame(
            PrepareStore(keys=tuple(self._keys[self._at - KEYS : self._at]))
        )

    def took(self, frame: bytes) -> None:
        """Keep it."""
        self._replies.append(frame)

    def settle(self) -> None:
        """Give all stores up."""
        for reply in self._prepared():
            if len(reply.slots) != KEYS:
                raise RuntimeError("there are too few slots")
        self._ask_completed(success=False)

    def _prepared(self) -> list[StorePrepared]:
        replies, self._replies = self._replies, []
        return [reply_to(frame, StorePrepared) for frame in replies]

    def _ask_completed(self, *, success: bool) -> None:
        request = CompleteStore(keys=tuple(self._keys[: self._at]), success=success)
        reply = self._scheduler.ask(request)
        assert isinstance(reply, StoreCompleted)


class Evictions(Offers):
    """The same where eight chunks have to go for it."""

    name = "PrepareStore, 8 keys, 8 evicted"
    fill = 8192

    def settle(self) -> None:
        """Write what was begun, so that it is READY."""
        replies = self._prepared()
        slots = np.concatenate([reply.slots.numpy() for reply in replies])
        generations = np.concatenate([reply.generations.numpy() for reply in replies])
        self._engine.write(slots, generations)
        self._ask_completed(success=True)


def kinds_of(engine: RawEngine) -> list[Kind]:
    """What a daemon can be asked that has room."""
    return [Pings(engine), Offers(engine)]


def kinds_when_full(engine: RawEngine, slots: int) -> list[Kind]:
    """What is asked of a daemon whose pool is full of READY chunks; fills it."""
    kind = Evictions(engine)
    for _ in range(slots // kind.fill + 1):
        kind.begin(kind.fill // KEYS)
        for _ in range(kind.fill // KEYS):
            kind.took(engine.scheduler.exchange(kind.next()))
        kind.settle()
    return [kind]
