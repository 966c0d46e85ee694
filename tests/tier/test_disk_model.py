"""The disk tier beside a dictionary: what is found is what was put and has not gone."""

import random
from pathlib import Path

import pytest

from kvd.outcomes import Outcome
from kvd.tier.contract import BackendOptions, Space
from kvd.tier.disk import DiskTier
from tests.tier.areas import Area, begun, is_whole, keys_of, space_of
from tests.tier.conformance import soon
from tests.tier.disk_integrity import check_integrity

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
