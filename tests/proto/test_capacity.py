"""What fits into the pool: chunks, what auto takes, what pinning takes."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd_proto.capacity import (
    CONTEXT_GPU_BYTES,
    auto_cpu_bytes,
    pin_gpu_bytes,
    pin_kernel_bytes,
    pinning_lanes,
    size_pool,
)
from kvd_proto.errors import SizeError
from kvd_proto.sizes import format_size, parse_size
from tests.layouts import flat_layout

GIB = 1024**3


def test_mixed_page_sizes_are_counted_once() -> None:
    """Regression (Kimi K2.5 at TP 4): the pool is sized by the sum of pages, each one once."""
    pages = (36_864,) * 61 + (4_096,) * 61
    sizes = size_pool([flat_layout(*pages, factor=2)] * 4, 16 * GIB)
    assert sizes.slot_bytes == (sum(pages) * 2,) * 4
    assert sizes.bytes_per_chunk == sum(pages) * 2 * 4
    assert sizes.num_chunks == 16 * GIB // (sum(pages) * 2 * 4)


def test_every_slot_lies_inside_the_pool() -> None:
    """All arenas together stay inside the budget, whatever the shares."""
    layouts = [flat_layout(5000, 3), flat_layout(9000), flat_layout(1)]
    sizes = size_pool(layouts, 1_000_000)
    assert sizes.slot_bytes == (8192, 12288, 4096)
    assert sum(sizes.slot_bytes) * sizes.num_chunks <= 1_000_000


def test_replicated_shares_take_one_arena() -> None:
    """Ranks that hold the same bytes store them once."""
    sizes = size_pool([flat_layout(4096, replicated=True)] * 8, 4096 * 10)
    assert sizes.slot_bytes == (4096,)
    assert sizes.num_chunks == 10


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
    ],
)
def test_impossible_sizes_are_refused_by_name(calculate: Callable[[], object], named: str) -> None:
    """A size that no pool can have is an error that names it."""
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


def test_auto_counts_each_rank_once_and_replicated_shares_once() -> None:
    """Stages of different size are summed, in any order; ranks that hold the same are one."""
    stages = [flat_layout(*(4096,) * layers, blocks=100) for layers in (1, 3)]
    for layouts in (stages, stages[::-1]):
        size, why = auto_cpu_bytes(layouts, available=GIB, reserve=0)
        assert size == 2 * 4 * 4096 * 100
        assert "2 x 1.56 MiB GPU KV of 2 ranks = 3.12 MiB" in why
    same = [flat_layout(4096, blocks=100, replicated=True)] * 8
    assert auto_cpu_bytes(same, available=GIB, reserve=0)[0] == 2 * 4096 * 100


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


def test_auto_says_what_pinning_takes() -> None:
    """12 MiB of kernel memory for each GiB and lane that pins it: 48 bytes a page of 4 KiB."""
    rank = flat_layout(4096, blocks=10 * GIB // 4096, replicated=True)
    _, why = auto_cpu_bytes([rank] * 8, available=99 * GIB, reserve=4 * GIB, lanes=8)
    assert "available 99 GiB after pinning - reserve 4 GiB" in why
    assert "; pool 20 GiB, pinned 8 times for 1.88 GiB of kernel memory" in why
    assert pin_kernel_bytes(4096, 1) == 48
    assert pin_gpu_bytes(64 * GIB) == GIB // 8


def test_the_operators_table_follows_from_the_measured_figures() -> None:
    """docs/operations.md: memory of each GPU, kernel memory, and what to take off vLLM's share."""
    page = (Path(__file__).parents[2] / "docs/operations.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+ [GT]iB) \| (TP .*?) \| (.+) \|$", page, re.MULTILINE)
    assert len(rows) == 9
    for size, ranks, figures in rows:
        pool = parse_size(size)
        each = pool // 8 if ranks == "TP 8" else pool
        of_gpu = CONTEXT_GPU_BYTES + pin_gpu_bytes(each)
        kernel = pin_kernel_bytes(pool, 8 if ranks == "TP 8, replicated" else 1)
        off = [math.ceil(1000 * of_gpu / mib / 2**20) / 1000 for mib in (81_559, 143_771)]
        told = figures.split(" | ")
        assert told[:2] == [f"{of_gpu // 2**20:,} MiB", format_size(kernel)], size
        assert told[4:] == [f"{share:.3f}" for share in off], size
