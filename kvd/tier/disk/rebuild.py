"""What lies in slabs that an earlier process has written, from their records: vectorised."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvd.tier.disk import records
from kvd.tier.disk.records import RECORD
from kvd.tier.disk.slabs import FREE, HELD, Slab
from kvd.tier.disk.space import Held, place_of, split

_NUMBERS = 2**16  # that a record can have
_FOUND = np.dtype([("record", RECORD), ("place", "<i8")])
Found = npt.NDArray[Any]  # of _FOUND


def rebuild(
    slabs: Sequence[Slab], known: Mapping[int, tuple[bytes, int]]
) -> tuple[dict[int, Held], list[int]]:
    """Find the chunks in slabs, and mark their slots as held.

    Args:
        slabs: with the records that they have.
        known: id and epoch of each namespace's number.

    Returns:
        The namespaces with their chunks, by number; and places to be erased, whose record is not
        empty and does not count: it is torn, of another epoch, or an older one of the same key.
    """
    epochs, is_known = np.zeros(_NUMBERS, "<u8"), np.zeros(_NUMBERS, np.bool_)
    held = {number: Held(name, epoch) for number, (name, epoch) in known.items()}
    for number, (_, epoch) in known.items():
        epochs[number], is_known[number] = epoch, True
    wrong: list[int] = []
    pieces = [np.empty(0, _FOUND)]
    for slab in slabs:
        raw = np.frombuffer(slab.mirror, RECORD)
        numbers = raw["number"]
        counts = records.whole(raw, slab.identity) & is_known[numbers]
        counts &= epochs[numbers] == raw["epoch"]
        written = raw.view("<u8").reshape(slab.slots, -1).any(axis=1)
        wrong += _places(slab, written & ~counts).tolist()
        piece = np.empty(int(counts.sum()), _FOUND)
        piece["record"], piece["place"] = raw[counts], _places(slab, counts)
        slab.used = int(piece["record"]["sequence"].max(initial=0))
        np.frombuffer(slab.states, "u1")[counts] = HELD
        pieces.append(piece)
    found = np.concatenate(pieces)
    found = found[np.argsort(found["record"]["sequence"], kind="stable")]
    for number in np.unique(found["record"]["number"]).tolist():
        _enter(held[number], found[found["record"]["number"] == number])
    if sum(len(each.places) for each in held.values()) < len(found):
        older = _older(found, held.values())
        by_number = {slab.number: slab for slab in slabs}
        for place in older:
            number, slot = split(place)
            by_number[number].states[slot] = FREE
        wrong += older
    return held, wrong


def _places(slab: Slab, flags: records.Flags) -> npt.NDArray[np.int64]:
    places: npt.NDArray[np.int64] = place_of(slab.number, 0) + np.flatnonzero(flags)
    return places


def _enter(held: Held, found: Found) -> None:
    """Enter chunks of one namespace, of which the latest comes last and stays."""
    lengths = found["record"]["key_len"]
    for length in np.unique(lengths).tolist():
        some = found[lengths == length]
        keys = np.ascontiguousarray(some["record"]["key"]).view("u1").reshape(len(some), -1)
        cut = np.ascontiguousarray(keys[:, :length]).view(f"V{length}")[:, 0]
        held.places.update(zip(cut.tolist(), some["place"].tolist(), strict=True))


def _older(found: Found, held: "Sequence[Held] | Any") -> list[int]:
    latest = [np.fromiter(each.places.values(), "<i8", len(each.places)) for each in held]
    older: list[int] = np.setdiff1d(found["place"], np.concatenate(latest)).tolist()
    return older


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
