"""Another process that reads a tier table while it is written, and counts what it finds wrong.

    python -m tests.cache.tier_reader FILE PASSES

The exit status is 0 where nothing was, and the last line says how much was read.
"""

import mmap
import sys
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

from kvd_proto.directory import DirectoryView
from kvd_proto.tier_table import TierEntry

HOMES = 64
KEYS = [k for k in (b"%d" % n for n in range(2000)) if crc32(k) % HOMES in {10, 11, 12, 60, 63}][
    :90
]
STAY = KEYS[:10]
"""These are there all the time."""


def blocks(key: bytes) -> tuple[int, int, int]:
    """First block, count of blocks and group that only this key's entry has."""
    number = crc32(key)
    return number % 997, number // 997 % 60_000 + 1, number % 7


def is_right(key: bytes, place: TierEntry) -> bool:
    """Whether a place is that of the key."""
    return key in KEYS and (place.first, place.count, place.group) == blocks(key)


def main(arguments: Sequence[str]) -> int:
    """Read so many times all keys one by one, and all of the table."""
    with Path(arguments[0]).open("rb") as file:
        view = DirectoryView(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    assert view.tiers is not None
    print("reads", flush=True)
    hits = wrong = missed = 0
    for _ in range(int(arguments[1])):
        for key in KEYS:
            place = view.tiers.find(key)
            if place is not None:
                hits += 1
                wrong += not is_right(key, place)
        seen = dict(view.tiers.held_chunks(0, view.tiers.places))
        wrong += sum(not is_right(key, place) for key, place in seen.items())
        missed += sum(key not in seen for key in STAY)
    print(f"{hits} hits, {wrong} wrong, {missed} missed in a whole table")
    return int(not hits or wrong or missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
