"""From a caller's arrays to the message of a job."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy.typing as npt

from kvd_client.arguments import shown
from kvd_client.errors import UsageError
from kvd_proto.arrays import IntArray
from kvd_proto.blocks import DTYPES, JobBlocks
from kvd_proto.errors import JobShapeError, Oversize, ProtoError
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
    blocks = JobBlocks(
        block_ids=_array("block_ids", block_ids),
        group_sizes=_array("group_sizes", group_sizes),
        block_indices=_array("block_indices", block_indices),
        slots=_array("slots", slots),
        generations=_array("generations", generations),
    )
    if layout is not None:
        try:
            blocks.check(layout)
        except JobShapeError as error:
            raise UsageError(str(error)) from error
    fields: dict[str, Any] = {
        "job": job_id,
        "blocks": blocks,
        "after": after,
        "deadline_ms": max(1, round(seconds * 1000)),
    }
    if kind is Store:
        return Store(**fields, word=word[0], epoch=word[1])
    return Load(**fields)


def _array(name: str, values: Integers) -> IntArray:
    try:
        return IntArray.of(values, DTYPES[name])
    except Oversize as error:
        raise UsageError(
            f"{name}: {error}; submit several jobs, split between two chunks"
        ) from error
    except (ProtoError, TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{name}={shown(values)}: whole numbers are needed: {error}") from error
