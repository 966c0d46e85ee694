"""Which pages of a prompt are found, whatever nodes they were stored in."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvd_client.sglang.pages import (
    PageRun,
    cached_pages,
    cached_prefix,
    split_into_chunks,
    window_ends,
)
from kvd_client.tickets import BlockRange

PAGES = 40
KEYS = [bytes([page]) * 32 for page in range(PAGES)]


class Store:
    """Chunks by key, as the directory has them."""

    def __init__(self, pages_per_chunk: int) -> None:
        self.pages_per_chunk = pages_per_chunk
        self.blocks: dict[bytes, BlockRange] = {}
        self.content: dict[tuple[bytes, int], int] = {}

    def put(self, first: int, end: int) -> None:
        """Store the pages of a node."""
        for run in split_into_chunks(KEYS[first:end], self.pages_per_chunk):
            held = self.blocks.get(run.key, (self.pages_per_chunk, 0))
            if held[0] > run.block:
                self.blocks[run.key] = run.blocks
                for i in range(run.num_pages):
                    self.content[run.key, run.block + i] = first + run.page + i

    def pages(self, runs: Sequence[PageRun]) -> list[int]:
        """What a load of these runs reads."""
        return [self.content[run.key, run.block + i] for run in runs for i in range(run.num_pages)]


stores = st.builds(
    lambda pages_per_chunk, nodes: (pages_per_chunk, nodes),
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(0, PAGES - 1), st.integers(1, PAGES)), max_size=8),
)


def filled(pages_per_chunk: int, nodes: list[tuple[int, int]]) -> tuple[Store, set[int]]:
    """A store of these nodes, and the pages that it has."""
    store, there = Store(pages_per_chunk), set()
    for first, count in nodes:
        store.put(first, min(first + count, PAGES))
        there |= set(range(first, min(first + count, PAGES)))
    return store, there


@given(stores, st.integers(0, PAGES - 1))
def test_a_prefix_reads_the_right_pages(made: tuple[int, list[tuple[int, int]]], at: int) -> None:
    """From wherever a lookup starts, its runs hold just its first pages, in order."""
    store, _ = filled(*made)
    runs = cached_prefix(KEYS[at:], store.pages_per_chunk, store.blocks.get)
    reach = sum(run.num_pages for run in runs)
    assert store.pages(runs) == list(range(at, at + reach))
    assert [run.page for run in runs] == [
        sum(run.num_pages for run in runs[:i]) for i in range(len(runs))
    ]


@given(stores, st.integers(0, PAGES - 1))
def test_a_prefix_ends_at_the_first_page_that_is_not_there(
    made: tuple[int, list[tuple[int, int]]], at: int
) -> None:
    """All pages up to the first gap are found, in whatever chunks they are."""
    store, _ = filled(*made)
    there = cached_pages(KEYS, store.pages_per_chunk, store.blocks.get)
    gap = next((page for page in range(at, PAGES) if not there[page]), PAGES)
    runs = cached_prefix(KEYS[at:], store.pages_per_chunk, store.blocks.get)
    assert sum(run.num_pages for run in runs) == gap - at


@given(stores)
def test_all_that_was_stored_is_covered(made: tuple[int, list[tuple[int, int]]]) -> None:
    """A page is found in some chunk just where a node with it was stored."""
    store, there = filled(*made)
    found = cached_pages(KEYS, store.pages_per_chunk, store.blocks.get)
    assert {page for page in range(PAGES) if found[page]} == there


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 8))
def test_windows_end_where_their_pages_are(found: list[bool], size: int) -> None:
    """A length counts where its last pages are there, all of them where it is shorter."""
    expected = {n for n in range(1, len(found) + 1) if all(found[max(0, n - size) : n])}
    assert window_ends(found, size) == expected
