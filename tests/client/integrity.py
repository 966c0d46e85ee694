"""What must hold of a reader of changes and of an announcer, whatever they were told."""

from collections import ChainMap
from collections.abc import Mapping

from kvd_client.announcer import MAX_REMEMBERED_REMOVALS, Announcer
from kvd_client.block_chains import BlockChains, members
from kvd_client.changes import ChangeReader, ChunkLocation, PublishedState


def published_in(state: PublishedState) -> Mapping[bytes, ChunkLocation]:
    """All that is published of one medium."""
    return ChainMap(state.confirmed, state.unconfirmed, state.gone)


def check_reader(reader: ChangeReader) -> None:
    """No chunk is published twice or half, no snapshot is of nothing, the ring is ahead."""
    for published in (reader._memory, reader._tiers):
        assert len(published_in(published)) == len(published)
        assert not published.touched
        assert b"" not in published_in(published)
        assert reader._directory is not None or published.snapshot_at is None
    assert reader._directory is None or reader._position <= reader._directory.changes.head


def check_announcer(announcer: Announcer) -> None:
    """Chunks and blocks name each other; removals are bounded, and of what is not announced."""
    check_chains(announcer._chains)
    chunks = {*announcer._memory.values(), *announcer._tiers.values()}
    assert len(chunks) == len(announcer)
    holders = {(block, chunk) for block in announcer._chains for chunk in members(block.holders)}
    assert holders == {(block, chunk) for chunk in chunks for block in chunk.blocks}
    removals = announcer._removals.keys()
    assert len(removals) <= MAX_REMEMBERED_REMOVALS
    assert not removals & {(group, in_tiers, each) for group, each, in_tiers in announcer.announced}


def check_chains(chains: BlockChains) -> None:
    """Parents know their children, every block has a holder, and no chain has a gap."""
    groups = chains._groups.values()
    assert all(any(group.media) for group in groups)
    assert {(block.group.number, block.parent, block) for block in chains if block.parent} == {
        (group.number, parent, block)
        for group in groups
        for parent, some in group.children.items()
        for block in members(some)
    }
    for block in chains:
        assert block.holders is not None
        assert block.is_described == (block.parent is not None)
        assert block.has_chain or not block.chained
