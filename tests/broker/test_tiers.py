"""What goes down to tiers and comes up from them; namespaces and resets of tiers."""

import pytest

from kvd.broker.effects import Notify
from kvd.cache.namespaces import Namespaces
from kvd.outcomes import Outcome
from kvd.wire.tiering import (
    CloseNamespace,
    Drop,
    Get,
    Lookup,
    NewSalt,
    OpenNamespace,
    Put,
)
from kvd_proto.directory import LookupResult
from kvd_proto.messages import Attached, Clear, Drain, Error, ErrorCode, Reset
from tests.broker.benches import STEP, FakeTier, TierBench, bring_up
from tests.broker.brokers import join, mapped, register, replies

DISK, SHARED = "disk:/a", "mooncake:master=a:1"
HIT, PENDING, MISS = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.MISS


def bench_of(*tiers: str, chunks: int = 64) -> tuple[TierBench, FakeTier]:
    """A broker with these tiers, and the first of them."""
    bench = TierBench(*tiers, chunks=chunks)
    return bench, bench.fakes[0]


def namespaces_of(bench: TierBench) -> Namespaces:
    """All of its pool."""
    assert bench.broker.state.namespaces is not None
    return bench.broker.state.namespaces


# -------------------------------------------------------------------------- down


def test_what_was_asked_for_goes_down_and_is_found_there(bench: TierBench, disk: FakeTier) -> None:
    """A chunk that was only stored stays out; the directory names the tier when it has answered."""
    refs = bench.store(b"a", b"b")
    bench.load(refs[:1])
    bench.run()
    assert disk.keys(Put) == [b"a"]
    assert (bench.below(b"a"), bench.below(b"b")) == (1, None)
    assert disk.tier.counts.puts["ok"] == 1
    bench.load(refs[:1])
    bench.run()
    assert disk.keys(Put) == [b"a"]
    bench.check()


def test_bytes_on_their_way_down_are_bounded() -> None:
    """A tier that does not answer is given `queue` bytes and no more; the rest waits."""
    bench, disk = bench_of(f"{DISK},queue=16KiB,late=60")
    bench.load(bench.store(*(bytes([i]) for i in range(10))))
    bench.turn(1.0)
    assert len(disk.keys(Put)) == 4
    assert disk.tier.put_bytes == 16384
    bench.run(2.0)
    assert len(disk.keys(Put)) == 10
    assert disk.tier.put_bytes == 0


def test_a_full_tier_is_given_nothing_for_a_while(bench: TierBench, disk: FakeTier) -> None:
    """It is not set aside for that, and is tried again."""
    disk.failure = Outcome.FULL
    bench.load(bench.store(b"a"))
    bench.run(0.3)
    assert bench.below(b"a") is None
    bench.load(bench.store(b"b"))
    bench.run(0.3)
    assert disk.keys(Put) == [b"a"]
    assert disk.tier.in_use
    disk.failure = None
    bench.run(1.0)
    assert disk.keys(Put) == [b"a", b"b"]
    assert bench.below(b"b") == 1


# ---------------------------------------------------------------------------- up


@pytest.mark.parametrize("outcome", [Outcome.ABSENT, Outcome.CORRUPT, Outcome.FAILED, Outcome.LATE])
def test_a_get_that_fails_is_a_miss_and_its_slot_is_free(
    bench: TierBench, disk: FakeTier, outcome: Outcome
) -> None:
    """What is not there, or not right, is forgotten; what could not be read may be there still."""
    bench.keep(b"a")
    bench.evict()
    disk.failure = outcome
    bench.seek(b"a")
    bench.run(STEP)
    assert bench.lookup(b"a") == [MISS]
    assert bench.table.slots.stats()["draining"] == 0
    gone = outcome in {Outcome.ABSENT, Outcome.CORRUPT}
    assert bench.below(b"a") == (None if gone else 1)
    assert disk.tier.counts.gets[outcome.name.lower()] == 1
    corrupt = [event for event in bench.events if "is not what was put there" in event.text]
    assert len(corrupt) == (outcome is Outcome.CORRUPT)
    bench.check()


def test_promotions_take_a_quarter_of_what_is_held_and_the_rest_waits_its_turn() -> None:
    """All of a long prompt comes up, its head first, a part at a time."""
    bench, disk = bench_of(f"{DISK},late=60")
    keys = [bytes([i]) for i in range(40)]
    bench.keep(*keys)
    bench.evict()
    bench.seek(*keys)
    first = disk.keys(Get)
    assert first == keys[: len(first)]
    assert len(first) == 64 // 4
    bench.run()
    assert disk.keys(Get) == keys
    assert bench.lookup(*keys) == [HIT] * 40
    bench.check()


def test_engines_take_turns() -> None:
    """A few chunks of one engine do not wait for all that another one wants, of any namespace."""
    bench, disk = bench_of(f"{DISK},late=60", chunks=160)
    many, few = [bytes([1, i]) for i in range(60)], [bytes([2, i]) for i in range(3)]
    bench.keep(*many)
    bench.keep(*few)
    bench.evict()
    bench.seek(*many)
    begun = len(disk.keys(Get))
    assert 0 < begun < len(many) - len(few)
    bench.seek(*few, session=bring_up(bench.broker, "other"))
    bench.run()
    order = disk.keys(Get)[begun:]
    assert sorted(order) == sorted([*many[begun:], *few])
    assert [key for key in order if key in few] == few
    assert set(few) <= set(order[: 2 * len(few)])


def test_loans_that_are_of_no_use_make_room_for_what_comes_up() -> None:
    """An empty pool that is all on loan: what a tier holds of before comes up all the same."""
    bench, disk = bench_of(DISK, chunks=16)
    bench.keep(b"a", b"b")
    bench.evict()
    bench.step(wanted=4096)
    assert bench.table.slots.stats()["lent"] == 16
    bench.turn(0.5)
    bench.seek(b"a", b"b")
    assert disk.keys(Get) == []
    bench.run()
    assert bench.lookup(b"a", b"b") == [HIT, HIT]
    bench.check()


def test_nothing_comes_up_while_the_daemon_is_drained(bench: TierBench, disk: FakeTier) -> None:
    """A promotion is a store."""
    bench.keep(b"a")
    bench.evict()
    bench.ask(Drain(), join(bench.broker, "tool"))
    bench.seek(b"a")
    bench.run()
    assert disk.keys(Get) == []


def test_shared_tiers_are_asked_one_after_the_other() -> None:
    """What one has comes up at once; what none has is known as absent for a while."""
    bench = TierBench(SHARED, "mooncake:master=b:1")
    first, second = bench.fakes
    for fake, key in ((first, b"a"), (second, b"b")):
        fake.chunks[bench.namespace.id, fake.salts[bench.namespace.id], key] = 0, 1, 0, b""
    for _ in range(2):
        bench.seek(b"a", b"b", b"x")
        assert first.keys(Lookup) == [b"a", b"b", b"x"]
    first.answer()
    assert second.keys(Lookup) == [b"b", b"x"]
    assert bench.lookup(b"a", b"b", b"x") == [PENDING, MISS, MISS]
    assert bench.below(b"x") is None
    second.answer()
    assert bench.lookup(b"a", b"b", b"x") == [PENDING, PENDING, MISS]
    assert bench.below(b"x") == 0
    for fake in bench.fakes:
        fake.answer()
    assert bench.lookup(b"a", b"b") == [HIT, HIT]
    assert (bench.below(b"a"), bench.below(b"b")) == (3, 2)  # a goes down to the second, too
    assert [fake.tier.counts.asks["absent"] for fake in bench.fakes] == [2, 1]
    bench.check()


# ------------------------------------------------------------------- namespaces


def test_a_scan_is_taken_in_piece_by_piece_and_between_other_work(
    bench: TierBench, disk: FakeTier
) -> None:
    """Ten thousand chunks need many turns, and all are found in the end."""
    namespace = bench.namespace
    for begin in range(0, 10_000, 1000):
        chunks = {i.to_bytes(4): (0, 1, 0, b"") for i in range(begin, begin + 1000)}
        disk.say(disk.scan_result(namespace.id, chunks))
    turns = 0
    while not bench.below((9999).to_bytes(4)):
        assert bench.broker.tiering.due(bench.now) == 0.0
        bench.turn()
        turns += 1
    assert turns >= 10
    assert len(namespace.directory.tiers) == 10_000


def test_each_tier_has_a_salt_of_its_own_until_a_reset_gives_all_the_same() -> None:
    """A daemon that knows of no reset takes what each has noted."""
    bench = TierBench(DISK, "memory:", SHARED)
    namespace = bench.namespace
    salts = [b"of disk", b"memory", b"shared"]
    for fake, salt in zip(bench.fakes, salts, strict=True):
        fake.end()
        fake.salts[namespace.id] = salt
        fake.chunks[namespace.id, salt, salt] = (0, 1, 0, b"")
        fake.start()
    bench.run(6.0)
    assert namespace.salt == b""
    assert all(fake.tier.serves(namespace) for fake in bench.fakes)
    assert [bench.below(salt) for salt in salts[:2]] == [1, 2]
    bench.ask(Reset())
    assert [fake.salts[namespace.id] for fake in bench.fakes] == [namespace.salt] * 3
    assert [bench.below(salt) for salt in salts[:2]] == [None, None]


@pytest.mark.parametrize("knows", [False, True])
def test_a_tier_that_has_not_heard_of_a_reset_is_told(
    bench: TierBench, disk: FakeTier, knows: bool
) -> None:
    """A namespace begins with the salt of its last reset: what is kept under another is nothing."""
    other = bytes([9]) * 16
    namespaces = namespaces_of(bench)
    namespaces.resets.draw(other.hex())
    salt = namespaces.resets.salt_of(other.hex())
    disk.salts[other] = salt if knows else b"another"
    disk.chunks[other, disk.salts[other], b"old"] = (0, 1, 0, b"")
    namespace = namespaces.open(other, (4096,), world_size=1, replicated=False)
    assert namespace.salt == salt
    namespaces.attach_engine(namespace)
    bench.run(0.5)
    assert disk.salts[other] == salt
    assert disk.tier.serves(namespace)
    table = namespace.directory.tiers
    assert table is not None
    assert (table.find(b"old") is not None) == knows


@pytest.mark.parametrize("tier", [DISK, SHARED])
def test_a_tier_that_is_not_there_at_a_reset_is_named(tier: str) -> None:
    """What would bring old chunks back is said, with the remedy; of one that serves nothing is."""
    bench, disk = bench_of(tier)
    bench.ask(Reset())
    assert not any("noted" in event.text for event in bench.events)
    disk.end()
    bench.ask(Reset())
    assert "has not noted the reset" in bench.events[-1].text


@pytest.mark.parametrize("message", [Reset(), Clear(namespace=None)])
def test_a_reset_that_the_next_daemon_would_not_know_of_has_failed(
    bench: TierBench, disk: FakeTier, message: Reset | Clear, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks are gone and tiers are told; the reply says to ask again."""
    bench.keep(b"a")
    resets = namespaces_of(bench).resets
    draw = resets.draw
    monkeypatch.setattr(resets, "draw", lambda name: draw(name) + "no room; make some")
    session = bench.scheduler if isinstance(message, Reset) else join(bench.broker, "tool")
    effects = bench.broker.request(session, 9, message, bench.now)
    (reply,) = replies(effects)
    assert reply.message == Error.of(ErrorCode.NOT_READY, "no room; make some")
    bench.carry_out(effects)
    assert bench.lookup(b"a") == [MISS]
    assert bench.below(b"a") is None
    salt = bench.namespace.salt
    assert disk.messages[-1] == NewSalt(namespace=bench.namespace.id, salt=salt)


def test_tiers_are_told_of_namespaces_that_close(bench: TierBench, disk: FakeTier) -> None:
    """What they keep stays, and is found when the namespace is used again."""
    bench.keep(b"a")
    identity = bench.namespace.id
    namespaces = namespaces_of(bench)
    for session in list(bench.broker.state.registry.sessions.values()):
        bench.carry_out(bench.broker.lost(session))
    bench.turn(1.0)
    (namespace,) = namespaces.closable()
    namespaces.close(namespace)
    bench.turn(0.5)
    assert disk.messages[-1] == CloseNamespace(namespace=identity)
    bench.scheduler = bring_up(bench.broker)
    bench.turn(0.5)
    assert isinstance(disk.messages[-1], OpenNamespace)
    assert bench.below(b"a") == 1


def test_engines_are_told_of_the_tiers_and_temporary_ones_have_none() -> None:
    """In order, with medium and whether they are shared; a self-test leaves nothing behind."""
    bench = TierBench(DISK, SHARED, "disk:/b")
    of_engine = []
    for name, temporary in (("second", False), ("third", True)):
        worker = join(bench.broker, "worker", name)
        bench.broker.request(worker, 2, register(temporary=temporary), bench.now, 2)
        notices = [e.message for e in mapped(bench.broker, worker) if isinstance(e, Notify)]
        (attached,) = [message for message in notices if isinstance(message, Attached)]
        of_engine.append([(tier.name, tier.medium, tier.shared) for tier in attached.tiers])
    disk, mooncake = ("disk", "disk", False), ("mooncake", "remote", True)
    assert of_engine == [[disk, mooncake, ("disk-2", "disk", False)], []]


def test_a_tier_drops_what_finds_no_place_in_the_full_table(
    bench: TierBench, disk: FakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier's room is for what can be found."""
    monkeypatch.setattr(type(bench.namespace.directory.tiers), "hold", lambda *_: False)
    bench.keep(b"a")
    assert Drop(namespace=bench.namespace.id, keys=(b"a",)) in disk.messages


def test_a_reset_is_marked_until_the_tier_confirms_it(bench: TierBench, disk: FakeTier) -> None:
    """A process that begins after one that ended too early learns that the salt is a new one."""

    def begun_anew() -> bool:
        disk.end()
        disk.start()
        bench.turn(0.5)
        return [order for order in disk.messages if isinstance(order, OpenNamespace)][-1].reset

    assert not begun_anew()
    disk.hangs = True
    bench.ask(Reset())
    assert begun_anew()
    disk.hangs = False
    assert begun_anew()
    assert not begun_anew()
    bench.ask(Reset())
    assert not begun_anew()
