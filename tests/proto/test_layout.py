"""What a rank reports and what ranks must agree on; what fits into pool, override and request."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
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
from kvd_proto.errors import LayoutError, SizeError
from kvd_proto.layout import (
    GroupSpec,
    Range,
    RankLayout,
    TensorRef,
    TensorSpec,
    compare_ranks,
    validate_layout,
)
from kvd_proto.text import format_size, parse_size
from tests.layouts import flat_layout


def dense(layers: int = 2, page: int = 4096, blocks: int = 8, **changes: Any) -> RankLayout:
    """Equal tensors, two blocks a chunk."""
    return flat_layout(*(page,) * layers, blocks=blocks, **{"factor": 2, **changes})


def ranges(hint: Any) -> Iterator[Range]:
    """The figures that are taken, as a field's annotation and docs/protocol.md have them."""
    for part in get_args(hint):
        if isinstance(part, Range):
            yield part
        yield from ranges(part)


def test_documented_ranges_are_those_that_are_taken() -> None:
    """A figure next to either end of its documented range is refused with that range."""
    layout, fields = dense(), set()
    parts: dict[str, Any] = {"tensors": layout.tensors[0], "groups": layout.groups[0], "": layout}
    for part_of, part in parts.items():
        for name, hint in get_type_hints(type(part), include_extras=True).items():
            for taken in ranges(hint):
                fields.add(name)
                for figure in (taken.low - 1, taken.high + 1):
                    value: Any = (figure,) if name == "storages" else figure
                    changed = msgspec.structs.replace(part, **{name: value})
                    if part_of:
                        changed = msgspec.structs.replace(layout, **{part_of: (changed,)})
                    text = f"{name}.* is not within {taken.low}..{taken.high};"
                    with pytest.raises(SizeError, match=text):
                        validate_layout(changed)
    assert {"num_blocks", "storages", "page_bytes", "block_size"} <= fields


def test_a_layout_is_bounded() -> None:
    """The largest counts are taken, one more reference is refused; test_codec has the others."""

    def validate(tensors: int, groups: int, refs: int) -> None:
        group = GroupSpec((TensorRef(0, 1),) * refs, 16)
        size = max(16 * groups * refs, 16)
        specs = (TensorSpec(0, 0, 1, 1),) * tensors
        validate_layout(RankLayout(16, 1, 16, (size,), specs, (group,) * groups))

    validate(8192, 1024, 8)
    with pytest.raises(SizeError, match=r"all groups' refs = 8194 is not within 1\.\.8192"):
        validate(1, 2, 4097)


@pytest.mark.parametrize(
    ("changes", "figures"),
    [
        ({"groups": ()}, "0 groups"),
        ({"tensors": (TensorSpec(2, 0, 4096, 4096),)}, "storage = 2, but 2 storages"),
        ({"tensors": (TensorSpec(0, 0, 4096, 2048),)}, "2048 is below the page of 4096"),
        ({"groups": (GroupSpec((TensorRef(7, 4096),), 16),)}, "tensor = 7, but 2 tensors"),
        ({"groups": (GroupSpec((TensorRef(0, 4097),), 16),)}, "4097 is not within 1..4096"),
        ({"groups": (GroupSpec((TensorRef(0, 0),), 16),)}, "0 is not within 1..4096"),
        ({"groups": (GroupSpec((), 16),)}, "refers to no tensor"),
        # A count of blocks that was read from a KV-first shape runs out of the allocation.
        ({"null_block": 8}, r"null_block = 8, but blocks are 0\.\.7; give the engine's"),
        ({"num_blocks": 16}, r"offset 0 \+ 15 \* stride 4096 \+ page 4096 = 65536"),
        # A group that needs more than was reported would write beyond its slot.
        (
            {"groups": (GroupSpec((TensorRef(0, 4096),) * 3, 16),)},
            "needs 24576 bytes a chunk.*give 16384",
        ),
        (
            {"groups": (GroupSpec((TensorRef(0, 4096),), 40),)},
            "40.*16; hybrid models need prefix caching",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], figures: str) -> None:
    """An index, a range or a size that does not fit the report is refused with both figures."""
    with pytest.raises(LayoutError, match=figures):
        validate_layout(dense(**changes))


@given(st.integers(1, 5), st.integers(1, 9000), st.integers(2, 50), st.integers(1, 32))
def test_every_region_lies_inside_the_slot(
    tensors: int, page: int, blocks: int, blocks_per_chunk: int
) -> None:
    """Regions follow each other without gaps and end inside an aligned slot."""
    layout = dense(tensors, page, blocks, factor=blocks_per_chunk)
    validate_layout(layout)
    offsets = layout.ref_offsets(0)
    assert offsets == tuple(i * page * blocks_per_chunk for i in range(tensors))
    assert offsets[-1] + page * blocks_per_chunk <= layout.slot_bytes
    assert layout.slot_bytes % 4096 == 0
    assert layout.slot_bytes - layout.share_bytes < 4096


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"num_blocks": 7}, "num_blocks = 7"),
        ({"replicated": True}, "replicated = True"),
        (
            {"groups": (GroupSpec(dense().groups[0].refs, 16, "sliding", 64),)},
            "groups (kind, block size, window) = [['sliding', 16, 64]]",
        ),
        (
            {"groups": (GroupSpec((TensorRef(0, 2048), TensorRef(1, 4096)), 16),)},
            "page sizes (stage 0) = [[2048, 4096]]",
        ),
        (
            {"groups": (GroupSpec(dense().groups[0].refs, 16, contents="heads first"),)},
            "contents (stage 0) = ['heads first']",
        ),
        ({"storages": (4096 * 10, 4096 * 10)}, "bytes per chunk (stage 0) = 20480"),
    ],
)
def test_the_odd_rank_is_named(changes: dict[str, Any], name: str) -> None:
    """The rank that differs from most is named, with its figure, theirs, and who they are."""
    layouts = {0: dense(), 1: dense(), 2: dense(**changes), 3: dense()}
    with pytest.raises(LayoutError) as refusal:
        compare_ranks(layouts, dict.fromkeys(layouts, 0))
    text = str(refusal.value)
    assert text.startswith(f"rank 2 reports {name}")
    assert "[0, 1, 3]" in text


GIB = 1024**3
FULL = LayerGroup((4096,) * 32, 16)


def test_a_budget_below_one_chunk_is_refused_with_the_remedy() -> None:
    """The refusal names budget, chunk and what to raise, exactly."""
    with pytest.raises(SizeError, match=r"pool of 4095 bytes.*at least 4096"):
        size_pool([flat_layout(4096)], 4095)
    assert size_pool([flat_layout(4096)], 4096).num_chunks == 1
    with pytest.raises(SizeError, match="a pool of -1 bytes"):
        size_pool([flat_layout(4096)], -1)


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


def test_how_often_a_pool_is_pinned() -> None:
    """Once where arenas divide it, by each GPU's lane where all ranks hold the same."""
    divided, replicated = flat_layout(4096), flat_layout(4096, replicated=True)
    assert pinning_lanes([divided] * 2, ["host"] * 2) == 0
    assert pinning_lanes([divided], ["cuda:a"]) == 1
    assert pinning_lanes([divided] * 2, ["cuda:a", "cuda:b"]) == 1
    assert pinning_lanes([replicated] * 2, ["cuda:a", "cuda:b"]) == 2
    assert pinning_lanes([replicated] * 2, ["cuda:a", "cuda:a"]) == 1


def test_the_operators_table_follows_from_the_measured_figures() -> None:
    """docs/operations.md: memory of each GPU, kernel memory, and what to take off vLLM's share."""
    page = (Path(__file__).parents[2] / "docs/operations.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+ [GT]iB) \| (TP .*?) \| (.+) \|$", page, re.MULTILINE)
    assert len(rows) == 6
    for size, ranks, figures in rows:
        pool = parse_size(size)
        gpu_pool = pool // 8 if ranks == "TP 8" else pool
        of_gpu = CONTEXT_GPU_BYTES + pin_gpu_bytes(gpu_pool)
        kernel = pin_kernel_bytes(pool, 8 if ranks == "TP 8, replicated" else 1)
        off = [math.ceil(1000 * of_gpu / mib / 2**20) / 1000 for mib in (81_559, 143_771)]
        columns = figures.split(" | ")
        assert columns[:2] == [f"{of_gpu // 2**20:,} MiB", format_size(kernel)], size
        assert columns[4:] == [f"{share:.3f}" for share in off], size


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
        st.builds(
            LayerGroup,
            st.just((64,)),
            st.integers(1, 64),
            st.none() | st.integers(1, 200),
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 60),
    st.integers(1, 100),
)
def test_the_longest_request_is_the_longest(
    groups: list[LayerGroup], blocks: int, batched: int
) -> None:
    """The result is admitted and one token more is not: found by trying every length."""
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
