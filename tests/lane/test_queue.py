from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvd.lane.queue import JobQueue, Limits

WIDE = Limits(jobs=100, nbytes=10_000)


def always(_job: str) -> bool:
    """Every timeline has been reached."""
    return True


def drain(queue: JobQueue[str], ready: Callable[[str], bool] = always) -> list[str]:
    """The jobs in the order in which one-piece jobs would run."""
    order = []
    while (job := queue.next(ready)) is not None:
        order.append(job)
        queue.remove(job)
        queue.check_integrity()
    return order


def test_engines_take_turns_piece_by_piece() -> None:
    """An engine with a long job leaves every other piece to its neighbour."""
    queue: JobQueue[str] = JobQueue(WIDE)
    queue.push("long", engine=1, worker=1, load=True, nbytes=1)
    queue.push("other", engine=2, worker=2, load=True, nbytes=1)
    assert [queue.next(always) for _ in range(4)] == ["long", "other", "long", "other"]


def test_a_worker_whose_timeline_is_behind_holds_up_nobody_else() -> None:
    """The engine's other worker and the other direction go on; its own later jobs wait."""
    queue: JobQueue[str] = JobQueue(WIDE)
    queue.push("behind", engine=1, worker=1, load=True, nbytes=1)
    queue.push("after it", engine=1, worker=1, load=True, nbytes=1)
    queue.push("rank 1", engine=1, worker=2, load=True, nbytes=1)
    queue.push("store", engine=1, worker=1, load=False, nbytes=1)
    assert drain(queue, lambda job: job != "behind") == ["rank 1", "store"]


def test_what_is_waited_for_goes_first() -> None:
    """Prioritized stores precede loads, in their order of arrival, whoever was asked for first."""
    queue: JobQueue[str] = JobQueue(WIDE)
    for name in ("s1", "s2", "s3"):
        queue.push(name, engine=1, worker=1, load=False, nbytes=1)
    queue.push("l1", engine=1, worker=1, load=True, nbytes=1)
    queue.prioritize("s3")
    queue.prioritize("s2")
    queue.prioritize("unknown")
    assert drain(queue) == ["s2", "s3", "l1", "s1"]


def test_waiting_for_many_stores_does_not_hold_up_another_engines_loads() -> None:
    """An engine that waits for its stores takes turns with others that load."""
    queue: JobQueue[str] = JobQueue(WIDE)
    for number in range(3):
        queue.push(f"s{number}", engine=1, worker=1, load=False, nbytes=1)
        queue.prioritize(f"s{number}")
    queue.push("own", engine=1, worker=1, load=True, nbytes=1)
    queue.push("l1", engine=2, worker=2, load=True, nbytes=1)
    queue.push("l2", engine=2, worker=2, load=True, nbytes=1)
    assert drain(queue) == ["s0", "l1", "s1", "l2", "s2", "own"]


def test_a_full_queue_of_one_engine_leaves_anothers_loads_their_place() -> None:
    """However many stores one engine has queued, another's load is next and none of it is shed."""
    queue: JobQueue[str] = JobQueue(Limits(jobs=50, nbytes=1000))
    shed = [queue.push(f"s{n}", engine=1, worker=1, load=False, nbytes=1) for n in range(80)]
    assert sum(map(len, shed)) == 30
    queue.start("s30")
    assert queue.push("l", engine=2, worker=2, load=True, nbytes=500) == []
    assert queue.push("s", engine=2, worker=2, load=False, nbytes=1) == []
    assert drain(queue)[:3] == ["l", "s30", "s"]


def test_a_full_queue_sheds_the_oldest_stores_first() -> None:
    """A new load or store pushes out the oldest store that nobody waits for."""
    queue: JobQueue[str] = JobQueue(Limits(jobs=3, nbytes=1000))
    for name in ("s1", "s2", "s3"):
        assert queue.push(name, engine=1, worker=1, load=False, nbytes=1) == []
    queue.prioritize("s1")
    assert queue.push("l1", engine=1, worker=1, load=True, nbytes=1) == ["s2"]
    assert queue.push("s4", engine=1, worker=1, load=False, nbytes=1) == ["s3"]
    assert queue.push("other", engine=2, worker=2, load=False, nbytes=1) == []


def test_bytes_are_bounded_too() -> None:
    """Stores are shed until the bytes fit; several may go for one large job."""
    queue: JobQueue[str] = JobQueue(Limits(jobs=100, nbytes=100))
    for name in ("s1", "s2", "s3"):
        queue.push(name, engine=1, worker=1, load=False, nbytes=30)
    assert queue.push("big", engine=1, worker=1, load=True, nbytes=60) == ["s1", "s2"]


def test_a_load_is_refused_only_when_loads_fill_the_queue() -> None:
    """With the queue full of loads a new load is refused and the queued ones stay."""
    queue: JobQueue[str] = JobQueue(Limits(jobs=2, nbytes=1000))
    assert queue.push("l1", engine=1, worker=1, load=True, nbytes=1) == []
    assert queue.push("l2", engine=1, worker=1, load=True, nbytes=1) == []
    assert queue.push("l3", engine=1, worker=1, load=True, nbytes=1) == ["l3"]
    assert queue.push("s1", engine=1, worker=1, load=False, nbytes=1) == ["s1"]
    assert drain(queue) == ["l1", "l2"]


def test_a_job_above_the_bound_is_taken_when_it_is_alone() -> None:
    """No job is too large for ever."""
    queue: JobQueue[str] = JobQueue(Limits(jobs=2, nbytes=10))
    assert queue.push("huge", engine=1, worker=1, load=False, nbytes=1000) == []
    queue.start("huge")
    assert queue.push("next", engine=1, worker=1, load=True, nbytes=1000) == []


class QueueMachine(RuleBasedStateMachine):
    """The queue against a list of dicts that is searched from front to back."""

    @initialize(jobs=st.integers(1, 6), nbytes=st.integers(10, 60))
    def make(self, jobs: int, nbytes: int) -> None:
        """An empty queue with small bounds."""
        self.limits = Limits(jobs=jobs, nbytes=nbytes)
        self.queue: JobQueue[int] = JobQueue(self.limits)
        self.model: dict[int, dict[str, int]] = {}
        self.blocked: set[int] = set()
        self.number = 0

    @rule(
        engine=st.integers(0, 2), worker=st.integers(0, 1), load=st.booleans(), n=st.integers(1, 30)
    )
    def push(self, engine: int, worker: int, load: bool, n: int) -> None:
        """Whatever is shed is a store, or the load itself; the bounds hold afterwards."""
        self.number += 1
        shed = self.queue.push(
            self.number, engine=engine, worker=engine * 10 + worker, load=load, nbytes=n
        )
        self.model[self.number] = {
            "engine": engine,
            "worker": engine * 10 + worker,
            "class": 1 if load else 2,
            "load": load,
            "n": n,
            "started": False,
        }
        for job in shed:
            gone = self.model.pop(job)
            assert not gone["started"]
            assert gone["class"] == 2 or job == self.number
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
            self.queue.prioritize(job)
            self.model[job]["class"] = 0
        elif action == "remove":
            self.queue.remove(job)
            del self.model[job]
        elif action == "block":
            self.blocked.add(job)
        else:
            self.blocked.discard(job)

    @rule()
    def take(self) -> None:
        """The next job is its engine's most urgent and oldest; a store only where nobody loads."""

        def ready(job: int) -> bool:
            return job not in self.blocked

        heads: dict[tuple[int, int], int] = {}
        for job, m in sorted(self.model.items()):
            heads.setdefault((m["class"], m["worker"]), job)
        able = [job for job in heads.values() if self.model[job]["started"] or ready(job)]
        got = self.queue.next(ready)
        if not able:
            assert got is None
            return
        assert got in able
        best = min(self.model[job]["class"] == 2 for job in able)  # stores go last
        assert (self.model[got]["class"] == 2) == best
        same = [
            (self.model[job]["class"], job)
            for job in able
            if self.model[job]["engine"] == self.model[got]["engine"]
        ]
        assert got == min(same)[1]
        self.queue.start(got)
        self.model[got]["started"] = True

    @invariant()
    def agrees(self) -> None:
        """The same jobs, and every count right."""
        if hasattr(self, "queue"):
            self.queue.check_integrity()
            assert set(self.queue) == set(self.model)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_what_the_device_has_no_room_for_lets_others_pass() -> None:
    """Where loads cannot be taken now a store goes, also past a load that has started."""
    queue: JobQueue[str] = JobQueue(WIDE)
    queue.push("l1", engine=1, worker=1, load=True, nbytes=1)
    queue.push("s1", engine=1, worker=1, load=False, nbytes=1)
    queue.start("l1")
    assert queue.next(always, lambda job: job.startswith("s")) == "s1"
    assert queue.next(always, lambda _job: False) is None
    assert queue.next(always) == "l1"
