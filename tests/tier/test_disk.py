"""The disk tier and the double in memory: conformance, and how the disk goes about it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvd.outcomes import Outcome
from kvd.tier.contract import BackendOptions, TierBackend
from kvd.tier.disk import DiskTier
from kvd.tier.disk.slabs import Slab
from tests.tier.areas import Area, begun, keys_of, space_of
from tests.tier.conformance import Conformance, MakeTier, Model, put_all, soon
from tests.tier.doubles.memory_tier import MemoryTier

MIB = 2**20


class TestDiskTier(Conformance):
    """The conformance suite."""

    keeps: ClassVar[bool] = True

    @pytest.fixture
    def make_tier(self, tmp_path: Path, area: Area) -> Iterator[MakeTier]:
        """A disk in a folder of the test, which goes with it."""
        self.folder = tmp_path / "tier"
        opened: list[DiskTier] = []

        def make(nbytes: int) -> DiskTier:
            options = BackendOptions(str(self.folder), {"size": str(nbytes), "floor": "64MiB"})
            DiskTier.check(options)
            opened.append(DiskTier.open(options, area.memory))
            return opened[-1]

        yield make
        for tier in opened:
            tier.check_integrity()
            tier.close()

    def agrees(self, tier: TierBackend, model: Model) -> None:
        """Its memory agrees with itself, and its files keep to the budget."""
        super().agrees(tier, model)
        assert isinstance(tier, DiskTier)
        tier.check_integrity()
        files = [f for f in self.folder.iterdir() if f.suffix in {".slab", ".index"}]
        assert sum(file.stat().st_blocks * 512 for file in files) <= self.small


def test_a_batch_is_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four chunks of 1 MiB are written by one call and read by one, though slots have tails."""
    area = Area(8 * MIB)
    tier = DiskTier.open(
        BackendOptions(str(tmp_path / "tier"), {"size": "512MiB", "floor": "0"}), area.memory
    )
    space = begun(tier, space_of(MIB))
    calls: list[str] = []
    for name in ("pwritev", "preadv"):
        real = getattr(os, name)

        def moved(
            fd: int, pieces: list[memoryview], at: int, name: str = name, real: Any = real
        ) -> int:
            calls.append(name)
            nbytes: int = real(fd, pieces, at)
            return nbytes

        monkeypatch.setattr(f"kvd.tier.disk.slot_io.os.{name}", moved)
    keys = keys_of("k", 4)
    put_all(tier, area.chunks(space, keys))
    assert tier.get(area.empties(space, keys), soon()) == [Outcome.OK] * 4
    assert calls == ["pwritev", "preadv"]
    tier.close()


def test_chunks_go_some_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a full tier records are erased for several puts at once, and who goes early is told."""
    area = Area(8 * MIB)
    tier = DiskTier.open(
        BackendOptions(str(tmp_path / "tier"), {"size": "16MiB", "floor": "0"}), area.memory
    )
    space = begun(tier, space_of(4096))
    number = 0

    def put(count: int) -> None:
        nonlocal number
        for _ in range(count):
            put_all(tier, area.chunks(space, [b"k%d" % number]))
            number += 1

    while not tier.take_dropped():
        put(1)
    full = tier.capacity().chunks
    erased: list[int] = []
    real = Slab.erase_records

    def erase(slab: Slab, slot: int, count: int = 1) -> None:
        erased.append(count)
        real(slab, slot, count)

    monkeypatch.setattr(Slab, "erase_records", erase)
    put(100)
    assert sum(erased) >= 100 - full // 256
    assert len(erased) < 25
    assert full - full // 128 <= tier.capacity().chunks <= full + full // 128
    told = sum(len(keys) for _, keys in tier.take_dropped())
    assert told == sum(erased)
    tier.check_integrity()
    tier.close()


def test_a_size_that_cannot_be_reached_is_said_at_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A budget above what the file system has is a warning with the figures and the remedy."""
    area = Area(MIB)
    for size in ("900TiB", "1MiB"):
        options = BackendOptions(str(tmp_path / size), {"size": size, "floor": "0"})
        DiskTier.open(options, area.memory).close()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    text = record.getMessage()
    assert text.startswith(f"disk:{tmp_path}/900TiB: its size of 900 TiB cannot be reached: of the")
    assert "at most, or make room" in text


class TestMemoryTier(Conformance):
    """The conformance suite."""

    @pytest.fixture
    def make_tier(self, area: Area) -> MakeTier:
        """A double of so many bytes."""
        return lambda nbytes: MemoryTier.open(
            BackendOptions("", {"size": str(nbytes)}), area.memory
        )
