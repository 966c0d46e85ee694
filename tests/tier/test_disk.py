"""The disk tier and the double in memory: conformance, and the disk beside a model."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvd.outcomes import Outcome
from kvd.tier.contract import BackendOptions, Space, TierBackend
from kvd.tier.disk import DiskTier
from kvd.tier.disk.slabs import Slab
from tests.tier.areas import Area, begun, is_whole, keys_of, space_of
from tests.tier.conformance import Conformance, MakeTier, put_all, soon
from tests.tier.disk_integrity import check_integrity
from tests.tier.doubles.memory_tier import MemoryTier

MIB = 2**20


class TestDiskTier(Conformance):
    """The conformance suite."""

    keeps: ClassVar[bool] = True

    @pytest.fixture
    def make_tier(self, tmp_path: Path, area: Area) -> Iterator[MakeTier]:
        """A disk in a folder of the test, which goes with it."""
        opened: list[DiskTier] = []

        def make(nbytes: int) -> DiskTier:
            options = BackendOptions(
                str(tmp_path / "tier"), {"size": str(nbytes), "floor": "64MiB"}
            )
            DiskTier.check(options)
            opened.append(DiskTier.open(options, area.memory))
            return opened[-1]

        yield make
        for tier in opened:
            check_integrity(tier)
            tier.close()


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
    check_integrity(tier)
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


def opened(area: Area, **values: str) -> TierBackend:
    """A double with these options."""
    options = BackendOptions("", values)
    MemoryTier.check(options)
    return MemoryTier.open(options, area.memory)


class TestMemoryTier(Conformance):
    """The conformance suite."""

    @pytest.fixture
    def make_tier(self, area: Area) -> MakeTier:
        """A double of so many bytes."""
        return lambda nbytes: opened(area, size=str(nbytes))


SIZE = 2 * 2**20
STEPS = 250


@pytest.mark.parametrize("seed", range(10, 12))
def test_any_order_of_calls(tmp_path: Path, seed: int) -> None:
    """Whatever is called in any order, also over restarts, memory and files agree with a model."""
    chance = random.Random(seed)
    area = Area(8 * 2**20)
    options = BackendOptions(str(tmp_path / "tier"), {"size": str(SIZE), "floor": "0"})
    tier = DiskTier.open(options, area.memory)
    shares = ((20_000,), (4096, 4096), (60_000, 5))
    spaces = [begun(tier, space_of(*some, name=bytes([i]) * 16)) for i, some in enumerate(shares)]
    model: dict[bytes, dict[bytes, int]] = {space.id: {} for space in spaces}
    keys = keys_of("k", 60)
    for _ in range(STEPS):
        which = chance.randrange(len(spaces))
        space, some = spaces[which], chance.sample(keys, chance.randrange(1, 7))
        step = chance.random()
        if step < 0.5:
            salt = chance.randrange(2)
            outcomes = tier.put(area.chunks(space, some, salt=salt), soon())
            assert outcomes == [Outcome.OK] * len(some)
            _take_dropped(tier, model)
            model[space.id] |= dict.fromkeys(some, salt)
        elif step < 0.8:
            _compare(tier, area, space, some, model[space.id])
        elif step < 0.9:
            tier.remove(space, some)
            for key in some:
                model[space.id].pop(key, None)
        elif step < 0.93:
            tier.drop_space(space)
            name = chance.randbytes(16)
            spaces[which] = begun(tier, Space(name, space.share_bytes, space.head_bytes))
            model[name] = {}
        elif step < 0.96:
            tier.close()
            tier = DiskTier.open(options, area.memory)
            spaces = [begun(tier, space) for space in spaces]
        check_integrity(tier)
        _take_dropped(tier, model)
        files = (tmp_path / "tier").iterdir()
        slabs = [file for file in files if file.suffix in {".slab", ".index"}]
        assert sum(file.stat().st_blocks * 512 for file in slabs) <= SIZE
    for space in spaces:
        listed = {key for piece in tier.scan(space) for key, _ in piece}
        assert listed == model[space.id].keys()
        _compare(tier, area, space, keys, model[space.id])
    tier.close()


def _take_dropped(tier: DiskTier, model: dict[bytes, dict[bytes, int]]) -> None:
    for name, gone in tier.take_dropped():
        for key in gone:
            del model[name][key]


def _compare(
    tier: DiskTier, area: Area, space: Space, keys: list[bytes], there: dict[bytes, int]
) -> None:
    back = area.empties(space, keys)
    for chunk, outcome in zip(back, tier.get(back, soon()), strict=True):
        assert outcome is (Outcome.OK if chunk.key in there else Outcome.ABSENT)
        assert outcome is Outcome.ABSENT or is_whole(chunk, salt=there[chunk.key])
