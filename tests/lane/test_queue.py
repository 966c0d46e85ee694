"""The order of a lane's jobs: which is next, what each engine and urgency gets, and the limits."""

import random
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvd.lane.queue import FLOOR_PART, JobQueue, QueuedJob, QueueLimits, Urgency

LOADS = (Urgency.AWAITED_LOAD, Urgency.LOAD)
AWAITED = (Urgency.AWAITED_LOAD, Urgency.AWAITED_STORE)


def test_engines_take_turns_by_bytes() -> None:
    """An engine with small pieces moves several for each large one of its neighbour."""
    queue = JobQueue[QueuedJob]()
    small, large = (QueuedJob(engine=e, worker=e, load=True, nbytes=99) for e in ("small", "large"))
    order = []
    for job in (small, large):
        queue.push(job)
    for _ in range(10):
        turn = queue.next(bool)
        assert turn is not None
        queue.count_moved(turn, 1 if turn is small else 4)
        order.append(turn.engine)
    assert order == [*["small", "large"], *["small"] * 4, "large", *["small"] * 3]


@dataclass
class Expected:
    """What the queue is to know of a job."""

    urgency: Urgency
    started: bool = False


class QueueMachine(RuleBasedStateMachine):
    """The queue against a dict of jobs that is searched from front to back."""

    @initialize(num_jobs=st.integers(1, 9), nbytes=st.integers(10, 150))
    def make(self, num_jobs: int, nbytes: int) -> None:
        """An empty queue with small bounds."""
        self.limits = QueueLimits(num_jobs, nbytes)
        self.queue = JobQueue[QueuedJob](self.limits)
        self.model: dict[QueuedJob, Expected] = {}
        self.blocked: set[QueuedJob] = set()

    @rule(
        engine=st.integers(0, 1), worker=st.integers(0, 1), load=st.booleans(), n=st.integers(1, 30)
    )
    def push(self, engine: int, worker: int, load: bool, n: int) -> None:
        """Whatever is shed is a store, or the load itself; the bounds hold afterwards."""
        job = QueuedJob(engine=engine, worker=(engine, worker), load=load, nbytes=n)
        self.model[job] = Expected(Urgency.LOAD if load else Urgency.STORE)
        for shed in self.queue.push(job):
            expected = self.model.pop(shed)
            assert not expected.started
            assert expected.urgency is Urgency.STORE or shed is job
            assert shed.engine == engine
        waiting = [
            job for job, known in self.model.items() if job.engine == engine and not known.started
        ]
        if len(waiting) > 1 and any(self.model[job].urgency is Urgency.STORE for job in waiting):
            assert len(waiting) <= self.limits.jobs
            assert sum(job.nbytes for job in waiting) <= self.limits.nbytes

    @precondition(lambda self: self.model)
    @rule(data=st.data(), action=st.sampled_from(["prioritize", "remove", "block", "unblock"]))
    def touch(self, data: st.DataObject, action: str) -> None:
        """Prioritize, remove, block or unblock any job."""
        job = data.draw(st.sampled_from(list(self.model)))
        if action == "prioritize":
            self.queue.prioritize(job)
            self.model[job].urgency = Urgency.AWAITED_LOAD if job.load else Urgency.AWAITED_STORE
        elif action == "remove":
            self.queue.remove(job)
            del self.model[job]
        elif action == "block":
            self.blocked.add(job)
        else:
            self.blocked.discard(job)

    @rule(
        room=st.sampled_from(["loads and stores", "loads and stores", "loads", "stores", ""]),
        nbytes=st.integers(0, 9),
    )
    def take(self, room: str, nbytes: int) -> None:
        """A job comes if any may move: its engine's oldest of that urgency that may."""
        loads, stores = "loads" in room, "stores" in room
        heads: dict[tuple[object, ...], QueuedJob] = {}
        for job, known in self.model.items():  # the oldest first
            heads.setdefault((known.urgency, job.worker), job)
        able = [
            job
            for job in heads.values()
            if (loads if job.load else stores)
            and (self.model[job].started or job not in self.blocked)
        ]
        taken = self.queue.next(lambda job: job not in self.blocked, loads=loads, stores=stores)
        if taken is None:
            assert not able
            return
        urgency = self.model[taken].urgency
        line = [job for job in able if self.model[job].urgency is urgency]
        assert taken is next(job for job in line if job.engine == taken.engine)
        assert self.queue.is_contended(taken) == any(
            other.engine != taken.engine or known.urgency < urgency
            for other, known in self.model.items()
            if other.load == taken.load
        )
        self.queue.start(taken)
        self.model[taken].started = True
        if nbytes:  # else it ends without a transfer
            self.queue.count_moved(taken, nbytes)

    @invariant()
    def agrees(self) -> None:
        """The same jobs, and every count right."""
        self.queue.check_integrity()
        assert set(self.queue) == set(self.model)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@dataclass(frozen=True, eq=False)
class Flow:
    """One engine's jobs of one urgency: there is always one, of some pieces of some bytes.

    A flow that is not `steady` may move only now and then.
    """

    engine: int
    urgency: Urgency
    piece: int
    num_pieces: int
    steady: bool


FLOWS = st.lists(
    st.builds(
        Flow,
        engine=st.integers(0, 4),
        urgency=st.sampled_from(Urgency),
        piece=st.integers(4, 16),
        num_pieces=st.integers(1, 9),
        steady=st.integers(0, 3).map(bool),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda flow: (flow.engine, flow.urgency),
)
SLACK = (FLOOR_PART + 4) * 16  # one turn, of the largest piece
WINDOW = 3 * FLOOR_PART * SLACK


@dataclass
class Simulation:
    """A queue of flows over a device: of one room, or of one for each direction.

    Args:
        rates: bytes of loads and of stores in a unit of time; None: one room for both.
    """

    flows: list[Flow]
    rates: tuple[int, int] | None
    random: random.Random
    moved: Counter[Flow] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.queue = JobQueue[QueuedJob]()
        self.pieces_left: dict[QueuedJob, int] = {}
        self.flow_of: dict[QueuedJob, Flow] = {}
        self.busy_until = {True: 0.0, False: 0.0}  # by whether it is of loads
        self.now = 0.0
        for flow in self.flows:
            self._push(flow)

    def _push(self, flow: Flow) -> None:
        key: tuple[Hashable, ...] = (flow.engine, flow.urgency)
        load = flow.urgency in LOADS
        job = QueuedJob(engine=flow.engine, worker=key, load=load, nbytes=1)
        self.flow_of[job], self.pieces_left[job] = flow, flow.num_pieces
        self.queue.push(job)
        if flow.urgency in AWAITED:
            self.queue.prioritize(job)

    def run(self, nbytes: int, may_move: Callable[[Flow], bool]) -> None:
        """Move so many bytes, of flows that may."""
        while nbytes > 0:
            free = {load: until <= self.now for load, until in self.busy_until.items()}
            if self.rates is None:
                free = dict.fromkeys(free, all(free.values()))
            job = self.queue.next(
                lambda job: may_move(self.flow_of[job]), loads=free[True], stores=free[False]
            )
            if job is None:
                later = [until for until in self.busy_until.values() if until > self.now]
                self.now = min(later, default=self.now + 1)
                continue
            nbytes -= self._move(job)

    def _move(self, job: QueuedJob) -> int:
        flow = self.flow_of[job]
        rate = 1 if self.rates is None else self.rates[0 if job.load else 1]
        self.busy_until[job.load] = self.now + flow.piece / rate
        self.queue.count_moved(job, flow.piece)
        self.moved[flow] += flow.piece
        self.pieces_left[job] -= 1
        if not self.pieces_left[job]:
            self.queue.remove(job)
            del self.flow_of[job], self.pieces_left[job]
            self._push(flow)
        return flow.piece

    def of(self, *urgencies: Urgency) -> int:
        """Bytes that jobs of these urgencies have moved."""
        return sum(nbytes for flow, nbytes in self.moved.items() if flow.urgency in urgencies)


def steady_flows(*flows: tuple[int, Urgency]) -> list[Flow]:
    """Flows of these engines and urgencies that may always move."""
    return [Flow(engine, urgency, 16, 3, steady=True) for engine, urgency in flows]


@given(
    flows=FLOWS,
    rates=st.none() | st.tuples(st.integers(1, 9), st.integers(1, 9)),
    seed=st.integers(0, 2**32),
    before=st.integers(0, 9 * SLACK),
)
@example(  # stores that are nine times as fast bring no load nearer to its floor
    steady_flows((0, Urgency.AWAITED_LOAD), (1, Urgency.LOAD), (1, Urgency.STORE)), (1, 9), 1, 0
)
@example(  # a store that may not start saves no turns
    steady_flows((0, Urgency.AWAITED_LOAD), (1, Urgency.STORE)), None, 6, 4 * WINDOW
)
@example(steady_flows((0, Urgency.AWAITED_STORE), (1, Urgency.LOAD), (2, Urgency.LOAD)), None, 1, 0)
@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.generate])
def test_every_engine_and_urgency_gets_its_floor(
    flows: list[Flow], rates: tuple[int, int] | None, seed: int, before: int
) -> None:
    """Of any mix of jobs, whatever moved before, each gets its part of its direction's bytes.

    Loads that are waited for keep seven eighths. Engines of one urgency get equal parts, and stores
    that are waited for as much for each engine as other loads.
    """
    chance = random.Random(seed)
    simulation = Simulation(flows, rates, chance)
    early = {flow: chance.choice([0.0, 0.5, 1.0]) for flow in flows}
    early[flows[0]] = 1.0
    simulation.run(before, lambda flow: chance.random() < early[flow])
    steady = [flow for flow in flows if flow.steady] or flows
    simulation.moved.clear()
    simulation.run(WINDOW, lambda flow: flow in steady or chance.random() < 0.3)
    of, everything = simulation.of, simulation.moved.total()
    num_engines = Counter(flow.urgency for flow in flows)
    for flow in steady:
        if rates is not None:
            everything = of(*(u for u in Urgency if (u in LOADS) == (flow.urgency in LOADS)))
        part = of(flow.urgency)
        assert part >= everything / FLOOR_PART - SLACK
        if flow.urgency is Urgency.AWAITED_LOAD:
            assert part >= everything * (1 - 3 / FLOOR_PART) - SLACK
        assert simulation.moved[flow] >= part / num_engines[flow.urgency] - SLACK
    pair = (Urgency.AWAITED_STORE, Urgency.LOAD)
    is_pair = set(pair) <= {flow.urgency for flow in steady}
    if rates is None and is_pair and Urgency.AWAITED_LOAD not in num_engines:
        stores, loads = (of(urgency) / num_engines[urgency] for urgency in pair)
        assert abs(stores - loads) <= SLACK
