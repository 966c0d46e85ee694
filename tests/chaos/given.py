"""Slots that schedulers give to keys, written down by all of them: none is given twice."""

import struct
from collections.abc import Iterator
from pathlib import Path

NOTE = struct.Struct("<16s16sIQ")  # boot id, namespace, slot, generation
Given = tuple[bytes, bytes, int, int]


def note(folder: Path, given: list[Given]) -> None:
    """Write down slots that a scheduler gives to keys; each once, by whoever it is."""
    with (folder / "given").open("ab", buffering=0) as file:
        file.write(b"".join(NOTE.pack(*each) for each in given))


def given_twice(folder: Path, begin: int, known: set[Given]) -> tuple[list[Given], int]:
    """What was given a second time among the notes from there on, and where they end.

    Only notes of one daemon can be alike, so `known` forgets those of others.
    """
    path, twice = folder / "given", []
    if not path.exists():
        return [], begin
    with path.open("rb") as file:
        file.seek(begin)
        whole = file.read()
    whole = whole[: len(whole) // NOTE.size * NOTE.size]
    notes: Iterator[Given] = NOTE.iter_unpack(whole)
    for each in notes:
        if known and each[0] != next(iter(known))[0]:
            known.clear()
        if each in known:
            twice.append(each)
        known.add(each)
    return twice, begin + len(whole)
