"""What a scheduler decides with: the loans at hand, and the filter of keys that are new."""

import pytest

from kvd_client.decisions import MIN_LOANS_WANTED, LoanQueue, ReuseFilter


def always(slot: int, generation: int) -> bool:
    """Every loan holds."""
    del slot, generation
    return True


def lent(*slots: int) -> LoanQueue:
    """Loans of these slots, generation 5."""
    loans = LoanQueue()
    loans.add((slot, 5) for slot in slots)
    return loans


def test_what_was_taken_back_is_passed_over() -> None:
    """Only the directory says whether a loan holds; what does not is forgotten."""
    loans = lent(1, 2, 3, 4)
    assert loans.take(lambda slot, _: slot > 1) == (2, 5)
    assert loans.count(lambda slot, _: slot == 4) == 1
    assert len(loans) == 1
    assert loans.take(lambda *_: False) is None
    assert len(loans) == 0


def test_of_two_loans_of_a_slot_the_later_one_counts() -> None:
    """Also where the answer with the earlier one is taken in last, as around a reset."""
    loans = lent(3)
    loans.add([(3, 6), (4, 7)])
    loans.add([(4, 2)])
    assert [loans.take(always) for _ in range(3)] == [(3, 6), (4, 7), None]


def test_the_loan_of_a_chunk_that_is_pinned_is_not_taken() -> None:
    """It is at hand again with the daemon's answer, which may have refused the pin."""
    loans = lent(3, 4)
    assert loans.take(always, {3}) == (4, 5)
    assert loans.take(always, {3}) is None
    assert (len(loans), loans.count(always)) == (0, 1)
    loans.add([(6, 5)])
    assert [loans.take(always) for _ in range(3)] == [(3, 5), (6, 5), None]


def test_loans_of_pinned_chunks_are_looked_at_once_an_answer() -> None:
    """However many keys are offered in between."""

    class Pinned(set[int]):
        looks = 0

        def __contains__(self, slot: object) -> bool:
            self.looks += 1
            return super().__contains__(slot)

    pinned, loans = Pinned(range(100)), lent(*range(100))
    for _ in range(2):
        pinned.looks = 0
        assert [loans.take(always, pinned) for _ in range(100)] == [None] * 100
        assert pinned.looks == 100
        loans.add([])


def test_steps_that_wait_for_the_same_answer_count_as_one() -> None:
    """They have to do with the same loans: where answers come late, more are to be at hand."""
    loans = LoanQueue()
    for _ in range(3):
        for _ in range(40):
            loans.take(always)
        loans.end_step()
    assert loans.num_wanted == 240
    loans.add([])
    loans.take(always)
    loans.end_step()
    assert 200 < loans.num_wanted < 240


def test_what_was_needed_once_is_forgotten() -> None:
    """Steps that store less lower it bit by bit, down to the least."""
    loans = LoanQueue()
    for _ in range(1000):
        loans.take(always)
    loans.add([])
    wanted = []
    for _ in range(200):
        loans.take(always)
        loans.add([])
        wanted.append(loans.num_wanted)
    assert wanted == sorted(wanted, reverse=True)
    assert 1900 < wanted[0] < 2000
    assert wanted[-1] == MIN_LOANS_WANTED


def test_a_new_session_keeps_the_need_and_no_loan() -> None:
    """Loans are the session's that they were lent to."""
    loans = lent(*range(100))
    while loans.take(always):
        pass
    loans.end_step()
    wanted = loans.num_wanted
    loans.add([(1, 5)])
    loans.clear()
    assert loans.take(always) is None
    assert loans.num_wanted == wanted > MIN_LOANS_WANTED


@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_a_key_passes_at_its_nth_offer(threshold: int) -> None:
    """And is forgotten then."""
    reuse = ReuseFilter(threshold, 10)
    assert [reuse.admit(b"k") for _ in range(threshold)] == [False] * (threshold - 1) + [True]
    assert len(reuse) == 0


@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_a_key_that_passed_and_was_not_stored_passes_again(threshold: int) -> None:
    """Want of room is no reason to count from the beginning."""
    reuse = ReuseFilter(threshold, 10)
    while not reuse.admit(b"k"):
        pass
    reuse.undo_admission(b"k")
    assert reuse.admit(b"k")


def test_the_latest_keys_are_remembered() -> None:
    """Those that were offered longest ago make room."""
    reuse = ReuseFilter(2, 3)
    for key in (b"a", b"b", b"c", b"d"):
        assert not reuse.admit(key)
    assert len(reuse) == 3
    assert not reuse.admit(b"a")
    assert reuse.admit(b"d")
