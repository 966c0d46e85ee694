"""The threads that carry parts of batches out, and what waits for them.

Gets and asks go before puts, and one thread at least is never given a put: an engine waits for
what comes up, nobody for what goes down.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from kvd.tier.batches import Kind, Part
from kvd.tier.transfers import Transfers
from kvd.wire.tiering import Outcome
from kvd_proto.directory import SlotState


class Workers:
    """Threads around a backend. All methods are for one other thread.

    Args:
        transfers: carries a part out.
        threads: how many; two at least, or puts would have none.
        ended: called by a thread for each part that has ended.
    """

    def __init__(self, transfers: Transfers, threads: int, ended: Callable[[Part], None]) -> None:
        self._transfers = transfers
        self._ended = ended
        self._ready = threading.Condition()
        self._gets: deque[Part] = deque()
        self._puts: deque[Part] = deque()
        self._running: set[Part] = set()
        self._closed = False
        threads = max(2, threads)
        self._most_puts = threads - 1
        for number in range(threads):
            threading.Thread(target=self._work, name=f"tier-{number}", daemon=True).start()

    @property
    def busy(self) -> int:
        """Parts that a thread is in."""
        return len(self._running)

    @property
    def waiting(self) -> bool:
        """Whether a part waits."""
        return bool(self._gets or self._puts)

    @property
    def queued_bytes(self) -> int:
        """Of parts that wait."""
        with self._ready:
            return sum(part.nbytes for part in (*self._gets, *self._puts))

    def submit(self, parts: Iterable[Part]) -> None:
        """Have these carried out, in their order."""
        with self._ready:
            for part in parts:
                queue = self._puts if part.batch.kind is Kind.PUT else self._gets
                queue.append(part)
            self._ready.notify_all()

    def take_useless(self) -> list[Part]:
        """Take what is late by now, or whose slots have moved on, of what waits.

        Its outcome is set. While all threads hang, nothing waits longer for them than it must.
        """
        now = time.monotonic()
        taken: list[Part] = []
        with self._ready:
            for queue in (self._gets, self._puts):
                if not queue:
                    continue
                parts = list(queue)
                queue.clear()
                for part in parts:
                    (taken if _useless(part, now) else queue).append(part)
        return taken

    def take_all(self) -> list[Part]:
        """Take all that waits; nothing of it is begun."""
        with self._ready:
            taken = [*self._gets, *self._puts]
            self._gets.clear()
            self._puts.clear()
        for part in taken:
            part.batch.fail(Outcome.LATE, "", part.begin, part.end)
        return taken

    def close(self) -> None:
        """Have threads end that have nothing to do, or are done."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()

    def _work(self) -> None:
        while True:
            with self._ready:
                while (part := self._next()) is None:
                    if self._closed:
                        return
                    self._ready.wait()
                self._running.add(part)
            part.batch.begins()
            self._transfers.run(part)
            with self._ready:
                self._running.discard(part)
                self._ready.notify()  # a put may have waited for this one to end
            self._ended(part)

    def _next(self) -> Part | None:
        if self._gets:
            return self._gets.popleft()
        if self._puts:
            puts = sum(part.batch.kind is Kind.PUT for part in self._running)
            if puts < self._most_puts:
                return self._puts.popleft()
        return None

    def __repr__(self) -> str:
        return (
            f"<Workers, {self.busy} busy, {len(self._gets)} gets and {len(self._puts)} puts wait>"
        )


def _useless(part: Part, now: float) -> bool:
    batch = part.batch
    if now > batch.deadline:
        outcome = Outcome.LATE
    elif batch.stale or (batch.kind is not Kind.ASK and not _holds_any(part)):
        outcome = Outcome.GONE
    else:
        return False
    batch.fail(outcome, "", part.begin, part.end)
    return True


def _holds_any(part: Part) -> bool:
    batch = part.batch
    state = SlotState.READY if batch.kind is Kind.PUT else SlotState.WRITING
    return any(
        batch.place.holds(batch.slots[i], batch.generations[i], state, batch.keys[i])
        for i in range(part.begin, part.end)
    )
