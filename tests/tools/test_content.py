import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd_tools.demo.content import PageContent, chain, chunk_key, page_seed

PAGE = 256
KEY = b"k" * 36


def made(seed: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """A page with the content of `seed`."""
    page = np.zeros(PAGE, np.uint8)
    PageContent(PAGE).fill(page, seed)
    return page


@given(st.integers(0, 2**64 - 1))
def test_a_page_matches_its_own_seed(seed: int) -> None:
    """What was filled verifies."""
    assert PageContent(PAGE).mismatches(made(seed), seed) == 0


@given(st.integers(0, 2**64 - 1), st.integers(0, PAGE - 1), st.integers(1, 255))
def test_one_wrong_byte_is_counted(seed: int, at: int, flip: int) -> None:
    """A single changed byte, anywhere, counts as exactly one."""
    page = made(seed)
    page[at] ^= flip
    assert PageContent(PAGE).mismatches(page, seed) == 1


@given(st.integers(0, 2**64 - 1), st.integers(1, PAGE // 8 - 1))
def test_a_shifted_page_is_wrong(seed: int, words: int) -> None:
    """The right bytes at the wrong place do not verify."""
    assert PageContent(PAGE).mismatches(np.roll(made(seed), 8 * words), seed) > 0


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_pages_of_different_seeds_differ_in_every_word(one: int, other: int) -> None:
    """A page of another key, rank, tensor or block is wrong in every word."""
    if one != other:
        assert (made(one).view(np.uint64) != made(other).view(np.uint64)).all()


def test_every_coordinate_makes_another_seed() -> None:
    """Key, rank, tensor and block each change the content."""
    seeds = {
        page_seed(KEY, 0, 0, 0),
        page_seed(KEY, 1, 0, 0),
        page_seed(KEY, 0, 1, 0),
        page_seed(KEY, 0, 0, 1),
        page_seed(b"j" * 36, 0, 0, 0),
    }
    assert len(seeds) == 5


def test_hashes_are_chained() -> None:
    """A chunk's hash depends on all before it, its key also on group and blocks left out."""
    one, other = list(chain((1, 2, 3))), list(chain((9, 2, 3)))
    assert not set(one) & set(other)
    assert list(chain((1, 2, 7)))[:2] == one[:2]
    assert len(chunk_key(one[0], 0)) == 36
    assert len({chunk_key(one[0], 0), chunk_key(one[0], 1), chunk_key(one[0], 1, 1)}) == 3


def test_pages_are_whole_words() -> None:
    """A page size that is no multiple of eight bytes is refused."""
    with pytest.raises(ValueError, match="12 bytes"):
        PageContent(12)
