"""What lies in slabs that an earlier process has written, from their records: vectorised."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvd.tier.disk import records
from kvd.tier.disk.records import RECORD
from kvd.tier.disk.slabs import FREE, HELD, Slab
from kvd.tier.disk.space import Held, place_of, split

_NUMBERS = 2**16  # that a record can have


def rebuild(
    slabs: Sequence[Slab], known: Mapping[int, tuple[bytes, int]]
) -> tuple[dict[int, Held], list[int], int]:
    """Find the chunks in slabs, and mark their slots as held.

    Args:
        slabs: with the records that they have.
        known: id and epoch of each namespace's number.

    Returns:
        - the namespaces with their chunks, by number;
        - places to be erased, whose record is not empty and does not count: it is damaged, of
          another epoch, or an older one of the same key;
        - how many of these are damaged: their check word does not fit.
    """
    epochs, is_known = np.zeros(_NUMBERS, "<u8"), np.zeros(_NUMBERS, np.bool_)
    held = {number: Held(name, epoch) for number, (name, epoch) in known.items()}
    for number, (_, epoch) in known.items():
        epochs[number], is_known[number] = epoch, True
    by_number = {slab.number: slab for slab in slabs}
    wrong: list[int] = []
    damaged = 0
    for slab in slabs:
        raw = np.frombuffer(slab.mirror, RECORD)
        numbers = raw["number"]
        whole = records.whole(raw, slab.identity)
        counts = whole & is_known[numbers] & (epochs[numbers] == raw["epoch"])
        written = raw.view("<u8").reshape(slab.slots, -1).any(axis=1)
        damaged += int(np.count_nonzero(written & ~whole))
        wrong += (place_of(slab.number, 0) + np.flatnonzero(written & ~counts)).tolist()
        slab.used = int(raw["sequence"][counts].max(initial=0))
        np.frombuffer(slab.states, "u1")[counts] = HELD
        lengths = raw["key_len"]
        for number in np.unique(numbers[counts]).tolist():
            mine = counts & (numbers == number)
            for length in np.unique(lengths[mine]).tolist():
                slots = np.flatnonzero(mine & (lengths == length))
                wrong += _enter(held[number].places, slab, slots, length, by_number)
    for place in wrong:
        at, slot = split(place)
        by_number[at].states[slot] = FREE
    return held, wrong, damaged


def _enter(
    places: dict[bytes, int],
    slab: Slab,
    slots: npt.NDArray[np.int64],
    length: int,
    slabs: Mapping[int, Slab],
) -> list[int]:
    """Enter chunks of one namespace with keys of one length; return places of older ones."""
    padded = np.frombuffer(slab.mirror, RECORD)["key"][slots].view("u1").reshape(len(slots), -1)
    keys = np.ascontiguousarray(padded[:, :length]).view(f"V{length}")[:, 0].tolist()
    found = (place_of(slab.number, 0) + slots).tolist()
    if places.keys().isdisjoint(keys):
        before = len(places)
        places.update(zip(keys, found, strict=True))
        if len(places) == before + len(keys):
            return []
        for key in keys:
            places.pop(key, None)
    older: list[int] = []  # a process has ended between writing one and erasing the other
    for key, place in zip(keys, found, strict=True):
        other = places.setdefault(key, place)
        if other != place:
            latest = max(place, other, key=lambda at: _sequence(slabs, at))
            older.append(place + other - latest)
            places[key] = latest
    return older


def _sequence(slabs: Mapping[int, Slab], place: int) -> int:
    at, slot = split(place)
    return records.read(slabs[at].mirror, slot).sequence


def chunks_of(
    slab: Slab, number: int, epoch: int
) -> tuple[list[bytes], list[tuple[int, int, int]], list[int]]:
    """Return keys, coverages and places of a namespace's records in a slab, held or not."""
    raw = np.frombuffer(bytes(slab.mirror), RECORD)
    slots = np.flatnonzero(
        (raw["sequence"] > 0) & (raw["number"] == number) & (raw["epoch"] == epoch)
    )
    some = raw[slots]
    coverages = zip(
        some["first"].tolist(), some["count"].tolist(), some["group"].tolist(), strict=True
    )
    keys = [
        key[:length]
        for key, length in zip(some["key"].tolist(), some["key_len"].tolist(), strict=True)
    ]
    return keys, list(coverages), (place_of(slab.number, 0) + slots).tolist()
