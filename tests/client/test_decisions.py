"""What a scheduler decides with: the loans at hand, and the filter of keys that are new."""

from kvd_client.decisions import LoanQueue, ReuseFilter


def always(slot: int, generation: int) -> bool:
    """Every loan holds."""
    del slot, generation
    return True


def lent(*slots: int) -> LoanQueue:
    """Loans of these slots, generation 5."""
    loans = LoanQueue()
    loans.add((slot, 5) for slot in slots)
    return loans


def test_of_two_loans_of_a_slot_the_later_one_counts() -> None:
    """Also where the answer with the earlier one is taken in last, as around a reset."""
    loans = lent(3)
    loans.add([(3, 6), (4, 7)])
    loans.add([(4, 2)])
    assert [loans.take(always) for _ in range(3)] == [(3, 6), (4, 7), None]


def test_the_latest_keys_are_remembered() -> None:
    """Those that were offered longest ago make room."""
    reuse = ReuseFilter(2, 3)
    for key in (b"a", b"b", b"c", b"d"):
        assert not reuse.admit(key)
    assert len(reuse) == 3
    assert not reuse.admit(b"a")
    assert reuse.admit(b"d")
