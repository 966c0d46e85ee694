"""Work that takes longer than a turn of the daemon's loop may: it goes on in pieces.

A task is a generator. It yields its effects after each piece of a few milliseconds, and
engines are served before the next piece. Tasks take turns. No request waits for the rest: slots
that a reset has left behind are freed, and policies and miss-ratio curves learn.
"""

from collections import deque
from collections.abc import Iterator
from typing import TypeAlias

from kvd.broker.effects import Effect
from kvd.broker.state import BrokerState
from kvd.cache.namespaces import Namespace
from kvd.errors import Refusal
from kvd_proto.messages import ErrorCode

MAX_TASKS = {"sweeps": 16, "checks": 4}
"""At most so many of these kinds at a time; `sweeps` are evictions."""

Task: TypeAlias = Iterator[list[Effect]]


class Background:
    """The tasks that are under way."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self._tasks: deque[tuple[str, Task]] = deque()
        self._learners: list[Namespace] = []  # what of these there is to learn

    def learn(self) -> None:
        """Have every namespace learn what is due, piece by piece."""
        self._learners = self._state.open_namespaces

    def start(self, kind: str, task: Task) -> None:
        """Begin a task with the next `work`; refused where too many of its kind are under way."""
        most = MAX_TASKS.get(kind)
        if most is not None and sum(kind == other for other, _ in self._tasks) >= most:
            raise Refusal(
                ErrorCode.LIMIT,
                f"{most} {kind} are under way, no more are allowed; try again when they have ended",
                limit=kind,
            )
        self._tasks.append((kind, task))

    @property
    def busy(self) -> bool:
        """Whether there is `work` to do."""
        return bool(self._tasks) or self._unswept is not None or bool(self._learners)

    def work(self) -> list[Effect]:
        """Do a piece of the next task, and one of what resets have left."""
        if (unswept := self._unswept) is not None:
            unswept.table.sweep()
        if self._learners and not self._learners[-1].table.learn():
            self._learners.pop()
        while self._tasks:
            kind, task = self._tasks.popleft()
            effects = next(task, None)
            if effects is not None:
                self._tasks.append((kind, task))
                return effects
        return []

    @property
    def _unswept(self) -> Namespace | None:
        """A namespace that a reset has left something in; looked for in every turn of the loop."""
        if (namespaces := self._state.namespaces) is not None:
            for namespace in namespaces:
                if not namespace.table.is_swept:
                    return namespace
        return None

    def __repr__(self) -> str:
        return f"<Background {[kind for kind, _ in self._tasks]}>"
