"""What is told of a namespace's blocks, and a chunk that is to be told, as blocks.

Blocks in memory and blocks in tiers are told of as of two media. `Chains` knows the latter as
groups of their own, so that a chain may go on in the other medium.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from kvd_proto.descriptions import Description
from kvd_proto.directory import KEY_BYTES
from kvd_proto.said import Place

_GROUP_BYTES = 4
_TOKEN_BYTES = 4
BELOW = 1 << 32
"""Is added to the group of blocks in tiers."""


class StoredBlocks(NamedTuple):
    """Blocks that are there, each the parent of the next.

    Without a description, of a chunk that nobody described, there is one hash, the tokens are
    empty and `block_size` is 0. The other fields are those of `Description`.

    below: they lie in tiers; else in memory.
    """

    hashes: tuple[bytes, ...]
    parent: bytes
    tokens: bytes
    block_size: int
    group: int
    kind: str = ""
    window: int | None = None
    lora: str | None = None
    extra: tuple[tuple[Any, ...] | None, ...] | None = None
    below: bool = False


class RemovedBlocks(NamedTuple):
    """Blocks of one group that are not there any more: in tiers (`below`), else in memory."""

    hashes: tuple[bytes, ...]
    group: int
    below: bool = False


Announcement: TypeAlias = StoredBlocks | RemovedBlocks


def locality(media: Iterable[str]) -> str | None:
    """Return where blocks in tiers of these media are, as events have it; None: here and there."""
    places = {"REMOTE" if medium == "remote" else "LOCAL" for medium in media}
    return places.pop() if len(places) == 1 else None


class Offer(NamedTuple):
    """A chunk that is to be told; `group` is with `BELOW`, as that of its blocks."""

    place: Place
    description: Description | None
    group: int
    hashes: tuple[bytes, ...]
    parent: bytes | None


def below(key: bytes) -> bytes:
    """The name of a chunk in tiers: longer than any key."""
    return key.ljust(KEY_BYTES, b"\0") + bytes([len(key)])


def offer_of(key: bytes, place: Place, description: Description | None, medium: int) -> Offer:
    """A chunk; `medium` is `BELOW` or 0."""
    if description is not None:
        first, end = place.first, place.first + place.count
        hashes = description.hashes[first:end]
        if len(hashes) == 1 or (hashes and len(set(hashes)) == len(hashes)):
            parent = description.hashes[first - 1] if first else description.parent
            return Offer(place, description, description.group % BELOW + medium, hashes, parent)
    if len(key) > _GROUP_BYTES:
        group = int.from_bytes(key[-_GROUP_BYTES:], "big")
        return Offer(place, None, group + medium, (key[:-_GROUP_BYTES],), None)
    return Offer(place, None, medium, (key,), None)


def removed(gone: Mapping[int, list[bytes]]) -> list[RemovedBlocks]:
    """Blocks that are gone, by group, as it is of `Chains`."""
    return [
        RemovedBlocks(tuple(hashes), group % BELOW, group >= BELOW)
        for group, hashes in gone.items()
    ]


def runs(which: list[bool]) -> Iterator[tuple[int, int]]:
    """First index and end of each run of true ones."""
    begin = None
    for i, wanted in enumerate([*which, False]):
        if wanted and begin is None:
            begin = i
        elif not wanted and begin is not None:
            yield begin, i
            begin = None


def stored_blocks(offer: Offer, begin: int, end: int) -> StoredBlocks:
    """Some of a chunk's blocks that are held."""
    hashes, description = offer.hashes[begin:end], offer.description
    group, in_tiers = offer.group % BELOW, offer.group >= BELOW
    if description is None:
        return StoredBlocks(hashes, b"", b"", 0, group, below=in_tiers)
    parent = offer.hashes[begin - 1] if begin else offer.parent or b""
    begin, end = offer.place.first + begin, offer.place.first + end
    size = description.block_size
    extra = None if description.extra is None else description.extra[begin:end]
    return StoredBlocks(
        hashes,
        parent,
        description.tokens[begin * size * _TOKEN_BYTES : end * size * _TOKEN_BYTES],
        size,
        group,
        description.kind,
        description.window,
        description.lora,
        extra,
        in_tiers,
    )
