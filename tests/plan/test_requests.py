"""Requests in an engine's blocks: the longest that fits, admission, the override, windows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.plan.figures import LayerGroup, admit, block_bytes, blocks_needed, longest_request
from kvd_proto.errors import SizeError

FULL = LayerGroup(32, 4096, 16)
WINDOW = LayerGroup(32, 4096, 16, sliding_window=64)


def test_a_block_takes_a_page_of_each_layer_of_the_largest_group() -> None:
    """Layers of the largest group times the common page size."""
    small, large = LayerGroup(10, 4096, 16), LayerGroup(12, 4096, 16, 64)
    assert block_bytes([small, large]) == 12 * 4096
    assert block_bytes([small]) == 10 * 4096


def test_the_null_block_is_nobodys() -> None:
    """Of n blocks a request gets n - 1."""
    assert longest_request([FULL], 11, limit=10_000) == 160
    admit(160, [FULL], measured=11)
    with pytest.raises(SizeError):
        admit(161, [FULL], measured=11)


def test_an_override_is_not_ignored_until_a_request_waits_for_ever() -> None:
    """Regression: a request that only the measured count could hold is refused at once."""
    admit(8192, [FULL], measured=4096)
    with pytest.raises(SizeError) as refusal:
        admit(8192, [FULL], measured=4096, override=101)
    text = str(refusal.value)
    with pytest.raises(SizeError, match="give the KV cache more memory"):
        admit(8192, [FULL], measured=101)
    assert "max seq len 8192 needs 512 blocks (64 MiB a rank)" in text
    assert "available are 100 (12.5 MiB" in text
    assert "raise the block override, or lower max seq len to 1600 or less" in text
    admit(1600, [FULL], measured=4096, override=101)
    admit(8192, [FULL], measured=10, override=4096)


def test_behind_a_window_blocks_are_given_back() -> None:
    """A sliding group holds the window and one batch, and one block for not being aligned."""
    assert WINDOW.blocks_for(100_000, batched_tokens=128) == -(-(63 + 128) // 16) + 1
    assert WINDOW.blocks_for(20, batched_tokens=128) == 2
    assert blocks_needed([FULL, WINDOW], 16_000, 128) == 1000 + 13


def test_windows_alone_are_bounded_by_the_limit() -> None:
    """If no group grows with the request, the model's limit is the longest request."""
    assert longest_request([WINDOW], 20, limit=1_000_000, batched_tokens=128) == 1_000_000
    assert longest_request([WINDOW], 5, limit=1_000_000, batched_tokens=128) == 64


@given(
    st.lists(
        st.tuples(st.integers(1, 64), st.one_of(st.none(), st.integers(1, 200))),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 60),
    st.integers(1, 100),
)
def test_the_longest_request_is_the_longest(
    shapes: list[tuple[int, int | None]], blocks: int, batched: int
) -> None:
    """The result is admitted and one token more is not: found by trying every length."""
    groups = [LayerGroup(1, 64, size, window) for size, window in shapes]
    limit = 400
    fitting = [
        tokens
        for tokens in range(limit + 1)
        if blocks_needed(groups, tokens, batched) <= blocks - 1
    ]
    longest = longest_request(groups, blocks, limit, batched)
    assert longest == max(fitting)
    assert fitting == list(range(longest + 1))
    admit(longest, groups, blocks, batched_tokens=batched)
