"""What a step says besides stores and loads, and chunks whose slots it gives to other keys."""

import threading

import pytest

from kvd_client import Label, LookupResult, Scheduler, StoreAnswer
from kvd_client.decisions import LoanQueue, ReuseFilter
from kvd_proto.messages import LABEL_ONLY, Message, Step
from tests.client.fake_daemon import FakeDaemon
from tests.client.test_steps import wait_steps
from tests.waiting import DEADLINE

ACCEPTED, PRESENT, FULL = StoreAnswer.ACCEPTED, StoreAnswer.PRESENT, StoreAnswer.FULL


@pytest.mark.parametrize("use", ["load", "store"])
def test_the_slot_of_a_chunk_that_is_used_is_given_away_last(
    daemon: FakeDaemon, stepping: Scheduler, use: str
) -> None:
    """One that is offered and there after all others; one that this step loads not at all."""
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


def test_the_slot_of_a_chunk_is_kept_until_the_step_that_pins_it_is_answered(
    daemon: FakeDaemon, stepping: Scheduler
) -> None:
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


def test_a_step_says_what_requests_used_missed_and_left_out(
    daemon: FakeDaemon, stepping: Scheduler
) -> None:
    """Requests in order, with prompt and label; a label that comes later; nothing for no keys."""
    daemon.attach(stepping)
    stepping.request_finished([b"a", b"b", b"c"], prompt=2, label=Label.DONE)
    stepping.request_finished([b"d"])
    stepping.label([b"a", b"b"], Label.LATER)
    stepping.report_missed([b"e", b"f"])
    stepping.give_up([b"g"])
    for call in (stepping.request_finished, stepping.report_missed, stepping.give_up):
        call([])
    stepping.label([], Label.DONE)
    stepping.end_step()
    (step,) = wait_steps(daemon, 1)
    assert step.used == (b"a", b"b", b"c", b"d", b"a", b"b")
    assert (step.used_counts.tolist(), step.prompt_counts.tolist()) == ([3, 1, 2], [2, 1, 0])
    assert step.labels == bytes((Label.DONE, Label.NONE, LABEL_ONLY | Label.LATER))
    assert (step.missed, step.unstored) == ((b"e", b"f"), (b"g",))


def test_of_two_loans_of_a_slot_the_later_one_counts() -> None:
    """Also where the answer with the earlier one is taken in last, as around a reset."""
    loans = LoanQueue()
    for answer in ([(3, 5)], [(3, 6), (4, 7)], [(4, 2)]):
        loans.add(answer)
    assert [loans.take(lambda *_: True) for _ in range(3)] == [(3, 6), (4, 7), None]


def test_the_loan_of_a_chunk_that_is_pinned_is_at_hand_again_with_the_next_answer() -> None:
    """The daemon may have refused the pin; of a session that ends no loan is left."""
    loans = LoanQueue()
    loans.add([(3, 5), (4, 5)])
    assert [loans.take(lambda *_: True, {3}) for _ in range(2)] == [(4, 5), None]
    loans.add([(6, 5)])
    assert [loans.take(lambda *_: True) for _ in range(2)] == [(3, 5), (6, 5)]
    loans.add([(7, 5)])
    loans.clear()
    assert loans.take(lambda *_: True) is None


def test_the_latest_keys_are_remembered() -> None:
    """Those that were offered longest ago make room."""
    reuse = ReuseFilter(2, 3)
    for key in (b"a", b"b", b"c", b"d"):
        assert not reuse.admit(key)
    assert len(reuse) == 3
    assert not reuse.admit(b"a")
    assert reuse.admit(b"d")
