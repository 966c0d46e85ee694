"""What the ring of changes tells of tiers."""

from kvd.cache.directory import DirectoryWriter
from kvd_proto.changes import ChangeKind
from kvd_proto.directory import DirectoryHeader

KEPT, RELEASED, TIERS = ChangeKind.KEPT, ChangeKind.RELEASED, ChangeKind.TIERS
A, B = b"a", b"b"


def make() -> DirectoryWriter:
    """A directory with two tiers."""
    header = DirectoryHeader.plan(*(4, bytes(16), bytes(16), 4), tier_capacity=16, num_tiers=2)
    return DirectoryWriter(bytearray(header.total_bytes), header)


def told(writer: DirectoryWriter, after: int = 0) -> list[tuple[object, ...]]:
    """First block, count, group, kind and key of the changes after this one."""
    changes = writer.changes.read(after, 100)
    assert changes is not None
    return [change[4:] for change in changes]


def test_a_chunk_is_kept_from_its_first_tier_to_its_last() -> None:
    """The first tier that holds a chunk is a change, and the last one that does not any more."""
    writer = make()
    tiers = writer.tiers
    assert tiers is not None
    tiers.hold(A, 0, 1, 3, 5)
    tiers.hold(A, 1, 1, 3, 5)
    tiers.hold(A, 1, 2, 1, 5)  # less than the other tier has: not noted
    tiers.mark_absent(B, 1.0)
    tiers.release(A, 1)
    tiers.release(B, 0)
    assert told(writer) == [(1, 3, 5, KEPT, A)]
    tiers.hold(A, 1, 0, 4, 5)
    tiers.release(A, 0)
    tiers.release(A, 1)
    assert told(writer, 1) == [(0, 4, 5, KEPT, A), (0, 0, 0, RELEASED, A)]
    writer.check_integrity()
