"""From reported bytes to chunks, and sizes as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd_proto.errors import SizeError
from kvd_proto.layout import GroupSpec, RankLayout, TensorRef, TensorSpec
from kvd_proto.sizes import (
    auto_cpu_bytes,
    format_size,
    parse_size,
    size_pool,
)

GIB = 1024**3


def rank(
    pages: tuple[int, ...], blocks: int = 100, factor: int = 1, *, replicated: bool = False
) -> RankLayout:
    """One group, one storage per page size."""
    return RankLayout(
        num_blocks=blocks,
        blocks_per_chunk=factor,
        hash_block_size=16,
        storages=tuple(page * blocks for page in pages),
        tensors=tuple(TensorSpec(i, 0, page, page) for i, page in enumerate(pages)),
        groups=(GroupSpec(tuple(TensorRef(i, page) for i, page in enumerate(pages)), 16),),
        replicated=replicated,
    )


def test_the_formulas_chain() -> None:
    """Bytes per chunk are those of a block over all layers and ranks times the factor."""
    sizes = size_pool([rank((16384,) * 32, blocks=1000, factor=4)] * 2, GIB + 5)
    assert sizes.bytes_per_chunk == 16384 * 32 * 2 * 4
    assert sizes.num_chunks == 256


def test_mixed_page_sizes_are_counted_once() -> None:
    """Regression (Kimi K2.5 at TP 4): the pool is sized by the sum of pages, each one once."""
    pages = (36_864,) * 61 + (4_096,) * 61
    sizes = size_pool([rank(pages, factor=2)] * 4, 16 * GIB)
    assert sizes.slot_bytes == (sum(pages) * 2,) * 4
    assert sizes.bytes_per_chunk == sum(pages) * 2 * 4
    assert sizes.num_chunks == 16 * GIB // (sum(pages) * 2 * 4)


def test_every_slot_lies_inside_the_pool() -> None:
    """All arenas together stay inside the budget, whatever the shares."""
    layouts = [rank((5000, 3)), rank((9000,)), rank((1,))]
    sizes = size_pool(layouts, 1_000_000)
    assert sizes.slot_bytes == (8192, 12288, 4096)
    assert sum(sizes.slot_bytes) * sizes.num_chunks <= 1_000_000


def test_replicated_shares_take_one_arena() -> None:
    """Ranks that hold the same bytes store them once."""
    sizes = size_pool([rank((4096,), replicated=True)] * 8, 4096 * 10)
    assert sizes.slot_bytes == (4096,)
    assert sizes.num_chunks == 10


def test_a_budget_below_one_chunk_is_refused_with_the_remedy() -> None:
    """The refusal names budget, chunk and what to raise, exactly."""
    with pytest.raises(SizeError, match=r"pool of 4095 bytes.*at least 4096"):
        size_pool([rank((4096,))], 4095)
    assert size_pool([rank((4096,))], 4096).num_chunks == 1


def test_auto_is_the_ratio_capped_by_what_is_there() -> None:
    """`auto` takes ratio x GPU KV x ranks, at most the memory available less the reserve."""
    ten, one = rank((4096,), blocks=10 * GIB // 4096), rank((4096,), blocks=GIB // 4096)
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
    stages = [rank((4096,) * layers, blocks=100) for layers in (1, 3)]
    for layouts in (stages, stages[::-1]):
        size, why = auto_cpu_bytes(layouts, available=GIB, reserve=0)
        assert size == 2 * 4 * 4096 * 100
        assert "2 x 1.56 MiB GPU KV of 2 ranks = 3.12 MiB" in why
    same = [rank((4096,), blocks=100, replicated=True)] * 8
    assert auto_cpu_bytes(same, available=GIB, reserve=0)[0] == 2 * 4096 * 100


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64GiB", 64 * GIB),
        ("512MiB", 512 * 1024**2),
        ("1.5GB", 1_500_000_000),
        (" 2 kib ", 2048),
        ("0.1TiB", 109_951_162_777),
        ("123", 123),
        ("7B", 7),
        (4096, 4096),
        (0, 0),
    ],
)
def test_sizes_are_read(text: str | int, size: int) -> None:
    """Numbers with decimal and binary units, and plain bytes."""
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "64 gigs", "-1GiB", "1e9", "1,5GB", "1.GB", "9" * 400, -1, True, "٣GiB"]
)
def test_what_is_no_size_is_refused(text: str | int) -> None:
    """Anything else is refused with the text and an example."""
    with pytest.raises(SizeError, match="such as 64GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (64 * GIB, "64 GiB"), (-2048, "-2 KiB")],
)
def test_sizes_are_written(size: int, text: str) -> None:
    """Binary units, short."""
    assert format_size(size) == text


@given(st.integers(0, 1023), st.sampled_from(["B", "KiB", "MiB", "GiB", "TiB"]))
def test_written_sizes_can_be_read(number: int, unit: str) -> None:
    """A whole number of a unit survives being written and read."""
    size = parse_size(f"{number}{unit}")
    assert parse_size(format_size(size)) == size
