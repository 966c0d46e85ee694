"""From a caller's arrays to the message of a job."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy.typing as npt

from kvd_client.arguments import shown
from kvd_client.errors import UsageError
from kvd_proto.arrays import DType, IntArray
from kvd_proto.errors import JobShapeError, Oversize, ProtoError
from kvd_proto.expand import check_blocks, chunks_per_group
from kvd_proto.layout import RankLayout
from kvd_proto.messages import Load, Store

Integers: TypeAlias = Sequence[int] | npt.NDArray[Any]


def job_request(
    kind: type[Store] | type[Load],
    layout: RankLayout | None,
    *,
    job_id: int,
    block_ids: Integers,
    group_sizes: Integers,
    block_indices: Integers,
    slots: Integers,
    generations: Integers,
    after: int,
    word: tuple[int, int],
    seconds: float,
) -> Store | Load:
    """The message of one job, whose fields `messages.Job` describes.

    The layout is that of the registration, None before there is one; `word` is a store's
    word of the control page with its epoch; `seconds` is how long the job may wait for the
    timeline.

    Raises:
        UsageError: values that are no whole numbers, arrays that do not fit each other or
            one job, the null block, or blocks that the layout does not have.
    """
    blocks = _array("block_ids", block_ids, "u4")
    sizes = _array("group_sizes", group_sizes, "u4")
    indices = _array("block_indices", block_indices, "u4")
    chosen = _array("slots", slots, "u4")
    versions = _array("generations", generations, "u8")
    counts, starts = sizes.numpy().tolist(), indices.numpy().tolist()
    listed = sum(counts)
    if listed != len(blocks):
        raise UsageError(f"group_sizes sum to {listed}, block_ids has {len(blocks)}")
    if len(sizes) != len(indices):
        raise UsageError(f"{len(sizes)} group_sizes with {len(indices)} block_indices")
    if len(chosen) != len(versions):
        raise UsageError(f"{len(chosen)} slots with {len(versions)} generations")
    if layout is not None:
        if len(sizes) != len(layout.groups):
            raise UsageError(
                f"{len(sizes)} group_sizes, the layout has {len(layout.groups)} groups"
            )
        chunks = sum(chunks_per_group(counts, starts, layout.blocks_per_chunk))
        if chunks != len(chosen):
            raise UsageError(
                f"these blocks lie in {chunks} chunks (blocks_per_chunk"
                f" {layout.blocks_per_chunk}), {len(chosen)} slots were given"
            )
        try:
            check_blocks(layout, blocks.numpy())
        except JobShapeError as error:
            raise UsageError(f"block_ids={shown(block_ids)}: {error}") from error
    fields: dict[str, Any] = {
        "job": job_id,
        "block_ids": blocks,
        "group_sizes": sizes,
        "block_indices": indices,
        "slots": chosen,
        "generations": versions,
        "after": after,
        "deadline_ms": max(1, round(seconds * 1000)),
    }
    if kind is Store:
        return Store(**fields, word=word[0], epoch=word[1])
    return Load(**fields)


def _array(name: str, values: Integers, dtype: DType) -> IntArray:
    try:
        return IntArray.of(values, dtype)
    except Oversize as error:
        raise UsageError(
            f"{name}: {error}; submit several jobs, split between two chunks"
        ) from error
    except (ProtoError, TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{name}={shown(values)}: whole numbers are needed: {error}") from error
