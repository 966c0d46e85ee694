"""The tier table: which chunks lie below the pool."""

import mmap
import random
import subprocess
import sys
import zlib
from functools import cache
from pathlib import Path
from time import monotonic

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from msgspec.structs import replace

from kvd.cache import tier_table
from kvd.cache.directory import DirectoryWriter
from kvd.cache.tier_table import TierTable
from kvd_proto.directory import DirectoryHeader, DirectoryView
from kvd_proto.tier_table import (
    ABSENT_MS,
    MAX_TIER_ENTRIES,
    MIN_TIER_ENTRIES,
    UNKNOWN_ENTRIES,
    TierEntry,
    TierTableView,
    tier_table_capacity,
)
from tests.cache.tables import Watched
from tests.exploring import explored
from tests.processes import ROOT

SPACE, BOOT = bytes(range(16)), bytes(range(16, 32))


def make(
    capacity: int = 64, num_tiers: int = 2, limit: int = 512
) -> tuple[TierTable, TierTableView]:
    """A tier table in a bytearray, and what readers have of it."""
    header = DirectoryHeader(
        *(4, 8, SPACE, BOOT, 4), probe_limit=limit, tier_capacity=capacity, num_tiers=num_tiers
    )
    buffer = bytearray(header.total_bytes)
    writer, view = DirectoryWriter(buffer, header), DirectoryView(memoryview(buffer).toreadonly())
    assert writer.tiers is not None
    assert view.tiers is not None
    return writer.tiers, view.tiers


@cache
def keys_at(home: int, capacity: int, count: int) -> list[bytes]:
    """Keys with one home."""
    names = (b"%d" % number for number in range(10**9))
    return [next(n for n in names if zlib.crc32(n) % capacity == home) for _ in range(count)]


def whole_table(view: TierTableView, piece: int = 7) -> dict[bytes, TierEntry]:
    """All that tiers hold, as one sees it who looks from the last place to the first."""
    ends = range(view.places, 0, -piece)
    return dict(entry for end in ends for entry in view.held_chunks(max(0, end - piece), end))


@pytest.mark.parametrize(
    ("chunks", "entries"),
    [
        (0, MIN_TIER_ENTRIES),
        (100_000, 2**18),
        (2**18 * 3 // 4, 2**18),
        (10**9, MAX_TIER_ENTRIES),
        (None, UNKNOWN_ENTRIES),
    ],
)
def test_the_capacity_follows_from_the_tiers_sizes(chunks: int | None, entries: int) -> None:
    """A power of two for a load of 0.75 or less, within bounds."""
    assert tier_table_capacity(chunks) == entries


def test_what_no_tier_has_is_known_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place without tiers, until it is too long ago or a tier holds the chunk."""
    table, view = make()
    now = monotonic()
    monkeypatch.setattr("kvd_proto.tier_table.monotonic_ns", lambda: int(now * 1e9))
    table.mark_absent(b"k", now)
    table.mark_absent(b"late", now - ABSENT_MS / 1000)
    assert (view.find(b"k"), view.find(b"late")) == (TierEntry(0, 0, 0, 0), None)
    table.mark_absent(b"late", now)
    assert view.find(b"late") == TierEntry(0, 0, 0, 0)
    table.hold(b"k", 0, 1, 3, 0)
    table.mark_absent(b"k", now)
    assert view.find(b"k") == TierEntry(1, 1, 3, 0)
    table.check_integrity()


CROWDED = [key for home in (10, 11, 12, 60, 63) for key in keys_at(home, 64, 18)]
STAY = CROWDED[::9]
"""These are there all the time."""


def blocks_of(key: bytes) -> tuple[int, int, int]:
    """First block, count of blocks and group that only this key's entry has."""
    number = zlib.crc32(key)
    return number % 997, number // 997 % 60_000 + 1, number % 7


def read(file: str) -> int:
    """Read a table again and again, key by key and whole; 0 if all was right."""
    with Path(file).open("rb") as opened:
        view = DirectoryView(mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)).tiers
    assert view is not None
    print("reads", flush=True)
    hits: list[tuple[bytes, TierEntry]] = []
    missed = 0
    for _ in range(300):
        hits += [(key, entry) for key in CROWDED if (entry := view.find(key)) is not None]
        listed = dict(view.held_chunks(0, view.places))
        hits += listed.items()
        missed += sum(key not in listed for key in STAY)
    wrong = sum((e.first, e.count, e.group) != blocks_of(key) for key, e in hits)
    print(f"{len(hits)} hits, {wrong} wrong, {missed} missed in a whole table")
    return int(not hits or wrong + missed > 0)


def test_another_process_reads_while_entries_move(tmp_path: Path) -> None:
    """It takes no entry for another's, and who looks at all misses none that stays."""
    header = DirectoryHeader(*(4, 8, SPACE, BOOT, 4), tier_capacity=64, num_tiers=2)
    file = tmp_path / "directory"
    with file.open("wb+") as opened:
        opened.truncate(header.total_bytes)
        table = DirectoryWriter(mmap.mmap(opened.fileno(), 0), header).tiers
    assert table is not None
    for key in STAY:
        table.hold(key, 0, *blocks_of(key))
    come_and_go = sorted(set(CROWDED).difference(STAY))
    script = f"import sys, {__name__} as this; sys.exit(this.read({str(file)!r}))"
    chance = random.Random(17)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reads\n"
        while reader.poll() is None:
            for key in chance.sample(come_and_go, 40):
                if not table.release(key, 0):
                    table.hold(key, 0, *blocks_of(key))
        assert reader.returncode == 0, reader.stdout.read()
    table.check_integrity()


TIERS = 3
HOMES = 16
KEYS = [
    key
    for home in (HOMES - 1, HOMES - 2, 0, 3)  # they crowd, also behind the last home
    for key in keys_at(home, HOMES, 5)
]
BLOCKS = [(0, 4, 0), (1, 2, 0), (2, 2, 0), (0, 4, 1)]


class TierTableMachine(RuleBasedStateMachine):
    """The table beside a dict, with readers that look after every store.

    One looks all keys up; the other looks through the table, a place at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table, self.view = make(HOMES, TIERS, limit=12)
        self.model: dict[bytes, tuple[set[int], tuple[int, int, int]]] = {}
        self.absent: list[bytes] = []
        self.leaving: set[int] = set()
        self.changing: set[bytes] = set()
        self.next_place = 0
        self.seen: set[bytes] = set()
        self.stays: set[bytes] = set()
        self.table._words = Watched(self.table._words, self.look)  # type: ignore[assignment]

    def places(self, tiers: set[int], blocks: tuple[int, int, int]) -> TierEntry:
        """What a lookup says."""
        return TierEntry(sum(1 << tier for tier in tiers), *blocks)

    def look(self) -> None:
        """While one key changes, each other one is missed or found as it is."""
        for key in KEYS:
            entry = self.view.find(key)
            if key in self.changing or entry is None or self.leaving:
                continue
            if not entry.tiers:
                assert key in self.absent
            else:
                assert entry == self.places(*self.model[key])
        self.look_through()

    def look_through(self) -> None:
        """Whoever goes from the last place to the first sees each key that has stayed."""
        self.stays -= self.changing
        if self.leaving:
            self.stays.clear()
        if not self.next_place:
            assert self.stays <= self.seen
            self.seen.clear()
            self.stays = self.model.keys() - self.changing
            self.next_place = self.view.places
        self.next_place -= 1
        for key, place in self.view.held_chunks(self.next_place, self.next_place + 1):
            if key not in self.changing and not self.leaving:
                assert place == self.places(*self.model[key])
            self.seen.add(key)

    @rule(key=st.sampled_from(KEYS), tier=st.integers(0, TIERS - 1), blocks=st.sampled_from(BLOCKS))
    def hold(self, key: bytes, tier: int, blocks: tuple[int, int, int]) -> None:
        """A tier has put a chunk."""
        self.changing = {key}
        done = self.table.hold(key, tier, *blocks)
        if tier in self.leaving:
            assert not done
            return
        if not done:
            assert key not in self.model
            return
        self.noted(key, tier, blocks)

    def noted(self, key: bytes, tier: int, blocks: tuple[int, int, int]) -> None:
        """A tier's blocks of a chunk were taken in."""
        if key in self.absent:
            self.absent.remove(key)
        tiers, stored = self.model.get(key, (set(), blocks))
        tiers -= self.leaving
        if blocks == stored:
            tiers.add(tier)
        elif (
            tiers - {tier}
            and blocks[2] == stored[2]
            and stored[0] <= blocks[0]
            and sum(blocks[:2]) <= sum(stored[:2])
        ):
            tiers.discard(tier)
        else:
            tiers, stored = {tier}, blocks
        self.model[key] = tiers, stored

    @rule(
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=5),
        tier=st.integers(0, TIERS - 1),
        blocks=st.sampled_from(BLOCKS),
    )
    def hold_all(self, keys: list[bytes], tier: int, blocks: tuple[int, int, int]) -> None:
        """A tier has found chunks at its start."""
        self.changing = set(keys)
        columns = [np.full(len(keys), each, "u2") for each in blocks]
        done = self.table.hold_all(keys, tier, *columns)
        for key in keys:
            place = self.view.find(key)
            if tier not in self.leaving and place is not None and place.tiers:
                self.noted(key, tier, blocks)
                done -= 1
        assert done == 0

    @rule(key=st.sampled_from(KEYS), tier=st.integers(0, TIERS - 1))
    def release(self, key: bytes, tier: int) -> None:
        """A tier has dropped a chunk, or never had it."""
        self.changing = {key}
        tiers = self.model.get(key, (set(), ()))[0]
        assert self.table.release(key, tier) == (tier in tiers)
        tiers.discard(tier)
        if not tiers:
            self.model.pop(key, None)

    @rule(key=st.sampled_from(KEYS))
    def is_absent(self, key: bytes) -> None:
        """No tier has it."""
        self.changing = {key, *self.absent}  # the oldest one goes
        self.table.mark_absent(key, monotonic())
        place = self.view.find(key)
        if place is not None and not place.tiers:
            self.absent = [each for each in self.absent if each != key] + [key]
            self.absent = self.absent[-3:]

    @rule()
    def forget(self) -> None:
        """The namespace is reset."""
        self.changing = set(KEYS)
        self.table.forget()
        self.stays.clear()
        self.model.clear()
        self.absent.clear()

    @rule(tier=st.integers(0, TIERS - 1))
    def release_tier(self, tier: int) -> None:
        """A tier is gone, with all that it had."""
        self.table.release_tier(tier)
        self.leaving.add(tier)
        self.stays.clear()
        for key, (tiers, _) in list(self.model.items()):
            tiers.discard(tier)
            if not tiers:
                del self.model[key]

    @rule()
    def sweep(self) -> None:
        """Some places are looked at; nobody sees a difference."""
        self.changing = set()
        self.table.sweep()
        self.look_through()
        self.leaving = {tier for tier in self.leaving if self.table.is_releasing(tier)}

    @invariant()
    def agrees(self) -> None:
        """Lookups, the whole table and its counts say what the dict says."""
        gone = sum(1 << tier for tier in self.leaving)
        for key in KEYS:
            entry = self.view.find(key)
            if key in self.model:
                assert entry is not None
                assert replace(entry, tiers=entry.tiers & ~gone) == self.places(*self.model[key])
            elif entry is not None and entry.tiers & ~gone == 0:
                assert entry.tiers or key in self.absent
            else:
                assert entry is None
        if not self.leaving:
            expected = {key: self.places(*each) for key, each in self.model.items()}
            assert whole_table(self.view, 5) == expected
            assert len(self.table) == len(expected)
        self.table.check_integrity()


@pytest.mark.hypothesis
def test_the_table_is_a_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens, all is found where it was put, and a reader never sees another's place."""
    monkeypatch.setattr(tier_table, "MAX_ABSENT", 3)
    monkeypatch.setattr(tier_table, "SCANNED_AT_ONCE", 5)
    monkeypatch.setattr(tier_table, "SWEPT_AT_ONCE", 2)
    run_state_machine_as_test(TierTableMachine, settings=explored(40, 60))
