"""The disk tier: it is a backend as any other, and what a disk may do to it."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from kvd.tier.contract import Options
from kvd.tier.disk import DiskTier
from tests.tier.areas import Area
from tests.tier.conformance import Conformance, MakeTier


class TestDiskTier(Conformance):
    """The conformance suite."""

    keeps: ClassVar[bool] = True

    @pytest.fixture
    def make_tier(self, tmp_path: Path, area: Area) -> Iterator[MakeTier]:
        """A disk in a folder of the test, which goes with it."""
        opened: list[DiskTier] = []

        def make(nbytes: int) -> DiskTier:
            options = Options(str(tmp_path / "tier"), {"size": str(nbytes), "floor": "64MiB"})
            DiskTier.check(options)
            opened.append(DiskTier.open(options, area.memory))
            return opened[-1]

        yield make
        for tier in opened:
            tier.check_integrity()
            tier.close()
