"""Where a job's chunks lie in the pool: what the scheduler tells the workers."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import LoadStoreSpec


@dataclass(slots=True)
class ChunkSlots(LoadStoreSpec):
    """Slots of the chunks of one job, group by group; pickled to every rank.

    Attributes:
        slots: u4[chunks].
        generations: u8[chunks].
        chunks: how many of them each group has, by the group's number in vLLM's keys.
        missing: chunks that were gone when they should have been pinned; such a job is not done.
    """

    slots: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0, "<u4"))
    generations: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0, "<u8"))
    chunks: dict[int, int] = field(default_factory=dict)
    missing: int = 0

    def __repr__(self) -> str:
        gone = f", {self.missing} missing" if self.missing else ""
        return f"<ChunkSlots {len(self.slots)} chunks{gone}>"
