"""What fits: chunks into the pool; pool bytes per block, override, longest request, admission."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd_proto.capacity import (
    CONTEXT_GPU_BYTES,
    LayerGroup,
    admit,
    auto_cpu_bytes,
    blocks_needed,
    longest_request,
    pin_gpu_bytes,
    pin_kernel_bytes,
    pinning_lanes,
    size_pool,
)
from kvd_proto.errors import SizeError
from kvd_proto.text import format_size, parse_size
from tests.layouts import flat_layout

GIB = 1024**3
FULL = LayerGroup((4096,) * 32, 16)
WINDOW = LayerGroup((4096,) * 32, 16, sliding_window=64)


def test_a_budget_below_one_chunk_is_refused_with_the_remedy() -> None:
    """The refusal names budget, chunk and what to raise, exactly."""
    with pytest.raises(SizeError, match=r"pool of 4095 bytes.*at least 4096"):
        size_pool([flat_layout(4096)], 4095)
    assert size_pool([flat_layout(4096)], 4096).num_chunks == 1


@pytest.mark.parametrize(
    ("calculate", "named"),
    [
        (lambda: size_pool([flat_layout(4096)], -1), "a pool of -1 bytes"),
        (lambda: size_pool([flat_layout(4096)], 0), "a pool of 0 bytes"),
        (lambda: auto_cpu_bytes([flat_layout(1)], available=-1, reserve=0), "available = -1;"),
        (lambda: auto_cpu_bytes([flat_layout(1)], available=1, reserve=-1), "reserve = -1;"),
        (lambda: LayerGroup((4096,), 0), "block_size = 0;"),
        (lambda: LayerGroup((4096,), 16, 0), "sliding_window = 0;"),
        (lambda: blocks_needed([FULL], -1), "tokens = -1;"),
        (lambda: blocks_needed([WINDOW], 16, 0), "batched_tokens = 0;"),
        (lambda: longest_request([FULL], 0, 16), "num_blocks = 0;"),
        (lambda: admit(-1, [FULL], 10), "tokens = -1;"),
    ],
)
def test_impossible_numbers_are_refused_by_name(
    calculate: Callable[[], object], named: str
) -> None:
    """A number that no pool, group or request can have is an error that names it."""
    with pytest.raises(SizeError, match=re.escape(named)):
        calculate()


def test_auto_is_the_ratio_capped_by_what_is_there() -> None:
    """`auto` takes ratio x GPU KV x ranks, at most the memory available less the reserve."""
    ten, one = flat_layout(4096, blocks=10 * GIB // 4096), flat_layout(4096, blocks=GIB // 4096)
    size, why = auto_cpu_bytes([ten, ten], available=100 * GIB, reserve=4 * GIB)
    assert size == 40 * GIB
    assert "2 x 10 GiB GPU KV x 2 ranks = 40 GiB" in why
    assert "\n" not in why
    size, why = auto_cpu_bytes([ten, ten], ratio=3.0, available=34 * GIB, reserve=4 * GIB)
    assert size == 30 * GIB
    assert "available 34 GiB - reserve 4 GiB = 30 GiB; pool 30 GiB" in why
    assert auto_cpu_bytes([one], available=GIB, reserve=2 * GIB)[0] == 0


@pytest.mark.parametrize(
    ("devices", "replicated", "lanes"),
    [
        (["host"] * 2, False, 0),
        (["cuda:a"], False, 1),
        (["cuda:a", "cuda:b"], False, 1),
        (["cuda:a", "cuda:b"], True, 2),
        (["cuda:a", "cuda:a"], True, 1),
    ],
    ids=["host", "one", "two", "replicated", "one GPU"],
)
def test_how_often_a_pool_is_pinned(devices: list[str], replicated: bool, lanes: int) -> None:
    """Once where arenas divide it, by each GPU's lane where all ranks hold the same."""
    layouts = [flat_layout(4096, replicated=replicated)] * len(devices)
    assert pinning_lanes(layouts, devices) == lanes


def test_the_operators_table_follows_from_the_measured_figures() -> None:
    """docs/operations.md: memory of each GPU, kernel memory, and what to take off vLLM's share."""
    page = (Path(__file__).parents[2] / "docs/operations.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+ [GT]iB) \| (TP .*?) \| (.+) \|$", page, re.MULTILINE)
    assert len(rows) == 6
    for size, ranks, figures in rows:
        pool = parse_size(size)
        each = pool // 8 if ranks == "TP 8" else pool
        of_gpu = CONTEXT_GPU_BYTES + pin_gpu_bytes(each)
        kernel = pin_kernel_bytes(pool, 8 if ranks == "TP 8, replicated" else 1)
        off = [math.ceil(1000 * of_gpu / mib / 2**20) / 1000 for mib in (81_559, 143_771)]
        told = figures.split(" | ")
        assert told[:2] == [f"{of_gpu // 2**20:,} MiB", format_size(kernel)], size
        assert told[4:] == [f"{share:.3f}" for share in off], size


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
    groups = [LayerGroup((64,), size, window) for size, window in shapes]
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
