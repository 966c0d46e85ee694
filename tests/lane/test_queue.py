"""Which job is next, and which one goes when an engine has too many."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvd.lane.queue import JobQueue, QueuedJob, QueueLimits


@dataclass(eq=False, kw_only=True)
class Named(QueuedJob):
    """A job with a name."""

    name: str


class Queue:
    """A queue of jobs by name: that of a load begins with l, that of a store with s."""

    def __init__(self, jobs: int = 100, nbytes: int = 10_000) -> None:
        self.inner: JobQueue[Named] = JobQueue(QueueLimits(jobs, nbytes))
        self.jobs: dict[str, Named] = {}

    def push(self, name: str, engine: int = 1, worker: int = 1, nbytes: int = 1) -> list[str]:
        """The names of what has no place."""
        job = Named(
            name=name,
            engine=engine,
            worker=(engine, worker),
            load=name.startswith("l"),
            nbytes=nbytes,
        )
        self.jobs[name] = job
        return [shed.name for shed in self.inner.push(job)]

    def next(
        self, ready: Callable[[str], bool] = bool, *, loads: bool = True, stores: bool = True
    ) -> str | None:
        """By name."""
        job = self.inner.next(lambda job: ready(job.name), loads=loads, stores=stores)
        return None if job is None else job.name


def test_engines_take_turns_piece_by_piece() -> None:
    """An engine with a long job leaves every other piece to its neighbour."""
    queue = Queue()
    queue.push("long")
    queue.push("lower", engine=2)
    assert [queue.next() for _ in range(4)] == ["long", "lower", "long", "lower"]


def test_a_full_queue_of_one_engine_leaves_anothers_loads_their_place() -> None:
    """However many stores one engine has queued, another's load is next and none of it is shed."""
    queue = Queue(jobs=50, nbytes=1000)
    shed = [queue.push(f"s{n}") for n in range(80)]
    assert sum(map(len, shed)) == 30
    queue.inner.start(queue.jobs["s30"])
    assert queue.push("l", engine=2, nbytes=500) == []
    assert queue.push("s", engine=2) == []
    order = []
    for _ in range(3):
        order.append(queue.next())
        queue.inner.remove(queue.jobs[str(order[-1])])
    assert order == ["l", "s30", "s"]


class QueueMachine(RuleBasedStateMachine):
    """The queue against a list of dicts that is searched from front to back."""

    @initialize(jobs=st.integers(1, 6), nbytes=st.integers(10, 60))
    def make(self, jobs: int, nbytes: int) -> None:
        """An empty queue with small bounds."""
        self.limits = QueueLimits(jobs=jobs, nbytes=nbytes)
        self.queue = Queue(jobs, nbytes)
        self.model: dict[str, dict[str, Any]] = {}
        self.blocked: set[str] = set()
        self.number = 0

    @rule(
        engine=st.integers(0, 2), worker=st.integers(0, 1), load=st.booleans(), n=st.integers(1, 30)
    )
    def push(self, engine: int, worker: int, load: bool, n: int) -> None:
        """Whatever is shed is a store, or the load itself; the bounds hold afterwards."""
        self.number += 1
        name = f"{'l' if load else 's'}{self.number:04}"
        shed = self.queue.push(name, engine, worker, n)
        self.model[name] = {
            "engine": engine,
            "worker": (engine, worker),
            "class": 1 if load else 2,
            "n": n,
            "started": False,
        }
        for job in shed:
            gone = self.model.pop(job)
            assert not gone["started"]
            assert gone["class"] == 2 or job == name
            assert gone["engine"] == engine
        waiting = [m for m in self.model.values() if m["engine"] == engine and not m["started"]]
        if len(waiting) > 1 and any(m["class"] == 2 for m in waiting):
            assert len(waiting) <= self.limits.jobs
            assert sum(m["n"] for m in waiting) <= self.limits.nbytes

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        """Prioritize, remove, block or unblock any job."""
        job = data.draw(st.sampled_from(sorted(self.model)))
        action = data.draw(st.sampled_from(["prioritize", "remove", "block", "unblock"]))
        if action == "prioritize":
            self.queue.inner.prioritize(self.queue.jobs[job])
            self.model[job]["class"] = 0
        elif action == "remove":
            self.queue.inner.remove(self.queue.jobs[job])
            del self.model[job]
        elif action == "block":
            self.blocked.add(job)
        else:
            self.blocked.discard(job)

    @rule(room=st.sampled_from(["ls", "ls", "l", "s", ""]))
    def take(self, room: str) -> None:
        """The next job is its engine's most urgent and oldest for which there is room.

        A store that nobody waits for comes only where nothing else can move.
        """

        def ready(job: str) -> bool:
            return job not in self.blocked

        heads: dict[tuple[int, tuple[int, int], str], str] = {}
        for job, m in self.model.items():
            heads.setdefault((m["class"], m["worker"], job[0]), job)
        able = [
            job
            for job in heads.values()
            if job[0] in room and (self.model[job]["started"] or ready(job))
        ]
        got = self.queue.next(ready, loads="l" in room, stores="s" in room)
        if not able:
            assert got is None
            return
        assert got is not None
        assert got in able
        best = min(self.model[job]["class"] == 2 for job in able)  # stores go last
        assert (self.model[got]["class"] == 2) == best
        same = [
            (self.model[job]["class"], job[1:], job)
            for job in able
            if self.model[job]["engine"] == self.model[got]["engine"]
        ]
        assert got == min(same)[2]
        others = [
            m["class"] if m["engine"] == self.model[got]["engine"] else -1
            for job, m in self.model.items()
            if job[0] == got[0]
        ]
        taken = self.queue.jobs[got]
        is_contended = min(others) < self.model[got]["class"]
        assert self.queue.inner.is_contended(taken) == is_contended
        self.queue.inner.start(taken)
        self.model[got]["started"] = True

    @invariant()
    def agrees(self) -> None:
        """The same jobs, and every count right."""
        if hasattr(self, "queue"):
            self.queue.inner.check_integrity()
            assert {job.name for job in self.queue.inner} == set(self.model)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
