"""Turns a bit in objects of a Mooncake Store: `… -m tests.tier.spoiling MASTER NAMESPACE KEY…`.

Namespace and keys in hexadecimal digits; the chunks are those of `tests.daemon.engines.Engine`.
"""

import sys

from kvd.errors import TierError
from kvd.outcomes import Outcome
from kvd.tier.batches import HEAD_BYTES, space_id
from kvd.tier.contract import BackendOptions, Space
from kvd.tier.mooncake import MooncakeTier
from kvd_proto.descriptions import max_description_bytes, record_bytes
from tests.daemon.engines import FACTOR, PAGE, TENSORS, make_layout
from tests.tier.areas import Area
from tests.tier.conformance import put_all, soon
from tests.waiting import eventually

SHARES = (PAGE * FACTOR * TENSORS,) * 2  # of the ranks of an Engine


def main(master: str, namespace: str, *keys: str) -> None:
    """Get each chunk, turn a bit, and put it in place of the right one."""
    area = Area()

    def opened() -> MooncakeTier | TierError:
        try:
            return MooncakeTier.open(BackendOptions("", {"master": master}), area.memory)
        except TierError as error:  # the master stands still for a while
            return error

    tier = eventually(opened, lambda found: isinstance(found, MooncakeTier))
    assert isinstance(tier, MooncakeTier)
    head_bytes = HEAD_BYTES + max_description_bytes(record_bytes(make_layout()))
    name = bytes.fromhex(namespace)
    space = Space(space_id(name, tier.salt(name)), SHARES, head_bytes)
    wanted = [bytes.fromhex(key) for key in keys]
    chunks = area.empties(space, wanted)
    assert tier.get(chunks, soon()) == [Outcome.OK] * len(wanted)
    tier.remove(space, wanted)
    for chunk in chunks:
        chunk.shares[0][0] ^= 1
    put_all(tier, chunks)
    tier.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
