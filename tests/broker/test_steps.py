"""A scheduler's step: what it says is carried out, and what the broker lends."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvd.broker.broker import Broker
from kvd.broker.effects import ChunksReady, Effect, ToLane
from kvd.broker.sessions import Session
from kvd.cache.chunks import ChunkTable
from kvd.wire.link import Revoke, Revoked, ShareDone
from kvd_proto.directory import LookupResult
from kvd_proto.jobs import IntArray
from kvd_proto.messages import (
    LABEL_ONLY,
    MAX_FINISHED,
    Drain,
    ErrorCode,
    Fingerprint,
    Label,
    Pin,
    Resume,
    Step,
    Stepped,
)
from tests.broker.brokers import (
    PAGE,
    join,
    lane_up,
    make_broker,
    mapped,
    refusal,
    register,
    replies,
)

Ref = tuple[int, int]


def bring_up(broker: Broker, engine: str = "e", model: str = "m") -> Session:
    """The scheduler of an engine of one rank, which is attached."""
    scheduler, worker = join(broker, "scheduler", engine), join(broker, "worker", engine)
    broker.request(worker, 2, register(fingerprint=Fingerprint(model=model)), 0.0, 2)
    mapped(broker, worker)
    return scheduler


class Bench:
    """A broker with a lane and an engine of one rank."""

    def __init__(self, chunks: int = 64, **settings: Any) -> None:
        self.broker = make_broker(chunks * PAGE, **settings)
        lane_up(self.broker)
        self.scheduler = bring_up(self.broker)
        self.worker = next(iter(self.engine(self.scheduler).workers.values()))

    @staticmethod
    def engine(session: Session) -> Any:
        """The engine of a session."""
        assert session.engine is not None
        return session.engine

    def table(self, session: Session | None = None) -> ChunkTable:
        """The table of an engine's namespace."""
        table: ChunkTable = self.engine(session or self.scheduler).namespace.table
        return table

    def step(
        self, session: Session | None = None, now: float = 1.0, **fields: Any
    ) -> tuple[list[Ref], list[Effect]]:
        """What a step is lent, and everything that follows from it."""
        effects = self.broker.request(session or self.scheduler, 3, Step(**fields), now)
        (reply,) = replies(effects)
        assert isinstance(reply.message, Stepped)
        slots, generations = reply.message.slots.numpy(), reply.message.generations.numpy()
        return list(zip(slots.tolist(), generations.tolist(), strict=True)), effects

    def reserve(self, slots: int, now: float = 1.0) -> list[Ref]:
        """What the engine is lent of so many slots, which it needs for bulk work."""
        self.step(now=now)  # what the first step says is no bulk work
        return self.step(wanted=slots, now=now)[0]

    def begin(
        self, keys: list[bytes], refs: list[Ref], session: Session | None = None, **fields: Any
    ) -> list[Effect]:
        """Keys get these slots."""
        return self.step(
            session,
            keys=tuple(keys),
            slots=IntArray.of([slot for slot, _ in refs], "u4"),
            generations=IntArray.of([generation for _, generation in refs], "u8"),
            **fields,
        )[1]

    def share(self, refs: list[Ref]) -> list[Effect]:
        """The lane reports the rank's share of these slots."""
        n = len(refs)
        report = ShareDone(
            session=self.worker.number,
            rank=0,
            namespace=self.engine(self.worker).namespace.id,
            slots=IntArray.of([slot for slot, _ in refs], "u4"),
            generations=IntArray.of([generation for _, generation in refs], "u8"),
            first=IntArray.of([0] * n, "u2"),
            count=IntArray.of([1] * n, "u2"),
            groups=IntArray.of([0] * n, "u2"),
            ok=True,
        )
        return self.broker.supervision.received("host", report, 1.0)

    def answer(self, effects: list[Effect]) -> None:
        """The lane has nothing under way in the slots that are called back."""
        for effect in effects:
            match effect:
                case ToLane(message=Revoke() as revoke):
                    answer = Revoked(
                        namespace=revoke.namespace,
                        slots=revoke.slots,
                        generations=revoke.generations,
                    )
                    self.broker.supervision.received("host", answer, 1.0)


def revoked(effects: list[Effect]) -> list[Ref]:
    """The slots that lanes are to leave."""
    refs: list[Ref] = []
    for effect in effects:
        match effect:
            case ToLane(message=Revoke(slots=slots, generations=generations)):
                refs += zip(slots.numpy().tolist(), generations.numpy().tolist(), strict=True)
    return sorted(refs)


def watch_uses(table: ChunkTable) -> list[tuple[object, ...]]:
    """What the table is told of requests from now on, in a list that grows."""
    uses = list[tuple[object, ...]]()
    finish = table.finish_request

    def finish_request(keys: Sequence[bytes], num_prompt: int, label: int, now: float) -> None:
        uses.append((keys, num_prompt, label, now))
        finish(keys, num_prompt, label, now)

    table.finish_request = finish_request  # type: ignore[method-assign]
    return uses


def pin(number: int, refs: list[Ref]) -> Pin:
    """A lease of ten seconds on these chunks."""
    return Pin(
        lease=number,
        lease_ms=10_000,
        slots=IntArray.of([slot for slot, _ in refs], "u4"),
        generations=IntArray.of([generation for _, generation in refs], "u8"),
    )


def test_a_step_does_all_that_it_says() -> None:
    """Stores begin and are dropped, chunks are pinned and let go, and slots are lent."""
    bench = Bench()
    refs, _ = bench.step(wanted=8)
    assert len(refs) == 8
    bench.begin([b"a", b"b", b"c"], refs[:3], wanted=8)
    directory = bench.table().directory
    assert directory.lookup_many([b"a", b"b", b"c"]) == [LookupResult.HIT_PENDING] * 3
    assert ChunksReady(bench.engine(bench.scheduler).number) in bench.share(refs[:2])
    more, effects = bench.step(dropped=(b"c",), pins=(pin(1, refs[:2]),), used=(b"a", b"b"))
    assert more == []
    assert revoked(effects) == refs[2:3]
    assert directory.lookup_many([b"a", b"b", b"c"]) == [1, 1, 0]
    assert bench.table().slots.stats()["pinned"] == 2
    bench.step(unpinned=(1, 2))
    assert bench.table().slots.stats()["pinned"] == 0
    bench.answer(effects)
    bench.broker.state.check_integrity()


def test_each_request_of_a_step_counts() -> None:
    """One use of its chunks each, in the order in which they ended; the last one is the newest."""
    bench = Bench()
    refs = bench.reserve(4)
    bench.begin([b"a", b"b", b"c", b"d"], refs)
    bench.share(refs)
    table = bench.table()
    uses = watch_uses(table)
    bench.step(
        now=2.0,
        used=(b"c", b"d", b"a", b"b", b"a"),
        used_counts=IntArray.of((2, 2, 1), "u4"),
        prompt_counts=IntArray.of((1, 2, 0), "u4"),
        labels=bytes((Label.DONE, Label.NONE, LABEL_ONLY | Label.LATER)),
    )
    assert uses == [
        ((b"c", b"d"), 1, Label.DONE, 2.0),
        ((b"a", b"b"), 2, Label.NONE, 2.0),
        ((b"a",), 0, LABEL_ONLY | Label.LATER, 2.0),
    ]
    assert [table.directory.key(slot) for slot in table.slots.policy.order()] == [
        *(b"d", b"c", b"b", b"a"),
    ]
    assert table.curve is not None
    assert table.curve.requests == 2


def test_only_a_served_engines_scheduler_steps() -> None:
    """Others are told why; nothing of what they said is done."""
    broker = make_broker(64 * PAGE)
    lane_up(broker)
    scheduler = join(broker, "scheduler")
    step = Step(wanted=8)
    assert refusal(broker.request(scheduler, 3, step, 0.0)).code is ErrorCode.NOT_READY
    tool = join(broker, "tool", "t")
    assert refusal(broker.request(tool, 3, step, 0.0)).code is ErrorCode.BAD_STATE
    bench = Bench()
    assert refusal(bench.broker.request(bench.worker, 3, step, 0.0)).code is ErrorCode.BAD_STATE
    refs, _ = bench.step(wanted=8)
    bench.broker.supervision.lost("host", "killed")
    refused = refusal(bench.broker.request(bench.scheduler, 3, step, 0.0))
    assert refused.code is ErrorCode.LANE_LOST
    assert bench.table().slots.is_idle
    assert not bench.table().directory.is_lent(*refs[0])


@pytest.mark.parametrize(
    "fields",
    [
        {
            "keys": (b"a",),
            "slots": IntArray.of((1,), "u4"),
            "generations": IntArray.of((1,), "u8"),
            "first": IntArray.of((0,), "u2"),
            "count": IntArray.of((2,), "u2"),  # a chunk has one block here
        },
        {
            "used": (b"a",) * (MAX_FINISHED + 1),
            "used_counts": IntArray.of([1] * (MAX_FINISHED + 1), "u4"),
        },
        {"used": (b"a", b"b"), "used_counts": IntArray.of((1, 0, 1), "u4")},
        {"keys": (b"a",)},
        {"keys": (b"a",), "slots": IntArray.of((0,), "u4")},
        {"slots": IntArray.of((0,), "u4"), "generations": IntArray.of((1,), "u8")},
        {"first": IntArray.of((0,), "u2"), "count": IntArray.of((1,), "u2")},
        {"descriptions": (b"of nothing",)},
        {"used": (b"a", b"b"), "used_counts": IntArray.of((1,), "u4")},
        {"used": (b"a",), "used_counts": IntArray.of((1, 1), "u4")},
        {"used": (b"a",), "prompt_counts": IntArray.of((2,), "u4")},
        {"used": (b"a",), "prompt_counts": IntArray.of((1, 0), "u4")},
        {"used": (b"a",), "labels": bytes(2)},
        {
            "pins": (
                Pin(
                    lease=1,
                    lease_ms=1,
                    slots=IntArray.of((0,), "u4"),
                    generations=IntArray.of((), "u8"),
                ),
            )
        },
    ],
)
def test_a_step_that_contradicts_itself_is_refused_whole(fields: dict[str, Any]) -> None:
    """One error, and nothing of it was done."""
    bench = Bench()
    refs, _ = bench.step(wanted=8)
    bench.begin([b"k"], refs[:1])
    effects = bench.broker.request(bench.scheduler, 3, Step(dropped=(b"k",), **fields), 0.0)
    assert refusal(effects).code is ErrorCode.BAD_MESSAGE
    assert bench.table().directory.lookup(b"k") is LookupResult.HIT_PENDING


def test_leases_above_the_limit_are_not_held() -> None:
    """The limit is counted, and so are the chunks that are not pinned."""
    bench = Bench(max_leases=2)
    refs, _ = bench.step(wanted=1)
    bench.begin([b"a"], refs)
    bench.share(refs)
    bench.step(pins=tuple(pin(number, refs) for number in (1, 2, 3)))
    table = bench.table()
    assert (len(table.slots.leases), table.counts.pins_refused) == (2, 1)
    assert bench.broker.state.counts.limits["max_leases"] == 1
    bench.step(unpinned=(1,), pins=(pin(4, refs),))
    assert table.counts.pins_refused == 2
    bench.step(pins=(pin(5, refs),))
    assert len(table.slots.leases) == 2
    table.check_integrity()


@pytest.mark.parametrize("model", ["m", "n"])
def test_no_room_of_others_is_taken_before_something_is_stored(model: str) -> None:
    """By an engine's first step, by pins, or by uses: what is lent then is its namespace's own."""
    bench = Bench(chunks=8)
    loans = bench.reserve(8)
    bench.begin([b"%d" % slot for slot, _ in loans], loans)
    bench.share(loans)
    other = bring_up(bench.broker, "f", model)
    table = bench.table()
    own = 1 if model == "m" else 0
    for fields in ({}, {"pins": (pin(1, [(0, 1)]),)}, {"used": (b"1",), "unpinned": (1,)}):
        bench.step(other, wanted=8, **fields)
        assert len(table.slots.loans) == own
    assert table.slots.stats()["ready"] == 8
    bench.step(other, wanted=8, refused=1)
    assert table.counts.evicted == 0
    assert (table.counts.yielded > 0) == (model == "n")
    bench.broker.state.check_integrity()


def test_an_engine_has_a_part_of_its_share_on_loan() -> None:
    """A quarter alone, less beside others, for whom it is not evicted; all of it in bulk."""
    bench = Bench(chunks=128)
    assert len(bench.step(wanted=64)[0]) == 32
    other = bring_up(bench.broker, "f")
    assert len(bench.step(other, wanted=64)[0]) == 2
    assert len(bench.step(other, wanted=128)[0]) == 62
    bench.broker.state.check_integrity()


def test_what_was_refused_is_lent() -> None:
    """As many loans as keys got none, up to the engine's share."""
    bench = Bench(chunks=64)
    other = bring_up(bench.broker, "f")
    assert len(bench.step(other, wanted=8, refused=20)[0]) == 20
    assert bench.step(other, wanted=8, refused=20)[0] == []
    assert len(bench.step(other, wanted=8, refused=60)[0]) == 12
    bench.broker.state.check_integrity()


def test_loans_that_were_not_used_end_where_another_engine_gets_too_few() -> None:
    """After a while; no lane is asked."""
    bench = Bench(chunks=16)
    taken = bench.reserve(16)
    other = bring_up(bench.broker, "f")
    mine, table = bench.engine(bench.scheduler).number, bench.table()
    bench.step(other, now=9.0, wanted=1)  # it stores nothing
    assert table.slots.loans.count(mine) == 16
    lent, effects = bench.step(other, now=9.1, wanted=1, refused=4)
    assert (lent, revoked(effects)) == ([], [])
    assert table.slots.loans.count(mine) == 0
    assert len(bench.step(other, now=9.2, wanted=1, refused=4)[0]) == 4
    bench.begin([b"late"], taken[:1])
    assert table.counts.stores_lost == 1
    bench.broker.state.check_integrity()


def test_a_drain_ends_loans_and_lends_none() -> None:
    """Until it is undone; no lane has to be asked."""
    bench, keys = Bench(), [b"a"]
    refs, _ = bench.step(wanted=8)
    bench.begin(keys, refs[:1])
    tool = join(bench.broker, "tool", "t")
    assert revoked(bench.broker.request(tool, 2, Drain(), 0.0)) == []
    assert not bench.table().slots.loans
    bench.begin([b"b"], refs[1:2])
    assert bench.table().counts.stores_lost == 1
    assert bench.step(wanted=8)[0] == []
    assert ChunksReady(bench.engine(bench.scheduler).number) in bench.share(refs[:1])
    bench.broker.request(tool, 2, Resume(), 0.0)
    assert len(bench.step(wanted=8)[0]) == 8
