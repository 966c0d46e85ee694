"""Which engines may share chunks: the namespace id.

The id is a hash over everything that decides what the bytes of a chunk mean:
the fingerprint as the engine states it, and the layout as its registration
shows it. The number of GPU blocks, strides and addresses do not matter: an
engine with more GPU memory reads the same chunks.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import msgpack
import msgspec

from kvd_proto.layout import RankLayout
from kvd_proto.messages import Register


def _shape(layout: RankLayout) -> list[Any]:
    return [
        layout.blocks_per_chunk,
        layout.hash_block_size,
        layout.replicated,
        layout.slot_bytes,
        layout.kinds,
        layout.pages,
    ]


def namespace_id(registrations: Sequence[Register], uid: int | None = None) -> bytes:
    """The 16-byte id for one engine's registrations, ordered by rank.

    With `uid`, only engines of that user have it, whatever else an engine says of itself.
    """
    first = registrations[0]
    parts: list[Any] = [
        msgspec.to_builtins(first.fingerprint),
        first.world_size,
        [[r.stage, _shape(r.layout)] for r in registrations],
    ]
    if first.temporary:  # never what another kind of engine would look for
        parts.append("temporary")
    if uid is not None:
        parts.append({"uid": uid})
    return hashlib.blake2b(msgpack.packb(parts), digest_size=16).digest()
