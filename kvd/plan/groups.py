"""Layers in groups with pages of one size, as vLLM makes them, and what a rank registers of them.

Rules of ``_get_kv_cache_groups_uniform_page_size`` in ``vllm/v1/core/kv_cache_utils.py``.
"""

from collections import Counter
from dataclasses import dataclass

from kvd.plan.model import Model
from kvd_proto.capacity import LayerGroup
from kvd_proto.layout import GroupSpec, RankLayout, TensorRef, TensorSpec


@dataclass(frozen=True, slots=True)
class Group:
    """One group of layers; state_bytes: in use of each page, None where attention fills it."""

    layers: LayerGroup
    state_bytes: int | None


def make_groups(
    model: Model, block_size: int, token_bytes: int, state_bytes: int | None
) -> list[Group]:
    """Spread layers of one kind over as many groups as it takes.

    No group is larger than the kind with the fewest layers (10 full and 52
    sliding make 1 + 6 groups of at most 10); kinds of about the same size stay
    whole. Where a state has more bytes than a page of attention, blocks get
    more tokens: a multiple of `block_size`.

    Args:
        model: whose layers.
        block_size: of the engine, in tokens.
        token_bytes: of one attention layer on one rank.
        state_bytes: of one state layer on one rank; None without any.
    """
    if state_bytes is not None:
        block_size *= -(-state_bytes // (block_size * token_bytes))
    kinds = Counter((window, False) for window in model.windows)
    if model.states is not None:
        kinds[None, True] = model.states.layers
    fewest, most = min(kinds.values()), max(kinds.values())
    group_size = most if 2 * most < 3 * fewest else fewest
    groups = []
    for (window, is_state), layers in kinds.items():
        number = -(-layers // group_size)
        for index in range(number):
            pages = (block_size * token_bytes,) * len(range(index, layers, number))
            groups.append(
                Group(LayerGroup(pages, block_size, window), state_bytes if is_state else None)
            )
    return groups


def rank_layout(
    groups: list[Group], hash_block_size: int, blocks_per_chunk: int, *, replicated: bool
) -> RankLayout:
    """What a worker of this engine registers, but for the blocks; a chunk's size is the same."""
    page = groups[0].layers.page_bytes[0]
    tensors = max(len(group.layers.page_bytes) for group in groups)
    return RankLayout(
        num_blocks=1,
        blocks_per_chunk=blocks_per_chunk,
        hash_block_size=hash_block_size,
        storages=(page,) * tensors,
        tensors=tuple(TensorSpec(index, 0, page, page) for index in range(tensors)),
        groups=tuple(
            GroupSpec(
                tuple(
                    TensorRef(index, group.state_bytes or page)
                    for index in range(len(group.layers.page_bytes))
                ),
                group.layers.block_size,
                "full" if group.layers.sliding_window is None else "sliding",
                group.layers.sliding_window,
            )
            for group in groups
        ),
        replicated=replicated,
    )
