"""The double in memory: it is a backend as any other, and breaks as it is told to."""

import pytest

from kvd.tier.contract import BackendOptions, TierBackend
from tests.tier.areas import Area
from tests.tier.conformance import Conformance, MakeTier
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
