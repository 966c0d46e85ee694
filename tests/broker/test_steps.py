"""A scheduler's step: what it says is carried out, and what the broker lends."""

from typing import Any

import pytest

from kvd.broker.effects import ChunksReady, Effect, ToLane
from kvd.broker.sessions import Session
from kvd.cache.chunks import ChunkTable
from kvd.wire.link import Revoke
from kvd_proto.directory import LookupResult
from kvd_proto.jobs import IntArray
from kvd_proto.messages import LABEL_ONLY, MAX_FINISHED, ErrorCode, Label, Pin, Step
from tests.broker.benches import Bench, Ref, bring_up, pin
from tests.broker.brokers import columns, join, refusal


def revoked(effects: list[Effect]) -> list[Ref]:
    """The slots that lanes are to leave."""
    refs: list[Ref] = []
    for effect in effects:
        match effect:
            case ToLane(message=Revoke(slots=slots, generations=generations)):
                refs += zip(slots.tolist(), generations.tolist(), strict=True)
    return refs


def test_a_step_does_all_that_it_says() -> None:
    """Stores begin and are dropped, chunks are pinned and let go, and slots are lent."""
    bench = Bench()
    refs, _ = bench.step(wanted=8)
    assert len(refs) == 8
    bench.step(keys=(b"a", b"b", b"c"), wanted=8, **columns(refs[:3]))
    directory = bench.table.directory
    assert directory.lookup_many([b"a", b"b", b"c"]) == [LookupResult.HIT_PENDING] * 3
    assert ChunksReady(bench.engine().number) in bench.share(refs[:2])
    lent, effects = bench.step(dropped=(b"c",), pins=(pin(1, refs[:2]),), used=(b"a", b"b"))
    assert (lent, revoked(effects)) == ([], refs[2:3])
    hit, miss = LookupResult.HIT, LookupResult.MISS
    assert directory.lookup_many([b"a", b"b", b"c"]) == [hit, hit, miss]
    assert bench.table.slots.stats()["pinned"] == 2
    bench.step(unpinned=(1, 2))
    assert bench.table.slots.stats()["pinned"] == 0
    bench.answer(effects)
    bench.broker.state.check_integrity()


def test_each_request_of_a_step_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One use of its chunks each, in the order in which they ended; the last one is the newest."""
    bench = Bench()
    bench.store(b"a", b"b", b"c", b"d")
    table = bench.table
    uses, finish = list[tuple[object, ...]](), ChunkTable.finish_request

    def watched(table: ChunkTable, *use: Any) -> None:
        uses.append(use)
        finish(table, *use)

    monkeypatch.setattr(ChunkTable, "finish_request", watched)
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
    order = [table.directory.key(slot) for slot in table.slots.policy.order()]
    assert order == [b"d", b"c", b"b", b"a"]
    assert table.curve is not None
    assert table.curve.requests == 2


def test_only_a_served_engines_scheduler_steps() -> None:
    """Others are told why; nothing of what they said is done."""
    bench = Bench()
    refs, _ = bench.step(wanted=8)

    def refused(session: Session) -> ErrorCode:
        return refusal(bench.broker.request(session, 3, Step(wanted=8), 0.0)).code

    assert refused(join(bench.broker, "scheduler", "incomplete")) is ErrorCode.NOT_READY
    assert refused(join(bench.broker, "tool")) is ErrorCode.BAD_STATE
    assert refused(bench.worker) is ErrorCode.BAD_STATE
    bench.broker.supervision.lost("host", "killed")
    assert refused(bench.scheduler) is ErrorCode.LANE_LOST
    assert bench.table.slots.is_idle
    assert not bench.table.directory.is_lent(*refs[0])


ONE, NONE = columns([(0, 1)]), columns([])


@pytest.mark.parametrize(
    "fields",
    [
        {"keys": (b"a",)},
        {"keys": (b"a",), "slots": ONE["slots"]},
        ONE,
        {"descriptions": (b"of nothing",)},
        {"first": IntArray.of((0,), "u2"), "count": IntArray.of((1,), "u2")},
        {  # a chunk has one block here
            "keys": (b"a",),
            "first": IntArray.of((0,), "u2"),
            "count": IntArray.of((2,), "u2"),
            **ONE,
        },
        {"pins": (Pin(lease=1, lease_ms=1, **(NONE | {"slots": ONE["slots"]})),)},
        {"used": (b"a", b"b"), "used_counts": IntArray.of((1,), "u4")},
        {"used": (b"a",), "used_counts": IntArray.of((1, 1), "u4")},
        {"used": (b"a", b"b"), "used_counts": IntArray.of((1, 0, 1), "u4")},
        {
            "used": (b"a",) * (MAX_FINISHED + 1),
            "used_counts": IntArray.of([1] * (MAX_FINISHED + 1), "u4"),
        },
        {"used": (b"a",), "prompt_counts": IntArray.of((2,), "u4")},
        {"used": (b"a",), "prompt_counts": IntArray.of((1, 0), "u4")},
        {"used": (b"a",), "labels": bytes(2)},
    ],
)
def test_a_step_that_contradicts_itself_is_refused_whole(fields: dict[str, Any]) -> None:
    """One error, and nothing of it was done."""
    bench = Bench()
    refs, _ = bench.step(wanted=8)
    bench.begin([b"k"], refs[:1])
    effects = bench.broker.request(bench.scheduler, 3, Step(dropped=(b"k",), **fields), 0.0)
    assert refusal(effects).code is ErrorCode.BAD_MESSAGE
    assert bench.table.directory.lookup(b"k") is LookupResult.HIT_PENDING


@pytest.mark.parametrize("model", ["m", "n"])
def test_no_room_of_others_is_taken_before_something_is_stored(model: str) -> None:
    """By an engine's first step, by pins, or by uses: what is lent then is its namespace's own."""
    bench = Bench(chunks=8)
    bench.store(*(b"%d" % number for number in range(8)))
    other = bring_up(bench.broker, "f", model)
    table = bench.table
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
    """A quarter alone, less beside others; all of it in bulk, or as many as keys got none."""
    bench = Bench(chunks=128)
    assert len(bench.step(wanted=64)[0]) == 32
    other = bring_up(bench.broker, "f")
    assert len(bench.step(other, wanted=64)[0]) == 2
    assert len(bench.step(other, wanted=8, refused=20)[0]) == 18
    assert bench.step(other, wanted=8, refused=20)[0] == []
    assert len(bench.step(other, wanted=8, refused=100)[0]) == 44
    assert len(bench.step(wanted=128)[0]) == 32
    bench.broker.state.check_integrity()


def test_loans_that_were_not_used_end_where_another_engine_gets_too_few() -> None:
    """After a while; no lane is asked."""
    bench = Bench(chunks=16)
    taken = bench.reserve(16)
    other = bring_up(bench.broker, "f")
    mine, table = bench.engine().number, bench.table
    bench.step(other, now=9.0, wanted=1)  # it stores nothing
    assert table.slots.loans.count(mine) == 16
    lent, effects = bench.step(other, now=9.1, wanted=1, refused=4)
    assert (lent, revoked(effects)) == ([], [])
    assert table.slots.loans.count(mine) == 0
    assert len(bench.step(other, now=9.2, wanted=1, refused=4)[0]) == 4
    bench.begin([b"late"], taken[:1])
    assert table.counts.stores_lost == 1
    bench.broker.state.check_integrity()
