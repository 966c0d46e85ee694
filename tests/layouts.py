"""The plainest layouts."""

from typing import Any

from msgspec.structs import replace

from kvd_proto.layout import GroupSpec, RankLayout, TensorRef, TensorSpec


def flat_layout(*pages: int, blocks: int = 8, factor: int = 1, **changes: Any) -> RankLayout:
    """One group over tensors of these pages, each in a storage of its own, back to back."""
    layout = RankLayout(
        num_blocks=blocks,
        blocks_per_chunk=factor,
        hash_block_size=16,
        storages=tuple(page * blocks for page in pages),
        tensors=tuple(TensorSpec(i, 0, page, page) for i, page in enumerate(pages)),
        groups=(GroupSpec(tuple(TensorRef(i, page) for i, page in enumerate(pages)), 16),),
    )
    return replace(layout, **changes)
