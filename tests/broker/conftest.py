"""A broker above one disk."""

import pytest

from tests.broker.benches import Bench, FakeTier, TierBench


@pytest.fixture(autouse=True)
def one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories read the time that tests let pass."""
    monkeypatch.setattr("kvd_proto.tier_table.monotonic_ns", lambda: int(Bench.now * 1e9))


@pytest.fixture
def bench() -> TierBench:
    """The broker."""
    return TierBench("disk:/a")


@pytest.fixture
def disk(bench: TierBench) -> FakeTier:
    """The disk of `bench`."""
    return bench.fakes[0]
