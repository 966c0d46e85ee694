"""Tiering under any order of events: nothing wrong is found, and no slot is used too early."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvd.broker.tiers.breaker import BreakerState
from kvd.broker.tiers.demotion import Demotion
from kvd.broker.tiers.promotion import Promotion
from kvd.broker.tiers.tiering import Tiering
from kvd.outcomes import Outcome
from kvd.wire.tiering import Get, NamespaceOpened
from kvd_proto.directory import LookupResult, SlotState
from kvd_proto.messages import Message, Reset
from tests.broker.benches import Bench, FakeTier, TierBench
from tests.exploring import explored

KEYS = [b"key %d" % number for number in range(10)]
SOME = st.lists(st.sampled_from(KEYS), min_size=1, max_size=5, unique=True)
WHICH = st.integers(0, 1)
Place = tuple[type, str]
PLACES: tuple[Place, ...] = (
    *(
        (Promotion, name)
        for name in ("get_ended", "_settle", "_take_by_tier", "_get_all", "give_up")
    ),
    *((Demotion, name) for name in ("put_ended", "_put")),
    *((Tiering, name) for name in ("_check_liveness", "_update_namespaces", "_apply_scan")),
)
FAULTY: set[Place] = set()


def raising(place: Place) -> Callable[..., Any]:
    """The method there, which raises when it has done its part while it is among `FAULTY`."""
    method = getattr(*place)

    def call(*arguments: Any, **named: Any) -> Any:
        result = method(*arguments, **named)
        if place in FAULTY:
            FAULTY.remove(place)
            raise KeyError("a fault")
        return result

    return call


class TieringMachine(RuleBasedStateMachine):
    """One engine above two tiers, whose processes hang, fail, lose chunks, die and come back.

    The broker's own decisions about tiers raise now and then.

    Attributes:
        stored: keys stored since the last reset; nothing else may be found.
        lost: what a tier has lost and the broker may still believe to be there.
        num_faults: decisions that were made to raise, or will.
    """

    tiers: tuple[str, ...] = ("disk:/a,late=0.5", "memory:,keep=all,queue=16KiB,late=0.5")

    def __init__(self) -> None:
        super().__init__()
        FAULTY.clear()
        self.num_faults = 0
        self.bench = TierBench(*self.tiers, chunks=16)
        self.stored: set[bytes] = set()
        self.lost: set[tuple[int, bytes]] = set()

    def chunks_of(self, fake: FakeTier) -> set[bytes]:
        """What a tier keeps of the namespace as it is now."""
        return set(fake.chunks_of(self.bench.namespace.id))

    @rule(keys=SOME, load=st.booleans())
    def store(self, keys: list[bytes], load: bool) -> None:
        """An engine stores chunks, and loads them perhaps."""
        new = [key for key in keys if self.bench.lookup(key) == [LookupResult.MISS]]
        refs = self.bench.store(*new)
        self.stored |= set(new[: len(refs)])
        if load:
            self.bench.load(refs)

    @rule(keys=SOME, evict=st.sampled_from([True, True, False]))
    def seek(self, keys: list[bytes], evict: bool) -> None:
        """An engine seeks chunks, most of the time after memory has lost them."""
        if evict:
            self.bench.evict()
        self.bench.seek(*keys)

    @rule(turns=st.sampled_from([1, 2, 10]))
    def work(self, turns: int) -> None:
        """Tiers answer, and those that were told to end are replaced."""
        for _ in range(turns):
            self.pass_time(0.2)
            for fake in self.bench.fakes:
                fake.answer()
            for index in self.bench.killed:
                self.bench.fakes[index].end()
                self.bench.fakes[index].start()
            self.bench.killed.clear()

    @rule(turns=st.sampled_from([1, 4, 60]))
    def no_tier_answers(self, turns: int) -> None:
        """Time passes, and no tier says anything."""
        for _ in range(turns):
            self.pass_time(0.2)

    def pass_time(self, seconds: float) -> None:
        """The broker looks around once, some time later."""
        Bench.now += seconds
        self.bench.turn()

    @rule(which=WHICH, hangs=st.booleans())
    def hang(self, which: int, hangs: bool) -> None:
        """A medium stands still, or goes on."""
        self.bench.fakes[which].hangs = hangs

    @rule(which=WHICH, outcome=st.sampled_from([None, Outcome.FAILED, Outcome.LATE]))
    def spoil(self, which: int, outcome: Outcome | None) -> None:
        """A medium fails from now on, or works again."""
        self.bench.fakes[which].failure = outcome

    @rule(which=WHICH, keys=SOME)
    def lose(self, which: int, keys: list[bytes]) -> None:
        """A medium loses chunks and does not know it."""
        fake = self.bench.fakes[which]
        for place in [place for place in fake.chunks if place[2] in keys]:
            del fake.chunks[place]
            self.lost.add((which, place[2]))

    @rule(place=st.sampled_from(PLACES))
    def fault(self, place: Place) -> None:
        """A decision of the broker raises when it is made next."""
        self.num_faults += place not in FAULTY
        FAULTY.add(place)

    @rule(which=WHICH)
    def die(self, which: int) -> None:
        """A tier's process is killed, and another one starts."""
        fake = self.bench.fakes[which]
        fake.end()
        self.agrees()
        if not fake.tier.info.shared and not self.bench.killed:
            assert self.bench.namespace.directory.tiers.is_releasing(which)
        fake.start()

    @rule(late=st.booleans())
    def reset(self, late: bool) -> None:
        """The engine drops all chunks of its namespace; answers and scans of before come later."""
        bench, name = self.bench, self.bench.namespace.id
        messages: list[tuple[FakeTier, Message]] = []
        for fake in bench.fakes if late else ():
            messages += [(fake, fake.done(order)) for order in fake.orders]
            fake.orders.clear()
            if name in fake.unopened:
                opened = NamespaceOpened(namespace=name, salt=fake.salts[name])
                messages.append((fake, opened))
            messages.append((fake, fake.scan_result(name, fake.chunks_of(name))))
        bench.ask(Reset())
        self.stored.clear()
        for fake, message in messages:
            fake.say(message)

    @rule(which=WHICH, keys=SOME)
    def reset_while_a_tier_opens(self, which: int, keys: list[bytes]) -> None:
        """A process has begun anew, and says what it has only after a reset."""
        self.store(keys, load=True)
        self.work(2)
        self.bench.fakes[which].hangs = True
        self.die(which)
        self.no_tier_answers(4)
        self.reset(late=True)
        self.no_tier_answers(1)

    @invariant()
    def agrees(self) -> None:
        """Only what was stored since the reset is found, and tiers write into no slot of others."""
        self.bench.check()
        directory = self.bench.namespace.directory
        for key in KEYS:
            below = self.bench.below(key) or 0
            assert key in self.stored or (self.bench.lookup(key), below) == ([LookupResult.MISS], 0)
            for fake in self.bench.fakes:
                known = (fake.index, key) in self.lost or key in self.chunks_of(fake)
                assert known or not below & 1 << fake.index
        for fake in self.bench.fakes:
            for order in fake.orders:
                if isinstance(order, Get):
                    slots, generations = order.slots.tolist(), order.generations.tolist()
                    for slot, generation in zip(slots, generations, strict=True):
                        assert directory.generation(slot) == generation
                        assert directory.state(slot) in {SlotState.WRITING, SlotState.DRAINING}

    def teardown(self) -> None:
        """Once all media work, nothing is left over and all that tiers keep comes up."""
        num_raised = self.num_faults - len(FAULTY)
        FAULTY.clear()
        for fake in self.bench.fakes:
            fake.hangs, fake.failure = False, None
        self.work(60)
        self.bench.evict()
        lasting = sorted(set().union(*map(self.chunks_of, self.bench.fakes)) & set(KEYS))
        for _ in range(2):  # the first may find what a tier has lost
            self.bench.seek(*lasting)
            self.work(5)
        assert self.bench.lookup(*lasting) == [LookupResult.HIT] * len(lasting)
        assert sum(bool(event.trace) for event in self.bench.events) == num_raised
        stats = self.bench.table.slots.stats()
        assert (stats["writing"], stats["draining"]) == (0, 0)
        for fake in self.bench.fakes:
            assert fake.tier.put_bytes == fake.tier.get_bytes == 0
            assert fake.tier.breaker.state is BreakerState.CLOSED
        self.agrees()


class SharedTieringMachine(TieringMachine):
    """The same with a tier that others share, which has to be asked."""

    tiers = ("disk:/a,keep=all,late=0.5", "mooncake:master=a:1,late=0.5")


@pytest.mark.hypothesis
@pytest.mark.parametrize("machine", [TieringMachine, SharedTieringMachine])
def test_tiering(machine: type[TieringMachine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever tiers do, no wrong chunk is found, and what they keep comes up in the end."""
    monkeypatch.setattr("kvd.cache.namespaces.tier_table_capacity", lambda _: 2**10)
    for owner, name in PLACES:
        monkeypatch.setattr(owner, name, raising((owner, name)))
    run_state_machine_as_test(machine, settings=explored(40, 30))


def test_a_probe_does_not_seek_what_a_reset_dropped() -> None:
    """A tier hangs in a get, and its breaker probes after the reset: no lookup is pending."""
    machine = TieringMachine()
    machine.store([KEYS[0]], load=False)
    machine.work(1)
    machine.hang(1, hangs=True)
    machine.seek([KEYS[0]], evict=True)
    while machine.bench.fakes[1].tier.breaker.state is BreakerState.CLOSED:
        machine.no_tier_answers(1)
    machine.reset(late=True)
    for _ in range(10):
        machine.no_tier_answers(1)
        machine.agrees()
