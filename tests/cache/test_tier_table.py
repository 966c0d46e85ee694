"""The tier table: which chunks lie below the pool."""

import itertools
import mmap
import random
import subprocess
import sys
import zlib
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace

from kvd.cache import tier_table
from kvd.cache.directory import DirectoryWriter
from kvd.cache.tier_table import MAX_ABSENT, TierTable
from kvd.errors import IntegrityError
from kvd_proto.directory import DirectoryHeader, DirectoryView
from kvd_proto.errors import DirectoryError
from kvd_proto.tier_table import (
    ABSENT_MS,
    BODY,
    ENTRY_BYTES,
    MAX_TIER_ENTRIES,
    MIN_TIER_ENTRIES,
    UNKNOWN_ENTRIES,
    TierEntry,
    TierHealth,
    TierTableView,
    tier_table_capacity,
)
from tests.cache import tier_reader
from tests.cache.tables import add, make_namespaces

SPACE, BOOT = bytes(range(16)), bytes(range(16, 32))


def make(
    capacity: int = 64, num_tiers: int = 2, limit: int = 512
) -> tuple[TierTable, TierTableView]:
    """A tier table in a bytearray, and what readers have of it."""
    header = DirectoryHeader(
        *(4, 8, SPACE, BOOT, 4),
        probe_limit=limit,
        tier_capacity=capacity,
        num_tiers=num_tiers,
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


def test_a_directory_without_tiers_has_no_table() -> None:
    """It costs no byte, and there is nothing to look up in."""
    header = DirectoryHeader.plan(4, SPACE, BOOT)
    assert header.total_bytes == header.tiers_offset
    assert DirectoryWriter(bytearray(header.total_bytes), header).tiers is None


def test_a_table_is_as_large_as_its_header_says() -> None:
    """Behind the last home there is room for the longest run."""
    header = DirectoryHeader.plan(4, SPACE, BOOT, tier_capacity=2**16, num_tiers=3)
    assert header.total_bytes == header.tiers_offset + (2**16 + 512) * ENTRY_BYTES
    assert DirectoryHeader.unpack(memoryview(header.pack() + bytes(header.total_bytes))) == header


def test_namespaces_have_tables_where_there_are_tiers() -> None:
    """Large enough for what tiers of this size may hold; a temporary one has none."""
    known, unknown = "memory:,size=512MiB", "mooncake:master=host:1"
    for second, entries in (("disk:/d,size=1MiB", 2**18), (unknown, UNKNOWN_ENTRIES)):
        namespaces = make_namespaces(64 * 4096, tier=(known, second))
        tiers = add(namespaces, 0, 4096).directory.tiers
        assert tiers is not None
        assert (tiers.num_tiers, tiers.capacity) == (2, entries)
        assert add(namespaces, 1, 4096, temporary=True).directory.tiers is None


@pytest.mark.parametrize(("capacity", "tiers"), [(48, 1), (0, 1), (64, 0), (64, 5), (0, 5)])
def test_figures_that_contradict_each_other_are_refused(capacity: int, tiers: int) -> None:
    """A capacity that is no power of two, or tiers without a table, are no directory."""
    header = DirectoryHeader.plan(4, SPACE, BOOT, tier_capacity=capacity, num_tiers=tiers)
    buffer = header.pack() + bytes(header.total_bytes)
    with pytest.raises(DirectoryError):
        DirectoryView(buffer)


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


def test_several_tiers_hold_the_same_blocks() -> None:
    """An entry has a bit for each tier, and one set of blocks."""
    table, view = make()
    assert view.find(b"k") is None
    assert table.hold(b"k", 1, 0, 4, 2)
    assert view.find(b"k") == TierEntry(0b10, 0, 4, 2)
    assert table.hold(b"k", 0, 0, 4, 2)
    assert view.find(b"k") == TierEntry(0b11, 0, 4, 2)
    assert table.release(b"k", 1)
    assert not table.release(b"k", 1)
    assert not table.release(b"other", 0)
    assert view.find(b"k") == TierEntry(0b01, 0, 4, 2)
    assert table.release(b"k", 0)
    assert view.find(b"k") is None
    assert len(table) == 0


def test_a_tier_with_fewer_blocks_than_another_is_not_noted() -> None:
    """More blocks take the entry, fewer leave it to the other tier, and others replace it."""
    table, view = make()
    table.hold(b"k", 0, 0, 4, 0)
    assert table.hold(b"k", 1, 2, 2, 0)
    assert view.find(b"k") == TierEntry(0b01, 0, 4, 0)
    assert table.hold(b"k", 0, 1, 2, 0)
    assert view.find(b"k") == TierEntry(0b01, 1, 2, 0)
    assert table.hold(b"k", 1, 0, 4, 0)
    assert view.find(b"k") == TierEntry(0b10, 0, 4, 0)
    assert table.hold(b"k", 0, 0, 4, 1)
    assert view.find(b"k") == TierEntry(0b01, 0, 4, 1)


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


def test_what_a_tier_finds_at_its_start_is_noted_at_once() -> None:
    """Thousands of chunks, some of which are there; all that fit are found by readers."""
    table, view = make(2**13)
    keys = [b"%d" % number for number in range(6200)]
    for key in keys[:300:3]:
        table.hold(key, 1, 0, 4, 0)
    table.mark_absent(keys[1], monotonic())
    count, zeros = np.arange(1, 3001) % 4 + 1, np.zeros(3000, np.int64)
    head = table._changes.head
    assert table.hold_all(keys[:3000], 0, zeros, count, zeros + 7) == 3000
    assert table._changes.head - head < 1000
    table.check_integrity()
    assert len(table) == 3000
    held = {key: TierEntry(1, 0, i % 4 + 1, 7) for i, key in enumerate(keys[:3000], 1)}
    assert whole_table(view, 999) == held
    assert all(view.find(key) == place for key, place in held.items())
    more = np.zeros(3200, np.int64)
    assert table.hold_all(keys[3000:], 0, more, more + 4, more) == 2**13 * 3 // 4 - 3000
    table.check_integrity()


def test_of_what_no_tier_has_the_oldest_is_forgotten() -> None:
    """Only so many are known."""
    table, view = make(2**13)
    keys = [b"%d" % number for number in range(MAX_ABSENT + 2)]
    for key in (*keys[:2], keys[0], *keys[2:]):
        table.mark_absent(key, monotonic())
    known = [key for key in keys if view.find(key) is not None]
    assert known == keys[2:]
    table.check_integrity()


def test_a_full_table_takes_no_more() -> None:
    """Three quarters of its homes; what is there may change, and a place that is free is taken."""
    table, view = make(64)
    keys = [b"%d" % number for number in range(60)]
    taken = [key for key in keys if table.hold(key, 0, 0, 4, 0)]
    assert taken == keys[:48]
    table.mark_absent(keys[50], monotonic())
    assert view.find(keys[50]) is None
    assert table.hold(keys[0], 1, 0, 4, 0)
    table.release(keys[7], 0)
    assert table.hold(keys[50], 1, 0, 4, 0)
    table.check_integrity()


def test_a_crowded_home_takes_no_more() -> None:
    """A chunk for which there is no place within the probe limit is not noted."""
    table, view = make(64, limit=4)
    keys = keys_at(63, 64, 5)
    assert [table.hold(key, 0, 0, 4, 0) for key in keys] == [True] * 4 + [False]
    assert whole_table(view).keys() == set(keys[:4])
    table.forget()
    assert table.hold(keys[4], 0, 0, 4, 0)
    table.check_integrity()


def test_a_tier_that_is_released_comes_back_when_it_is_swept() -> None:
    """Its bits go piece by piece; until then nothing new of it is noted."""
    table, view = make(2**16)
    keys = [b"%d" % number for number in range(3000)]
    for i, key in enumerate(keys):
        table.hold(key, 0, 0, 4, 0)
        if i % 3 == 0:
            table.hold(key, 1, 0, 4, 0)
    table.release_tier(0)
    assert not table.hold(b"new", 0, 0, 4, 0)
    assert not table.release(keys[0], 0)
    sweeps = 0
    while table.is_releasing(0):
        table.sweep()
        table.check_integrity()
        sweeps += 1
    assert sweeps > 1
    assert whole_table(view, 9999) == dict.fromkeys(keys[::3], TierEntry(2, 0, 4, 0))
    assert table.hold(b"new", 0, 0, 4, 0)
    while not table.is_swept:
        table.sweep()
    table.check_integrity()


def test_after_a_reset_nothing_is_there() -> None:
    """At once for readers; the places are used again before they are swept, too."""
    table, view = make()
    keys = [b"%d" % number for number in range(48)]
    for key in keys:
        table.hold(key, 0, 0, 4, 0)
    table.forget()
    assert whole_table(view) == {}
    assert not any(map(view.find, keys))
    assert table.hold(keys[3], 1, 2, 2, 0)
    assert whole_table(view) == {keys[3]: TierEntry(2, 2, 2, 0)}
    table.check_integrity()
    while not table.is_swept:
        table.sweep()
    table.check_integrity()
    assert whole_table(view) == {keys[3]: TierEntry(2, 2, 2, 0)}


def test_what_is_known_of_a_tier() -> None:
    """Readers see the figures that were set, and zeros before."""
    table, view = make()
    assert view.health(1) == TierHealth(False, 0, 0, 0)
    status = TierHealth(True, 1200, 3 * 10**9, 2**40)
    table.set_health(1, status)
    assert (view.health(0), view.health(1)) == (TierHealth(False, 0, 0, 0), status)
    with pytest.raises(IndexError):
        view.health(2)


def test_integrity_is_checked() -> None:
    """A byte that is not what was written is found."""
    for at, wrong in ((0, 9), (1, 4), (2, 9), (4, 1), (24, 0)):
        table, _ = make()
        (key,) = keys_at(5, 64, 1)
        table.hold(key, 0, 0, 4, 0)
        table._bytes[5 * ENTRY_BYTES + at] = wrong
        with pytest.raises(IntegrityError):
            table.check_integrity()


def test_another_process_reads_while_entries_move(tmp_path: Path) -> None:
    """It takes no entry for another's, and who looks at all misses none that stays."""
    header = DirectoryHeader(*(4, 8, SPACE, BOOT, 4), tier_capacity=tier_reader.HOMES, num_tiers=2)
    file = tmp_path / "directory"
    with file.open("wb+") as opened:
        opened.truncate(header.total_bytes)
        table = DirectoryWriter(mmap.mmap(opened.fileno(), 0), header).tiers
    assert table is not None
    come_and_go = [key for key in tier_reader.KEYS if key not in tier_reader.STAY]
    for key in tier_reader.STAY:
        table.hold(key, 0, *tier_reader.blocks(key))
    command = [sys.executable, "-m", "tests.cache.tier_reader", str(file), "300"]
    chance = random.Random(17)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reads\n"
        while reader.poll() is None:
            for key in chance.sample(come_and_go, 40):
                if not table.release(key, 0):
                    table.hold(key, 0, *tier_reader.blocks(key))
        assert reader.returncode == 0, reader.stdout.read()
    table.check_integrity()


class Watched:
    """Words of a table: after every store a reader looks."""

    def __init__(self, words: memoryview, look: Any) -> None:
        self._words = words
        self._look = look

    def __getitem__(self, where: int) -> int:
        return self._words[where]

    def __setitem__(self, where: int, value: int) -> None:
        self._words[where] = value
        self._look()


class Torn:
    """Bytes of a table: a reader looks when the first half of what is written is there."""

    def __init__(self, whole: memoryview, look: Any) -> None:
        self._whole = whole
        self._look = look

    def __getitem__(self, where: slice) -> memoryview:
        return self._whole[where]

    def __setitem__(self, where: slice, value: memoryview) -> None:
        half = where.start + 14  # the blocks are written, the key is not
        self._whole[where.start : half] = value[:14]
        self._look()
        self._whole[where] = value


def test_an_entry_is_not_found_while_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that comes while blocks are replaced sees neither the old nor half of the new."""
    table, view = make()
    table.hold(b"k", 0, 0, 4, 0)
    found: list[TierEntry | None] = []

    def pack(*told: Any) -> None:
        found.append(view.find(b"k"))
        BODY.pack_into(*told)
        found.append(view.find(b"k"))

    monkeypatch.setattr(tier_table, "_PACK", pack)
    assert table.hold(b"k", 0, 4, 4, 0)
    assert found == [None, None]
    assert view.find(b"k") == TierEntry(0b01, 4, 4, 0)


def test_an_entry_is_not_found_half_moved() -> None:
    """While entries shift back, a reader finds each with its own blocks, or misses it."""
    table, view = make()
    keys = keys_at(3, 64, 6)
    places = {key: TierEntry(0b01, i, i + 1, i) for i, key in enumerate(keys)}
    for key, place in places.items():
        table.hold(key, 0, place.first, place.count, place.group)
    looks = itertools.count(1)

    def look() -> None:
        next(looks)
        for key, place in places.items():
            assert view.find(key) in {None, place}
        assert whole_table(view).items() <= places.items()

    table._bytes = Torn(table._bytes, look)  # type: ignore[assignment]
    table.release(keys[0], 0)
    assert next(looks) == len(keys)  # each of the others moved once


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
            found = self.view.find(key)
            if key in self.changing or found is None or self.leaving:
                continue
            if not found.tiers:
                assert key in self.absent
            else:
                assert found == self.places(*self.model[key])
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

    @rule(
        key=st.sampled_from(KEYS),
        tier=st.integers(0, TIERS - 1),
        blocks=st.sampled_from(BLOCKS),
    )
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
        tiers, held = self.model.get(key, (set(), blocks))
        tiers -= self.leaving
        if blocks == held:
            tiers.add(tier)
        elif (
            tiers - {tier}
            and blocks[2] == held[2]
            and held[0] <= blocks[0]
            and sum(blocks[:2]) <= sum(held[:2])
        ):
            tiers.discard(tier)
        else:
            tiers, held = {tier}, blocks
        self.model[key] = tiers, held

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
            found = self.view.find(key)
            if key in self.model:
                assert found is not None
                assert replace(found, tiers=found.tiers & ~gone) == self.places(*self.model[key])
            elif found is not None and found.tiers & ~gone == 0:
                assert found.tiers or key in self.absent
            else:
                assert found is None
        if not self.leaving:
            held = {key: self.places(*each) for key, each in self.model.items()}
            assert whole_table(self.view, 5) == held
            assert len(self.table) == len(held)
        self.table.check_integrity()


@pytest.mark.hypothesis
def test_the_table_is_a_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens, all is found where it was put, and a reader never sees another's place."""
    monkeypatch.setattr(tier_table, "MAX_ABSENT", 3)
    monkeypatch.setattr(tier_table, "SCANNED_AT_ONCE", 5)
    monkeypatch.setattr(tier_table, "SWEPT_AT_ONCE", 2)
    run_state_machine_as_test(TierTableMachine, settings=settings(stateful_step_count=60))
