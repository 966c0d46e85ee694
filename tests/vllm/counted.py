"""vLLM's own manager and a copy inside the engine, as in the benchmarks, with figures in a file.

Loaded by engines, by this module's name: `with_in_process_copy(figures=...)`.
"""

import json
from collections.abc import Collection
from pathlib import Path

from vllm.v1.kv_offload.base import OffloadingManager, OffloadKey, PrepareStoreOutput, ReqContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from bench.in_process import InProcessSpec


class CountedManager(CPUOffloadingManager):  # type: ignore[misc]  # types are checked without vLLM
    """Counts what it lets be stored and evicts.

    Args:
        num_chunks: of the pool.
        figures: the file that takes them, as JSON, after every store.
    """

    def __init__(self, num_chunks: int, figures: Path) -> None:
        super().__init__(num_chunks=num_chunks)
        self._figures = figures
        self._stored = self._evicted = 0

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """See OffloadingManager."""
        output = super().prepare_store(keys, req_context)
        if output is not None:
            self._stored += len(output.keys_to_store)
            self._evicted += len(output.evicted_keys)
            text = json.dumps({"stored": self._stored, "evicted": self._evicted})
            self._figures.write_text(text, encoding="utf-8")
        return output


class CountedSpec(InProcessSpec):
    """`figures` of the extra config names the file."""

    def get_manager(self) -> OffloadingManager:
        """For the scheduler."""
        return CountedManager(self._num_chunks, Path(self.extra_config["figures"]))
