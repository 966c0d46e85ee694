"""Opening the slabs that an earlier process has left, and indexing their chunks by the records.

Damaged slabs are set aside. Records are read vectorised.
"""

import errno
import logging
import time
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvd.tier.disk import slabs
from kvd.tier.disk.directory import DiskDirectory
from kvd.tier.disk.slabs import FREE, HELD, Slab
from kvd.tier.disk.slots import Places, Slots, place_of, split
from kvd_proto.text import format_size

_log = logging.getLogger(__name__)


def load(directory: DiskDirectory, flags: int) -> tuple[Slots, int]:
    """Open all slabs and index their chunks; damaged and outdated records are erased.

    Args:
        directory: of the slabs.
        flags: flags for opening the slots' files: O_DIRECT or 0.

    Returns:
        The slots; and how many records were damaged.

    Raises:
        OSError: I/O error.
    """
    started = time.monotonic()
    loaded = [_load_slab(directory, number, flags) for number in directory.slabs()]
    found = [slab for slab in loaded if slab is not None]
    held, wrong, damaged = rebuild(found)
    slots = Slots(found, held)
    for place in wrong:
        number, slot = split(place)
        slots.slabs[number].erase_records(slot)
    chunks, nbytes = slots.used()
    _log.info(
        "disk:%s: %d chunks in %s found in %.2f s, %d records dropped",
        directory.path,
        chunks,
        format_size(nbytes),
        time.monotonic() - started,
        len(wrong),
    )
    if damaged:
        _log.warning(
            "disk:%s: damaged records in its index: %d; their chunks are dropped. A power loss may"
            " leave a few; else look at the disk (smartctl -a) and at what writes to the files",
            directory.path,
            damaged,
        )
    return slots, damaged


def _load_slab(directory: DiskDirectory, number: int, flags: int) -> Slab | None:
    name = f"{directory.path}/{number:06}"
    try:
        return slabs.load(directory.fd, number, flags)
    except FileNotFoundError:  # half-made or half-removed, or a file was deleted by hand
        slabs.remove(directory.fd, number)
        _log.info("disk: %s.slab or its index is missing: what is left was removed", name)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.EIO, errno.ELOOP):
            raise
        slabs.set_aside(directory.fd, number)
        _log.error(
            "disk: %s.slab is damaged (%s): it and its index were renamed to .damaged, count"
            " against the tier's size, and may be removed",
            name,
            error,
        )
    return None


def rebuild(found: Sequence[Slab]) -> tuple[dict[bytes, Places], list[int], int]:
    """Index the chunks in slabs, and mark their slots as HELD.

    Returns:
        - the places of keys, by space id;
        - places to erase: of damaged records, and of older records of the same key;
        - how many of these are damaged, i.e. not `possible`.
    """
    held: dict[bytes, Places] = {}
    by_number = {slab.number: slab for slab in found}
    wrong: list[int] = []
    for slab in found:
        records = slab.records
        counts = slabs.possible(records)
        lost = np.flatnonzero((records["sequence"] > 0) & ~counts)
        wrong += (place_of(slab.number, 0) + lost).tolist()
        slab.used = int(records["sequence"][counts].max(initial=0))
        np.frombuffer(slab.states, "u1")[counts] = HELD
    damaged = len(wrong)
    for slab in found:
        slots = np.flatnonzero(np.frombuffer(slab.states, "u1") == HELD)
        names, which = np.unique(slab.records["space"][slots], return_inverse=True)
        for i, name in enumerate(names):
            mine = slots[which == i]
            wrong += _enter(held.setdefault(name.tobytes(), {}), slab, mine, by_number)
    for place in wrong:
        at, slot = split(place)
        by_number[at].states[slot] = FREE
    return held, wrong, damaged


def _enter(
    places: Places,
    slab: Slab,
    slots: npt.NDArray[np.int64],
    by_number: Mapping[int, Slab],
) -> list[int]:
    """Enter chunks of one space; return the places of older ones of the same keys."""
    found = (place_of(slab.number, 0) + slots).tolist()
    older: list[int] = []  # left by a process that died between writing one and erasing the other
    for key, place in zip(_keys(slab.records[slots]), found, strict=True):
        other = places.setdefault(key, place)
        if other != place:
            latest = max(place, other, key=lambda at: _sequence(by_number, at))
            older.append(place + other - latest)
            places[key] = latest
    return older


def _sequence(by_number: Mapping[int, Slab], place: int) -> int:
    at, slot = split(place)
    return by_number[at].record(slot).sequence


def chunks_of(
    slab: Slab, space: bytes
) -> tuple[list[bytes], list[tuple[int, int, int]], list[int]]:
    """Return keys, coverages and places of a space's records in a slab, whether HELD or not."""
    records = np.frombuffer(bytes(slab.mirror), slabs.RECORD)
    slots = np.flatnonzero((records["sequence"] > 0) & (records["space"] == np.void(space)))
    some = records[slots]
    columns = [some[name].tolist() for name in ("first", "count", "group")]
    places = (place_of(slab.number, 0) + slots).tolist()
    return _keys(some), list(zip(*columns, strict=True)), places


def _keys(records: slabs.Records) -> list[bytes]:
    pairs = zip(records["key"].tolist(), records["key_len"].tolist(), strict=True)
    return [key[:length] for key, length in pairs]
