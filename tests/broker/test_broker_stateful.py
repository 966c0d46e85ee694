"""The broker's decisions under any order of events: no leaks, one answer to each request."""

import json

from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from kvd.broker.effects import Effect, Notify
from kvd.broker.sessions import Session
from kvd.broker.status_report import status_report
from kvd_proto.messages import (
    Attached,
    Clear,
    Detached,
    Drain,
    Error,
    Fingerprint,
    HostHandle,
    Kind,
    KvEvents,
    Lookups,
    Message,
    Pin,
    Ping,
    Register,
    Reset,
    ResetDone,
    Resume,
    Status,
    Step,
    Stepped,
    Unregister,
)
from tests.broker.brokers import CUDA, PAGE, columns, hello, make_broker, share_done
from tests.broker.lane_rules import DEVICE, IDLE_SECONDS, LaneRules
from tests.exploring import explored
from tests.layouts import flat_layout

WORLD = 2
POOL = 40 * PAGE
PICK = st.integers(0, 50)
PING = Ping(
    lookups=Lookups(chunks=7, hit_chunks=3),
    kv_events=KvEvents(published=5, snapshots=1, overruns=0, lag_us=300),
)
ENGINES = st.sampled_from(["a", "b", "t"])  # t is temporary, otherwise as a
KEYS = [f"key-{i}".encode() for i in range(24)]


class BrokerMachine(LaneRules, RuleBasedStateMachine):
    """Two models, engines of two ranks, two lanes that answer when they like."""

    sessions = Bundle("sessions")

    def __init__(self) -> None:
        RuleBasedStateMachine.__init__(self)
        broker = make_broker(
            POOL, lease_seconds=5, ticket_seconds=5, lane_idle_seconds=IDLE_SECONDS
        )
        LaneRules.__init__(self, broker)
        self.totals: dict[str, float] = {}
        self.lent: list[tuple[Session, bytes, int, int]] = []
        self.loadable: list[tuple[int, int]] = []
        self.request_id = 0
        self.finding: set[int] = set()  # sessions that were told that chunks can be found
        self.start_lane("host")

    # ------------------------------------------------------------- plumbing

    def carried_out(self, effect: Effect) -> None:
        """Note what the broker wants done."""
        match effect:
            case Notify(message=Attached()):
                session = self.broker.state.registry.sessions[effect.session]
                assert session.engine is not None
                assert not session.engine.missing_ranks
                self.finding.add(effect.session)
            case Notify(message=Detached()):
                self.finding.discard(effect.session)
            case _:
                self.carried_out_by_lanes(effect)

    def ask(self, session: Session, message: Message, descriptors: int = 0) -> Message | None:
        """Make a request; its reply, if there is one already."""
        self.request_id += 1
        self.request(session, self.request_id, message, descriptors)
        return next(iter(self.replies.get((session.number, self.request_id), ())), None)

    def alive(self, session: Session) -> bool:
        """Whether the session is still open."""
        return session.number in self.broker.state.registry.sessions

    # ------------------------------------------------------------- sessions

    @rule(
        target=sessions,
        engine=ENGINES,
        kind=st.sampled_from(["scheduler", "worker", "worker", "tool"]),
    )
    def arrive(self, engine: str, kind: Kind) -> Session:
        """A process connects."""
        return self.connect(engine, kind)

    def connect(self, engine: str, kind: Kind) -> Session:
        """A new session that has said HELLO."""
        session = self.connected()
        self.ask(session, hello(kind, engine))
        return session

    @initialize(target=sessions)
    def two_engines(self) -> MultipleResults[Session]:
        """Every run begins with both engines complete."""
        return multiple(*self.bring_up("a"), *self.bring_up("b"))

    @rule(target=sessions, engine=ENGINES, after_a_while=st.booleans())
    def another_engine(self, engine: str, after_a_while: bool) -> MultipleResults[Session]:
        """An engine comes, or what it lacks comes back; perhaps while the idle lane ends."""
        if after_a_while:
            self.leave_lane_idle()
        return multiple(*self.bring_up(engine))

    def bring_up(self, name: str) -> list[Session]:
        """A scheduler and the missing ranks of engine `name`; the lanes do their part.

        The first rank of engine b has CUDA memory.
        """
        self.start_lane("host")
        came = [self.connect(name, "scheduler")]
        for rank in range(WORLD):
            engine = self.broker.state.registry.engines[name]
            if rank not in engine.workers:
                worker = self.connect(name, "worker")
                device = CUDA if (name, rank) == ("b", 0) else "host"
                self.register(session=worker, rank=rank, device=device, descriptors=2)
                came.append(worker)
        self.lanes_work()
        return came

    @rule(
        session=sessions, rank=st.integers(0, WORLD), device=DEVICE, descriptors=st.integers(1, 2)
    )
    def register(self, session: Session, rank: int, device: str, descriptors: int) -> None:
        """A worker registers, perhaps without all descriptors."""
        if not self.alive(session):
            return
        name = session.engine.name if session.engine is not None else ""
        pages = 2 if name == "b" else 1
        self.ask(
            session,
            Register(
                rank=rank,
                world_size=WORLD,
                device=device,
                fingerprint=Fingerprint(model=f"model-{pages}"),
                layout=flat_layout(pages * PAGE),
                handles=(HostHandle(fd_index=1),),
                temporary=name == "t",
            ),
            descriptors,
        )

    @rule(session=sessions)
    def unregister(self, session: Session) -> None:
        """A worker takes its memory back."""
        if self.alive(session):
            self.ask(session, Unregister())

    @rule(session=consumes(sessions))
    def die(self, session: Session) -> None:
        """A process is gone."""
        if self.alive(session):
            self.lose(session)

    # --------------------------------------------------------------- chunks

    @rule(
        session=sessions,
        keys=st.lists(st.sampled_from(KEYS), max_size=12),
        dropped=st.lists(st.sampled_from(KEYS), max_size=4),
        used=st.lists(st.sampled_from(KEYS), max_size=4),
        wanted=st.sampled_from([0, 4, 40]),
        others=st.integers(0, 5),
    )
    def step(
        self,
        session: Session,
        keys: list[bytes],
        dropped: list[bytes],
        used: list[bytes],
        wanted: int,
        others: int,
    ) -> None:
        """A scheduler steps; some of the slots that it names may be another's, or not on loan."""
        if not self.alive(session):
            return
        lent = [(slot, generation) for s, _, slot, generation in self.lent if s is session]
        foreign = [(slot, generation) for _, _, slot, generation in self.lent[-others:]]
        refs = [*reversed(lent), *(foreign if others else [])][: len(keys)]
        reply = self.ask(
            session,
            Step(
                dropped=tuple(dropped),
                keys=tuple(keys[: len(refs)]),
                used=tuple(used),
                wanted=wanted,
                refused=len(keys) - len(refs),
                **columns(refs),
            ),
        )
        if isinstance(reply, Error):
            return
        assert isinstance(reply, Stepped)
        assert session.number in self.finding
        assert session.engine is not None
        assert session.engine.namespace is not None
        assert not (self.broker.state.draining and len(reply.slots))
        devices = {w.registration.device for w in session.engine.workers.values() if w.registration}
        is_bound = self.executed[CUDA] == self.bindings[CUDA]
        assert is_bound or not len(reply.slots) or devices == {"host"}
        namespace = session.engine.namespace
        slots, generations = reply.slots.tolist(), reply.generations.tolist()
        for slot, generation in zip(slots, generations, strict=True):
            assert namespace.directory.is_lent(slot, generation)
            self.lent.append((session, namespace.id, slot, generation))

    @rule(
        engine=ENGINES,
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=16, unique=True),
        ranks=st.lists(st.integers(0, WORLD - 1), max_size=3),
    )
    def store(self, engine: str, keys: list[bytes], ranks: list[int]) -> None:
        """A complete engine stores: slots, keys, and shares."""
        present = self.broker.state.registry.engines.get(engine)
        if present is None or not present.attached:
            return
        schedulers = [s for s in present.sessions.values() if s.kind == "scheduler"]
        if not schedulers:
            return
        session, before = schedulers[0], len(self.lent)
        self.step(session=session, keys=[], dropped=[], used=[], wanted=2 * len(keys), others=0)
        positions = range(max(before, len(self.lent) - len(keys)), len(self.lent))
        self.step(session=session, keys=keys, dropped=[], used=[], wanted=0, others=0)
        for rank in ranks:
            for position in positions:
                self.report_share(rank=rank, ok=True, pick=2 * position, single=True)

    @rule(rank=st.integers(0, WORLD - 1), ok=st.sampled_from([True] * 7 + [False]), pick=PICK)
    def report_share(self, rank: int, ok: bool, pick: int, single: bool = False) -> None:
        """The lane reports one rank's share, maybe late, maybe twice."""
        if not self.lent:
            return
        session, namespace, slot, generation = self.lent[pick // 2 % len(self.lent)]
        engine = session.engine
        worker = engine.workers.get(rank) if engine is not None else None
        if worker is None or worker.registration is None:
            return
        refs = [(slot, generation)]
        if pick % 2 and not single:
            refs += [(slot, generation) for s, _, slot, generation in self.lent if s is session][
                -8:
            ]
        if worker.registration.device in self.up:
            self.from_lane(share_done(worker, namespace, refs, ok=ok), worker.registration.device)

    @rule(
        session=sessions,
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=8),
        late=st.booleans(),
        number=st.integers(1, 4),
        given_back=st.lists(st.integers(1, 4), max_size=2),
    )
    def load(
        self, session: Session, keys: list[bytes], late: bool, number: int, given_back: list[int]
    ) -> None:
        """A scheduler pins what it has found, perhaps long ago, and gives leases back."""
        if not self.alive(session) or session.engine is None or session.engine.namespace is None:
            return
        entry = session.engine.namespace.table.directory.entry
        refs = [chunk[:2] for key in keys if (chunk := entry(key)) is not None]
        if late:
            refs, self.loadable = self.loadable, refs
        pins = (Pin(lease=number, lease_ms=3000, **columns(refs)),)
        reply = self.ask(session, Step(pins=pins, unpinned=tuple(given_back)))
        assert not isinstance(reply, Stepped) or session.number in self.finding

    @rule(
        session=sessions,
        message=st.sampled_from([Ping(), PING, Status(), Drain(), Resume(), Resume()]),
    )
    def other_requests(self, session: Session, message: Message) -> None:
        """The requests that are answered at once."""
        if self.alive(session):
            drained = self.broker.state.draining
            assert self.ask(session, message) is not None
            if session.kind != "tool" or not isinstance(message, Drain | Resume):
                assert self.broker.state.draining == drained
            else:
                assert self.broker.state.draining == isinstance(message, Drain)

    @rule(session=sessions)
    def reset(self, session: Session) -> None:
        """A scheduler drops all chunks of its namespace."""
        if self.alive(session):
            assert isinstance(self.ask(session, Reset()), ResetDone | Error)

    @rule(session=sessions, one=st.booleans(), unused=st.sampled_from([None, 0, 4]), pick=PICK)
    def drop_chunks(self, session: Session, one: bool, unused: int | None, pick: int) -> None:
        """An operator clears at once, or what is of no use, which takes its time."""
        namespaces = list(self.broker.state.namespaces or ())
        if self.alive(session) and namespaces:
            ns_id = namespaces[pick % len(namespaces)].id if one else None
            reply = self.ask(session, Clear(namespace=ns_id, unused_seconds=unused))
            assert (reply is None) == (session.kind == "tool" and unused is not None)

    @rule(turns=st.integers(1, 6))
    def turn(self, turns: int) -> None:
        """The broker's loop turns."""
        for _ in range(turns):
            self.carry_out(self.broker.background.work())

    @rule(seconds=st.floats(0.1, 8), silent=st.sampled_from([False, False, False, True]))
    def time_passes(self, seconds: float, silent: bool = False) -> None:
        """Deadlines come; silent lanes are killed."""
        self.pass_time(seconds, [] if silent else sorted(self.up))

    # ----------------------------------------------------------- invariants

    @invariant()
    def chunks_are_found_where_they_can_be_loaded(self) -> None:
        """Sessions know whether all ranks are here, each with its memory in a lane that is up."""
        for session in self.broker.state.registry.sessions.values():
            engine = session.engine
            ranks = engine.workers.values() if engine is not None else ()
            devices = {w.registration.device for w in ranks if w.registration is not None}
            served = (
                engine is not None
                and engine.namespace is not None
                and devices <= self.up
                and all(worker.imported for worker in ranks)
            )
            assert (session.number in self.finding) == served, session

    @invariant()
    def state_is_sound(self) -> None:
        """Everything that can be checked holds, and nothing was answered twice."""
        self.check()
        assert set(self.broker.state.lanes) == self.wanted

    @invariant()
    def the_report_is_honest(self) -> None:
        """Ready where all checks are ok, totals never fall, and it can be sent."""
        report = status_report(self.broker.state, 1, "test", self.now)
        assert report["ready"] == all(check["ok"] for check in report["checks"])
        json.dumps(report)
        totals = {name: n for name, n in report["counters"].items() if not isinstance(n, dict)}
        for name, value in self.totals.items():
            assert totals[name] >= value, name
        self.totals = totals

    def settle(self) -> None:
        """The lanes and the broker do all that is to be done."""
        self.lanes_work()
        while self.broker.background.busy:
            self.turn(turns=1)
            self.lanes_work()

    def teardown(self) -> None:
        """When all is quiet, every request is answered and nothing is held."""
        self.lanes_work()
        self.time_passes(30.0)
        self.settle()
        self.check_answered()
        self.check_nothing_held()


TestBroker = BrokerMachine.TestCase
TestBroker.settings = explored(25, 50)
