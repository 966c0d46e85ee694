"""Whether what a disk tier keeps in memory agrees: chunks, slots and rings."""

from kvd.tier.disk import DiskTier
from kvd.tier.disk.slabs import BUSY, FREE, HELD
from kvd.tier.disk.slots import place_of, split


def check_integrity(tier: DiskTier) -> None:
    """Nothing may be under way."""
    slots = tier._index
    places = [place for held in slots.spaces.values() for place in held.values()]
    states = sorted(
        (place_of(slab.number, slot), state)
        for slab in slots.slabs.values()
        for slot, state in enumerate(slab.states)
    )
    assert slots.nbytes == sum(slab.nbytes for slab in slots.slabs.values())
    assert sorted(places) == [place for place, state in states if state == HELD]
    for space, held in slots.spaces.items():
        for key, place in held.items():
            at, slot = split(place)
            assert slots.slabs[at].owner(slot) == (space, key)
    free = sorted(place for size_class in slots._size_classes.values() for place in size_class.free)
    assert free == [place for place, state in states if state == FREE]
    for slab in slots.slabs.values():
        readers = sum(n for place, n in slots._readers.items() if split(place)[0] == slab.number)
        assert slab.pins == readers + slab.states.count(BUSY)
