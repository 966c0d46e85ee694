"""Stores and loads: decided from shared memory, and the daemon is told; no reply is waited for."""

import threading
from contextlib import nullcontext

import pytest

from kvd_client import (
    LoadTicket,
    LookupResult,
    Scheduler,
    StoreAnswer,
    StoreTicket,
    UsageError,
    attachment,
)
from kvd_client.decisions import MIN_LOANS_WANTED, LoanQueue, ReuseFilter
from kvd_proto.messages import Detached, Error, ErrorCode, Hello, Message, Step
from tests.client.fake_daemon import BLOCKS_PER_CHUNK, NUM_SLOTS, FakeDaemon, stepped
from tests.waiting import DEADLINE, PATIENCE, eventually

ACCEPTED, PRESENT, PENDING = StoreAnswer.ACCEPTED, StoreAnswer.PRESENT, StoreAnswer.PENDING
FULL, NOT_YET = StoreAnswer.FULL, StoreAnswer.NOT_YET


def keys_of(count: int, name: str = "k") -> list[bytes]:
    """Some keys."""
    return [f"{name}{i}".encode() for i in range(count)]


def steps(daemon: FakeDaemon) -> list[Step]:
    """The steps that were told so far, without those that only ask for loans."""
    return [m for m in daemon.received if isinstance(m, Step) and m != Step(wanted=m.wanted)]


def wait_steps(daemon: FakeDaemon, count: int) -> list[Step]:
    """The same, once there are so many."""
    return eventually(lambda: steps(daemon), lambda sent: len(sent) >= count)


def answered(scheduler: Scheduler) -> None:
    """Wait until every step has its answer, which later steps take in."""

    def quiet() -> bool:
        scheduler.end_step()
        attachment = scheduler._attachments.current
        return attachment is not None and not attachment.connection.has_replies

    eventually(quiet)


def test_what_is_there_or_under_way_is_not_stored(daemon: FakeDaemon, stepping: Scheduler) -> None:
    """Every key has its answer, of which the daemon is told; one that was begun is pending.

    First by the scheduler's own word, then by the directory's, and a hit when it is READY.
    """
    daemon.attach(stepping)
    stepping.prepare_store([b"mine"])
    ticket = stepping.prepare_store([b"ready", b"writing", b"mine", b"new", b"new"])
    assert ticket.answers == (PRESENT, PENDING, PENDING, ACCEPTED, PENDING)
    assert ticket.keys == (b"new",)
    pending = [LookupResult.HIT_PENDING, LookupResult.MISS]
    assert stepping.lookup_many([b"new", b"other"]) == pending
    assert steps(daemon) == []
    stepping.end_step()
    (step,) = wait_steps(daemon, 1)
    assert step.keys == (b"mine", b"new")
    assert (step.present, step.pending, step.not_yet, step.refused) == (1, 3, 0, 0)
    answered(stepping)
    assert stepping.lookup_many([b"new", b"other"]) == pending
    daemon.make_ready(b"new")
    assert stepping.lookup(b"new") is LookupResult.HIT
    assert stepping.prepare_store([b"new"]).answers == (PRESENT,)


def test_without_a_loan_the_first_keys_come_first(daemon: FakeDaemon, stepping: Scheduler) -> None:
    """The others are FULL; the daemon is told, and lends twice as many for the next step."""
    daemon.attach(stepping)
    keys = keys_of(MIN_LOANS_WANTED + 10)
    ticket = stepping.prepare_store(keys)
    assert ticket.answers == (ACCEPTED,) * MIN_LOANS_WANTED + (FULL,) * 10
    assert ticket.keys == tuple(keys[:MIN_LOANS_WANTED])
    stepping.end_step()
    (step,) = wait_steps(daemon, 1)
    assert (step.refused, step.wanted) == (10, 2 * len(keys))
    answered(stepping)
    assert stepping.prepare_store(keys).answers == (PENDING,) * MIN_LOANS_WANTED + (ACCEPTED,) * 10


def test_loans_that_were_taken_back_are_not_used(daemon: FakeDaemon, stepping: Scheduler) -> None:
    """The directory says so, without a message; those that hold are used.

    A step in which nothing got a slot asks for loans: there would never be one again.
    """
    daemon.attach(stepping)
    valid = daemon.lent()[5]
    daemon.take_back(besides=valid)
    ticket = stepping.prepare_store(keys_of(3))
    assert (ticket.answers, ticket.slots.tolist()) == ((ACCEPTED, FULL, FULL), [valid])
    stepping.end_step()
    answered(stepping)
    daemon.take_back()
    assert stepping.prepare_store([b"more"]).answers == (FULL,)
    stepping.end_step()
    answered(stepping)
    assert stepping.prepare_store([b"more"]).answers == (ACCEPTED,)


CACHED_AND_OFFERED = [
    ((0, 2), (0, 2), PRESENT),
    ((0, 2), (1, 1), PRESENT),
    ((1, 1), (1, 1), PRESENT),
    ((0, 1), (1, 1), PRESENT),  # neither has all of the other
    ((1, 1), (0, 2), ACCEPTED),
]


def test_a_chunk_with_fewer_blocks_is_stored_anew(daemon: FakeDaemon, stepping: Scheduler) -> None:
    """Where the offered blocks are all that it has and more; the daemon is told which they are."""
    daemon.attach(stepping)
    for number, (cached, offered, answer) in enumerate(CACHED_AND_OFFERED):
        key = b"edge %d" % number
        daemon.make_ready(key, *cached)
        assert stepping.prepare_store([key], [offered]).answers == (answer,), (cached, offered)
    stepping.prepare_store([b"a"])
    stepping.prepare_store([b"b"], [(1, 1)])
    stepping.end_step()
    (step,) = wait_steps(daemon, 1)
    assert step.keys == (b"edge 4", b"a", b"b")
    assert (step.first.numpy().tolist(), step.count.numpy().tolist()) == ([0, 0, 1], [2, 2, 1])


def test_a_failed_store_is_given_up(daemon: FakeDaemon, stepping: Scheduler) -> None:
    """The daemon knows from its lanes what was stored. A ticket's block that raises has failed."""
    daemon.attach(stepping)
    good, bad = stepping.prepare_store([b"good"]), stepping.prepare_store([b"bad1", b"bad2"])
    stepping.end_step()
    wait_steps(daemon, 1)
    stepping.complete_store(good)
    stepping.end_step()
    assert len(steps(daemon)) == 1
    stepping.complete_store(bad, success=False)
    stepping.end_step()
    assert wait_steps(daemon, 2)[1].dropped == (b"bad1", b"bad2")
    answered(stepping)
    expected = [LookupResult.HIT_PENDING, LookupResult.MISS, LookupResult.MISS]
    assert stepping.lookup_many([b"good", b"bad1", b"bad2"]) == expected
    with pytest.raises(OSError, match="no"), stepping.prepare_store([b"bad1"]):
        raise OSError("no")
    stepping.end_step()  # the daemon reads the beginning before the end
    begun, dropped = wait_steps(daemon, 4)[2:]
    assert (begun.keys, begun.dropped) == ((b"bad1",), ())
    assert (dropped.keys, dropped.dropped) == ((), (b"bad1",))


def test_a_key_is_stored_at_its_nth_offer(daemon: FakeDaemon, stepping: Scheduler) -> None:
    """The daemon says how often; two offers in one call are one. The latest keys are remembered."""
    daemon.reuse_threshold = 3
    daemon.attach(stepping)
    for _ in range(2):
        assert stepping.prepare_store([b"k", b"k", b"ready"]).answers == (NOT_YET, NOT_YET, PRESENT)
    daemon.take_back()
    assert stepping.prepare_store([b"k"]).answers == (FULL,)
    stepping.end_step()
    (step,) = wait_steps(daemon, 1)
    assert (step.not_yet, step.refused) == (4, 1)
    answered(stepping)
    assert stepping.prepare_store([b"k", b"k"]).answers == (ACCEPTED, PENDING)
    reuse = ReuseFilter(2, capacity=3)
    assert not any(reuse.admit(key) for key in (b"a", b"b", b"c", b"d"))
    assert (len(reuse), reuse.admit(b"a"), reuse.admit(b"d")) == (3, False, True)


def test_a_load_pins_what_it_finds(daemon: FakeDaemon, stepping: Scheduler) -> None:
    """Slot and generation are the directory's; the lease is given back when it is completed."""
    daemon.attach(stepping)
    ticket = stepping.prepare_load([b"ready", b"writing", b"no"], lease_seconds=2.5)
    assert ticket.keys == (b"ready",)
    assert ticket.found.tolist() == [True, False, False]
    assert (ticket.lease_seconds, len(ticket)) == (2.5, 1)
    assert ticket.lease > 0
    stepping.end_step()
    (step,) = wait_steps(daemon, 1)
    (pin,) = step.pins
    assert (pin.lease, pin.lease_ms) == (ticket.lease, 2500)
    assert pin.slots.numpy().tolist() == ticket.slots.tolist()
    assert pin.generations.numpy().tolist() == ticket.generations.tolist()
    stepping.complete_load(ticket)
    stepping.end_step()
    assert wait_steps(daemon, 2)[1].unpinned == (ticket.lease,)


def test_a_chunk_that_lacks_a_block_is_not_loaded(daemon: FakeDaemon, stepping: Scheduler) -> None:
    """What is there can be loaded by who needs no more; no chunk has blocks behind its last one."""
    daemon.attach(stepping)
    daemon.make_ready(b"edge", 1, 1)
    assert stepping.prepare_load([b"edge"]).keys == ()
    assert stepping.prepare_load([b"edge"], blocks=[(0, 1)]).keys == ()
    assert stepping.prepare_load([b"edge"], blocks=[(1, 1)]).keys == (b"edge",)
    assert stepping.prepare_load([b"ready"], blocks=[(1, BLOCKS_PER_CHUNK)]).keys == ()
    # The daemon would take such a store for a broken client's.
    with pytest.raises(UsageError, match=f"a chunk has {BLOCKS_PER_CHUNK} blocks"):
        stepping.prepare_store([b"k"], [(1, BLOCKS_PER_CHUNK)])


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_new_attachment_owes_nothing(
    daemon: FakeDaemon, stepping: Scheduler, is_killed: bool
) -> None:
    """Stores and leases end with their attachment; old tickets end nothing of the next one."""
    daemon.attach(stepping)
    old, broken = stepping.prepare_load([b"ready"]), stepping.prepare_store([b"k"])
    if is_killed:
        stepping.end_step()
        daemon.kill()
    else:
        daemon.notify(Detached(reason="rank 0 is gone"))
    eventually(lambda: not stepping.attached)
    assert not stepping.prepare_store([b"k"]).served
    assert stepping.lookup(b"k") is LookupResult.MISS
    stepping.complete_load(old)
    stepping.request_finished([b"ready"])
    stepping.end_step()
    with FakeDaemon(daemon.runtime_dir) if is_killed else nullcontext(daemon) as other:
        other.wait_for(Hello)
        other.attach(stepping)
        new = stepping.prepare_load([b"ready"])
        assert stepping.prepare_store([b"k"]).answers == (ACCEPTED,)  # nothing is believed
        stepping.end_step()
        stepping.complete_load(old)
        stepping.complete_store(broken, success=False)
        stepping.end_step()
        stepping.complete_load(new)
        stepping.end_step()
        sent = wait_steps(other, 2)
    assert new.lease > old.lease
    assert [step.unpinned for step in sent] == [(), (new.lease,)]
    assert [step.dropped for step in sent] == [(), ()]
    assert [step.used for step in sent] == [(), ()]


def test_the_keeper_sends_what_was_left_behind(
    daemon: FakeDaemon, stepping: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that has stopped making steps still gives its leases back."""
    monkeypatch.setattr(attachment, "OVERDUE_SECONDS", 0.1)
    daemon.attach(stepping)
    ticket = stepping.prepare_load([b"ready"])
    stepping.end_step()
    stepping.complete_load(ticket)
    assert wait_steps(daemon, 2)[1].unpinned == (ticket.lease,)


@pytest.mark.parametrize("use", ["load", "store"])
def test_slots_of_used_chunks_are_taken_last(
    daemon: FakeDaemon, stepping: Scheduler, use: str
) -> None:
    """One that is offered and there after all others; one that this step loads not at all.

    Once taken, its chunk is not found, although the directory shows it until the step is read.
    """
    daemon.lendable = [0, 100]
    daemon.attach(stepping)
    if use == "load":
        assert stepping.prepare_load([b"ready"]).keys == (b"ready",)
    else:
        assert stepping.prepare_store([b"ready"]).answers == (PRESENT,)
    assert stepping.prepare_store([b"k"]).slots.tolist() == [100]
    assert stepping.lookup(b"ready") is LookupResult.HIT
    last = stepping.prepare_store([b"l"])
    assert last.slots.tolist() == ([] if use == "load" else [0])
    found = LookupResult.HIT if use == "load" else LookupResult.MISS
    assert stepping.lookup(b"ready") is found
    assert stepping.lookup(b"ready", 1) is found
    assert bool(stepping.cached_blocks(b"ready")) is (use == "load")


def test_a_pinned_slot_stays_until_the_answer(daemon: FakeDaemon, stepping: Scheduler) -> None:
    """Given away in a later step, its store would be lost: the pin ends the loan."""
    daemon.lendable = [0]
    daemon.attach(stepping)
    answer = threading.Event()

    def read_late(message: Step) -> Message:
        assert answer.wait(DEADLINE)
        return daemon.step(message)

    daemon.replies[Step] = read_late
    assert stepping.prepare_load([b"ready"]).keys == (b"ready",)
    stepping.end_step()
    ticket = stepping.prepare_store([b"k"])
    answer.set()
    assert ticket.answers == (FULL,)


def test_loans_are_the_latest_and_not_pinned() -> None:
    """Answers may be read out of order; the daemon may have refused a pin that it has answered."""
    loans = LoanQueue()
    for answer in ([(3, 5)], [(3, 6), (4, 7)], [(4, 2)]):
        loans.add(answer)
    assert [loans.take(lambda *_: True, {3}) for _ in range(2)] == [(4, 7), None]
    loans.add([(6, 5)])
    assert [loans.take(lambda *_: True) for _ in range(2)] == [(3, 6), (6, 5)]
    loans.add([(7, 5)])
    loans.clear()
    assert loans.take(lambda *_: True) is None


def test_an_engine_is_attached_when_it_has_loans(daemon: FakeDaemon, scheduler: Scheduler) -> None:
    """The daemon is asked first: who stores at once need not be refused."""
    seen: list[bool] = []

    def look(message: Step) -> Message:
        seen.append(scheduler.attached)
        return daemon.step(message)

    daemon.replies[Step] = look
    daemon.attach(scheduler)
    assert seen == [False]
    assert len(scheduler.prepare_store(keys_of(MIN_LOANS_WANTED))) == MIN_LOANS_WANTED


def test_bulk_work_reserves_its_loans(daemon: FakeDaemon, scheduler: Scheduler) -> None:
    """It waits until they are there; where there are enough the daemon is not asked.

    A call for more than there are returns what there is, in time.
    """
    daemon.attach(scheduler)
    assert scheduler.reserve(MIN_LOANS_WANTED) >= MIN_LOANS_WANTED
    assert len(daemon.wait_for(Step)) == 1
    assert scheduler.reserve(200) >= 200
    room = NUM_SLOTS - 2  # two chunks are there
    assert eventually(lambda: scheduler.reserve(NUM_SLOTS, 0.0), lambda loans: loans == room)
    assert scheduler.reserve(NUM_SLOTS, 0.05) == room
    assert len(scheduler.prepare_store(keys_of(200))) == 200


def test_a_reset_brings_new_loans(daemon: FakeDaemon, stepping: Scheduler) -> None:
    """Who stores right after it is served; tickets of before it drop nothing."""
    daemon.attach(stepping)
    assert daemon.directory is not None
    before = {daemon.directory.loan_of(slot) for slot in daemon.lent()}
    old = stepping.prepare_store([b"k"])
    assert stepping.reset()
    new = stepping.prepare_store([b"k"])
    assert new.answers == (ACCEPTED,)
    assert not before & set(new.generations.tolist())
    stepping.complete_store(old, success=False)
    stepping.end_step()
    first, second = wait_steps(daemon, 2)
    assert (first.keys, second.keys, second.dropped) == ((b"k",), (b"k",), ())


def test_a_step_after_the_attachment_is_void(daemon: FakeDaemon, stepping: Scheduler) -> None:
    """The daemon has detached the engine, and says so next: the session goes on."""
    daemon.attach(stepping)
    daemon.replies[Step] = lambda _: Error(code=ErrorCode.NOT_READY, text="it has left")
    stepping.prepare_store([b"k"])
    stepping.end_step()
    answered(stepping)
    assert stepping.lookup(b"k") is LookupResult.MISS
    assert stepping.connected
    assert len(daemon.wait_for(Hello)) == 1


@pytest.mark.parametrize(
    "reply",
    [Error(code=ErrorCode.BAD_MESSAGE, text="no"), stepped([1, 2], [5])],
    ids=["refused", "contradicts itself"],
)
def test_a_step_that_was_refused_ends_the_session(
    daemon: FakeDaemon, stepping: Scheduler, reply: Message
) -> None:
    """What the daemon holds is not what is believed here: all of it ends, and a new one begins."""
    daemon.attach(stepping)
    daemon.replies[Step] = lambda _: reply
    stepping.prepare_store([b"k"])
    stepping.end_step()
    daemon.wait_for(Step, 2)
    daemon.replies[Step] = daemon.step
    daemon.wait_for(Hello, 2)
    eventually(lambda: not stepping.attached)
    daemon.attach()
    eventually(lambda: stepping.prepare_store([b"k"]).answers == (ACCEPTED,))


def test_threads_decide_one_after_another(daemon: FakeDaemon, scheduler: Scheduler) -> None:
    """No slot has two keys, no lease two tickets, and every begun key is told once."""
    daemon.attach(scheduler)
    stored: list[StoreTicket] = []
    loaded: list[LoadTicket] = []

    def work(name: str) -> None:
        for key in keys_of(30, name):
            stored.append(scheduler.prepare_store([key, b"shared" + key[1:]]))
            loaded.append(scheduler.prepare_load([b"ready"]))
            scheduler.complete_load(loaded[-1])

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    loans = [
        loan
        for ticket in stored
        for loan in zip(ticket.slots.tolist(), ticket.generations.tolist(), strict=True)
    ]
    assert len(set(loans)) == len(loans) > 0
    assert len({ticket.lease for ticket in loaded}) == len(loaded) == 120

    def stored_keys() -> list[bytes]:
        scheduler.end_step()  # what was too much for the line
        return [key for step in steps(daemon) for key in step.keys]

    accepted = sorted(key for ticket in stored for key in ticket.keys)
    eventually(lambda: sorted(stored_keys()) == accepted)
