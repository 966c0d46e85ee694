import numpy as np
import pytest

from kvd_tools.demo.content import POISON, chain, chunk_key
from kvd_tools.demo.memory import GROUPS, STRIDES, TENSORS, KvTensors
from kvd_tools.demo.rank import Rank
from kvd_tools.demo.wire import Setup, Span

NUM_BLOCKS = 8
KEYS = [chunk_key(h, 0) for h in chain((1, 2))]
SPAN = Span(group=0, first=1, block_ids=[5, 2, 7], keys=KEYS)  # the first chunk from its second on


def make_rank(rank: int = 0, *, corrupt: bool = False) -> Rank:
    """A rank over plain memory, without a daemon."""
    storages = [np.zeros((NUM_BLOCKS, stride), np.uint8) for stride in STRIDES]
    pages = [storages[t.storage][:, t.offset : t.offset + t.padded_bytes] for t in TENSORS]
    setup = Setup(
        runtime_dir="",
        engine="demo",
        rank=rank,
        world_size=2,
        num_blocks=NUM_BLOCKS,
        blocks_per_chunk=2,
        block_tokens=256,
        window_tokens=1280,
        corrupt=corrupt,
    )
    return Rank(setup, pages)


def test_places_count_within_chunks() -> None:
    """A span that begins inside a chunk gives every block its chunk and its place there."""
    assert list(SPAN.places(2)) == [(KEYS[0], 1, 5), (KEYS[1], 0, 2), (KEYS[1], 1, 7)]


def test_what_is_filled_verifies_and_nothing_strays() -> None:
    """All bytes in use are compared; null block and padding keep what they had."""
    rank = make_rank()
    rank.fill([SPAN])
    assert rank.verify([SPAN]) == (3 * sum(t.page_bytes for t in TENSORS), 0)
    assert rank.strayed() == 0


def test_poisoned_blocks_are_wrong() -> None:
    """A load that wrote nothing would be found out."""
    rank = make_rank()
    rank.fill([SPAN])
    rank.poison([SPAN])
    verified, mismatched = rank.verify([SPAN])
    assert mismatched > 0.98 * verified


def test_another_ranks_bytes_are_wrong() -> None:
    """Content differs between ranks, so mixed up shares are found out."""
    one, other = make_rank(0), make_rank(1)
    one.fill([SPAN])
    for mine, theirs in zip(one._pages, other._pages, strict=True):
        theirs[:] = mine
    verified, mismatched = other.verify([SPAN])
    assert mismatched > 0.98 * verified


def test_a_corrupted_byte_is_counted() -> None:
    """The flipped byte, and only it, is wrong; it is flipped once."""
    rank = make_rank(corrupt=True)
    rank.fill([SPAN])
    rank.corrupt([SPAN])
    assert rank.verify([SPAN])[1] == 1
    rank.fill([SPAN])
    rank.corrupt([SPAN])
    assert rank.verify([SPAN])[1] == 0


@pytest.mark.parametrize("tensor", [0, 2])
def test_a_write_to_the_null_block_strays(tensor: int) -> None:
    """The null block may never be written."""
    rank = make_rank()
    rank._pages[tensor][0, 3] = POISON ^ 1
    assert rank.strayed() == 1


def test_a_write_to_padding_strays() -> None:
    """Bytes between the page's end and the next page may never be written."""
    rank = make_rank()
    rank._pages[2][4, TENSORS[2].page_bytes] = POISON ^ 1
    assert rank.strayed() == 1


def test_the_layout_describes_the_tensors() -> None:
    """Storages, groups and pages are reported as they are."""
    tensors = KvTensors(NUM_BLOCKS)
    layout = tensors.layout(2, 256, 1280)
    assert layout.storages == tuple(NUM_BLOCKS * stride for stride in STRIDES)
    assert [tuple(ref.tensor for ref in group.refs) for group in layout.groups] == list(GROUPS)
    assert [pages.shape for pages in tensors.pages()] == [
        (NUM_BLOCKS, t.padded_bytes) for t in TENSORS
    ]
    tensors.close()
