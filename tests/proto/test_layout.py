"""What a rank's report must satisfy, and what ranks must agree on."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from tests.layouts import flat_layout


def dense(layers: int = 2, page: int = 4096, blocks: int = 8, **changes: Any) -> RankLayout:
    """Equal tensors, two blocks a chunk."""
    return flat_layout(*(page,) * layers, blocks=blocks, **{"factor": 2, **changes})


def documented_ranges() -> Iterator[tuple[type[msgspec.Struct], str, Range]]:
    """Every field whose annotation names the figures that are taken, as docs/protocol.md has it."""
    for kind in (RankLayout, TensorSpec, GroupSpec):
        for name, hint in get_type_hints(kind, include_extras=True).items():
            for part in (hint, *get_args(hint)):
                if get_origin(part) is Annotated:
                    taken = get_args(part)[1]
                    if isinstance(taken, Range):
                        yield kind, name, taken


@pytest.mark.parametrize(("kind", "name", "taken"), list(documented_ranges()))
def test_documented_ranges_are_those_that_are_taken(
    kind: type[msgspec.Struct], name: str, taken: Range
) -> None:
    """A figure next to either end of its documented range is refused with that range."""
    layout = dense()
    parts: dict[type[msgspec.Struct], tuple[str, msgspec.Struct]] = {
        TensorSpec: ("tensors", layout.tensors[0]),
        GroupSpec: ("groups", layout.groups[0]),
    }
    for figure in (taken.low - 1, taken.high + 1):
        value: Any = (figure,) if name == "storages" else figure
        if kind in parts:
            field, part = parts[kind]
            changed = {field: (msgspec.structs.replace(part, **{name: value}),)}
        else:
            changed = {name: value}
        with pytest.raises(SizeError) as caught:
            validate_layout(msgspec.structs.replace(layout, **changed))
        text = str(caught.value)
        assert name in text
        assert f"is not within {taken.low}..{taken.high};" in text


@pytest.mark.parametrize(
    ("tensors", "groups", "refs", "text"),
    [
        (8192, 1024, 8, ""),
        (1, 2, 4097, "the number of all groups' refs = 8194 is not within 1..8192"),
    ],
)
def test_a_layout_is_bounded(tensors: int, groups: int, refs: int, text: str) -> None:
    """The largest counts are taken, one more reference is refused; test_codec has the others."""
    size = 16 * groups * refs
    layout = RankLayout(
        num_blocks=16,
        blocks_per_chunk=1,
        hash_block_size=16,
        storages=(max(size, 16),),
        tensors=(TensorSpec(0, 0, 1, 1),) * tensors,
        groups=(GroupSpec((TensorRef(0, 1),) * refs, 16),) * groups,
    )
    with pytest.raises(SizeError, match=text) if text else nullcontext():
        validate_layout(layout)


@pytest.mark.parametrize(
    ("changes", "figures"),
    [
        ({"tensors": ()}, "0 tensors"),
        ({"groups": ()}, "0 groups"),
        ({"tensors": (TensorSpec(2, 0, 4096, 4096),)}, "storage = 2, but 2 storages"),
        ({"tensors": (TensorSpec(-1, 0, 4096, 4096),)}, "storage = -1"),
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
        ({"blocks_per_chunk": 1}, "blocks_per_chunk = 1"),
        ({"hash_block_size": 8}, "hash_block_size = 8"),
        ({"null_block": 0}, "null_block = 0"),
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
