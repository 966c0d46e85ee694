"""The double in memory: it is a backend as any other, and breaks as it is told to."""

import threading
from pathlib import Path

import pytest

from kvd.errors import TierError
from kvd.outcomes import Outcome
from kvd.tier.contract import BackendOptions, TierBackend
from tests.tier.areas import Area, begun, is_whole, keys_of, space_of
from tests.tier.conformance import Conformance, MakeTier, put_all, soon
from tests.tier.doubles.memory_tier import MemoryTier


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


def test_losing() -> None:
    """With lose=1 all puts are OK and nothing is there."""
    area = Area(2**20)
    tier = opened(area, lose="1")
    space = begun(tier, space_of(4096))
    put_all(tier, area.chunks(space, keys_of("lost", 3)))
    assert tier.get(area.empties(space, keys_of("lost", 3)), soon()) == [Outcome.ABSENT] * 3


def test_corrupting() -> None:
    """With corrupt=1 every get is OK with one wrong bit."""
    area = Area(2**20)
    tier = opened(area, corrupt="1")
    space = begun(tier, space_of(4096))
    put_all(tier, area.chunks(space, [b"k"]))
    back = area.empty(space, b"k")
    assert tier.get([back], soon()) == [Outcome.OK]
    assert not is_whole(back)
    back.shares[0][0] ^= 1
    assert is_whole(back)


def test_failing() -> None:
    """With fail=1 every batch raises."""
    area = Area(2**20)
    tier = opened(area, fail="1")
    space = begun(tier, space_of(4096))
    with pytest.raises(TierError, match="fail=RATE"):
        tier.put(area.chunks(space, [b"k"]), soon())


def test_hanging(tmp_path: Path) -> None:
    """Batches wait while the file is there, past their deadline, and go on when it is removed."""
    file = tmp_path / "hang"
    area = Area(2**20)
    tier = opened(area, hang=str(file))
    space = begun(tier, space_of(4096))
    file.touch()
    ended = threading.Event()
    outcomes: list[Outcome] = []

    def put() -> None:
        outcomes.extend(tier.put(area.chunks(space, [b"k"]), 0.0))
        ended.set()

    thread = threading.Thread(target=put)
    thread.start()
    assert not ended.wait(0.05)
    file.unlink()
    thread.join()
    assert outcomes == [Outcome.LATE]


def test_waiting(tmp_path: Path) -> None:
    """With a delay beyond its deadline a batch is LATE."""
    del tmp_path
    area = Area(2**20)
    tier = opened(area, delay="0.01")
    space = begun(tier, space_of(4096))
    assert tier.put(area.chunks(space, [b"k"]), soon() - 120) == [Outcome.LATE]
