"""The ring of changes between two processes."""

import mmap
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from kvd.cache.change_log import ChangeLog
from kvd_proto.changes import Change, ChangeKind
from kvd_proto.directory import DirectoryHeader, DirectoryView
from tests.waiting import PATIENCE

CHANGES = 100_000
PIECE = 256


def key_of(number: int) -> bytes:
    """As long as the number says, and made of it."""
    return (number.to_bytes(8, "little") * 6)[: 1 + number % 48]


def is_whole(change: Change) -> bool:
    """Whether every part of a change belongs to its number."""
    number, _, generation, slot, first, count, group, kind, key = change
    part = number & 0xFFFF
    return (generation, slot, first, count, group, kind, key) == (
        *(7 * number, number, part, part, part),
        *(ChangeKind.READY, key_of(number)),
    )


def follow(file: Path) -> tuple[int, int, list[Change]]:
    """Read the changes as they come: how far, how many, and those that are not whole."""
    with file.open("rb") as opened:
        view = DirectoryView(mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ))
    number = seen = 0
    wrong: list[Change] = []
    end = time.monotonic() + PATIENCE
    while number < CHANGES and time.monotonic() < end:
        found = view.changes.read(number, PIECE)
        if found is None:
            number = view.changes.head - PIECE
            continue
        numbered = enumerate(found, number + 1)
        wrong += [each for n, each in numbered if each[0] != n or not is_whole(each)]
        number += len(found)
        seen += len(found)
    return number, seen, wrong


def test_a_reader_that_is_overrun_never_takes_one_change_for_another(tmp_path: Path) -> None:
    """However fast the ring is written, what `read` gives is whole and in order."""
    header, file = DirectoryHeader.plan(8, bytes(16), bytes(16)), tmp_path / "directory"
    file.write_bytes(header.pack().ljust(header.total_bytes, b"\0"))
    with (
        file.open("r+b") as opened,
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
    ):
        log = ChangeLog(memoryview(mmap.mmap(opened.fileno(), 0)), header)
        pool.submit(key_of, 1).result()  # the process is there
        reader = pool.submit(follow, file)
        for number in range(1, CHANGES + 1):
            part, key = number & 0xFFFF, key_of(number)
            log.write(ChangeKind.READY, 7 * number, number, part, part, part, key)
        number_read, seen, wrong = reader.result()
    assert wrong == []
    assert number_read == CHANGES
    assert seen >= PIECE
