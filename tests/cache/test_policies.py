"""What every policy must do, and what each does in its own way."""

from collections.abc import Callable

import pytest

from kvd.cache.policies import POLICIES, ArcPolicy, LruPolicy
from kvd.cache.slotlists import SlotLists
from kvd.errors import IntegrityError

Make = Callable[[int], LruPolicy]


def key_of(slot: int) -> bytes:
    """The slot's number as the key of its chunk."""
    return slot.to_bytes(4, "little")


def anything(slot: int) -> bool:
    """Everything may be evicted."""
    del slot
    return True


@pytest.fixture(params=sorted(POLICIES))
def make(request: pytest.FixtureRequest) -> Make:
    """A maker of each policy in turn."""
    return lambda num_slots: POLICIES[request.param](num_slots, key_of)


def filled(make: Make, num_slots: int, count: int) -> LruPolicy:
    """A policy holding slots 0..count - 1, inserted in this order."""
    policy = make(num_slots)
    for slot in range(count):
        policy.insert(slot)
    return policy


def test_wrong_use_raises(make: Make) -> None:
    """Inserting twice, and using or removing what is not there, are bugs and said to be."""
    policy = filled(make, 4, 1)
    with pytest.raises(IntegrityError):
        policy.insert(0)
    with pytest.raises(IntegrityError):
        policy.use(1)
    with pytest.raises(IntegrityError):
        policy.refresh(1)
    with pytest.raises(IntegrityError):
        policy.remove(1)


def test_clear(make: Make) -> None:
    """After `clear` a policy is as new."""
    policy = filled(make, 8, 6)
    policy.victims(3, anything)
    policy.clear()
    assert (len(policy), policy.order()) == (0, [])
    assert repr(policy) == repr(make(8))
    policy.insert(0)
    policy.check_integrity()


def test_the_coldest_that_may_go_are_evicted(make: Make) -> None:
    """As many as are asked for, or as there are: what was used last; what is pinned stays."""
    policy = filled(make, 8, 6)
    policy.use(1)
    assert policy.victims(2, lambda slot: slot not in {0, 3}) == [2, 4]
    assert policy.victims(9, lambda slot: slot not in {0, 3}) == [5, 1]
    assert policy.victims(0, anything) == []
    assert policy.order() == [0, 3]
    policy.check_integrity()


def test_arc_resists_a_scan() -> None:
    """Chunks used again survive a run of new ones twice as long as the pool; LRU loses them."""

    def survivors(policy: LruPolicy) -> int:
        for slot in range(8):
            policy.insert(slot)
        for slot in range(4):
            for _ in range(2):  # the request that stored it, and another one
                policy.use(slot)
        for slot in range(8, 24):
            policy.victims(1, anything)
            policy.insert(slot)
        return sum(slot in policy for slot in range(4))

    assert survivors(ArcPolicy(24, key_of)) == 4
    assert survivors(LruPolicy(24, key_of)) == 0


def test_arc_counts_requests() -> None:
    """A chunk is used again when another request has had it, not by the one that stored it."""
    policy = filled(lambda slots: ArcPolicy(slots, key_of), 8, 3)
    policy.refresh(0)  # loaded
    policy.use(1)  # the request that stored it has finished
    assert (policy.order(), "T1 3 T2 0" in repr(policy)) == ([2, 0, 1], True)
    policy.use(1)
    policy.refresh(1)
    assert "T1 2 T2 1" in repr(policy)
    policy.remove(2)
    policy.insert(2)  # another chunk, in the same slot
    policy.use(2)
    assert "T1 2 T2 1" in repr(policy)


def test_arc_learns_from_ghosts() -> None:
    """A key that comes back soon after its eviction grows T1's target and enters T2."""
    policy = ArcPolicy(4, key_of)
    for slot in range(3):
        policy.insert(slot)
    assert policy.victims(1, anything) == [0]
    policy.insert(0)
    assert "T1 2 T2 1 B1 0 B2 0 target 1.0" in repr(policy)
    assert policy.victims(1, anything) == [1]  # T1 is above its target
    assert policy.victims(1, anything) == [0]  # T1 is at its target: T2 gives
    policy.insert(0)  # a ghost of B2: the target shrinks
    assert "target 0.0" in repr(policy)


def test_slot_lists_notice_damage() -> None:
    """A broken link does not go unseen."""
    lists = SlotLists(4, 2)
    lists.append(1, 0)
    lists.append(2, 3)
    lists.check_integrity()
    lists._where[3] = 1
    with pytest.raises(IntegrityError):
        lists.check_integrity()
