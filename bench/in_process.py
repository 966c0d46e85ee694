"""What kvd is compared with: vLLM's own offloading with a copy inside the engine.

vLLM's plain `OffloadingConnector` takes `InProcessSpec` by name. The scheduler and the manager
are vLLM's; the worker copies between the KV tensors and one array in the same process, at once
on the thread that asks, between the same byte ranges that kvd's lane moves and by the same
method (slices between memoryviews; `bench/copying.py` shows that it is the fastest here). So the
difference to kvd is what another process costs. The array's pages are touched before the first
job, as the lane touches the pool's.

    kv_connector_extra_config = {"spec_name": "InProcessSpec", "spec_module_path": "in_process",
                                 "blocks_per_chunk": 2, "bytes": 2 * 2**30}
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from kvd_proto.expand import Expander
from kvd_proto.jobs import JobBlocks
from kvd_proto.layout import (
    SLOT_ALIGNMENT,
    GroupSpec,
    RankLayout,
    TensorRef,
    TensorSpec,
    validate_layout,
)


class InProcessSpec(OffloadingSpec):  # type: ignore[misc]  # types are checked without vLLM
    """vLLM's CPU manager in the scheduler, a synchronous copy in the worker.

    `bytes` of the extra config is the room for chunks of all ranks together, as a kvd pool's is.
    """

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """What the manager counts; vLLM refuses figures without a definition."""
        definitions: dict[str, OffloadingMetricMetadata] = (
            CPUOffloadingSpec.build_metric_definitions(extra_config)
        )
        return definitions

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        share = config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk
        self._slot_bytes = -(-share // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        ranks_bytes = self._slot_bytes * config.parallel.world_size
        self._num_chunks = int(self.extra_config["bytes"]) // ranks_bytes if share else 0
        if not self._num_chunks:
            raise ValueError(
                f"bytes={self.extra_config['bytes']} hold no chunk of {ranks_bytes} bytes;"
                " raise bytes in kv_connector_extra_config"
            )

    def get_manager(self) -> OffloadingManager:
        """For the scheduler: vLLM's own, evicting the least recently used."""
        return CPUOffloadingManager(num_chunks=self._num_chunks)

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """For one rank."""
        storages, layout = describe(kv_caches, self.config)
        worker = InProcessWorker(storages, layout, self._num_chunks)
        if worker.slot_bytes != self._slot_bytes:
            raise ValueError(
                f"the scheduler counts {self._slot_bytes} bytes a chunk, the worker"
                f" {worker.slot_bytes}: the KV tensors are not what the configuration says"
            )
        return worker


class InProcessWorker(OffloadingWorker):  # type: ignore[misc]  # the same
    """Copies when asked; a job has finished before `submit_*` returns.

    Args:
        storages: the KV tensors' bytes, one view per storage of `layout`.
        layout: what lies in them.
        num_chunks: how many slots the array has.
    """

    def __init__(
        self, storages: Sequence["memoryview[int]"], layout: RankLayout, num_chunks: int
    ) -> None:
        self._storages = storages
        self._expander = Expander(layout)
        self.slot_bytes = self._expander.slot_bytes
        array = np.empty(num_chunks * self.slot_bytes, np.uint8)
        array.fill(0)  # touches every page
        self._arena = array.data
        self._finished: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Copy blocks into chunks."""
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Copy chunks into blocks."""
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        """The jobs since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever in flight."""

    def _copy(
        self, job_id: int, blocks: GPULoadStoreSpec, chunks: LoadStoreSpec, *, store: bool
    ) -> bool:
        started = time.perf_counter()
        assert isinstance(chunks, BlockIDsLoadStoreSpec)
        slots = chunks.block_ids
        copies = self._expander.expand(
            JobBlocks.of(
                blocks.block_ids, blocks.group_sizes, blocks.block_indices, slots, slots * 0
            )
        )
        arena = self._arena
        edges = zip(
            map(self._storages.__getitem__, copies.storage.tolist()),
            copies.tensor_offset.tolist(),
            (copies.tensor_offset + copies.nbytes).tolist(),
            copies.arena_offset.tolist(),
            (copies.arena_offset + copies.nbytes).tolist(),
            strict=True,
        )
        if store:
            for tensors, begin, end, slot_begin, slot_end in edges:
                arena[slot_begin:slot_end] = tensors[begin:end]
        else:
            for tensors, begin, end, slot_begin, slot_end in edges:
                tensors[begin:end] = arena[slot_begin:slot_end]
        seconds = time.perf_counter() - started
        self._finished.append(TransferResult(job_id, True, copies.total_bytes, seconds))
        return True


def describe(
    kv_caches: CanonicalKVCaches, config: OffloadingConfig
) -> tuple[list["memoryview[int]"], RankLayout]:
    """The KV tensors' storages as bytes, each once, and where the pages lie in them."""
    numbers: dict[int, int] = {}
    storages: list[memoryview[int]] = []
    tensors: list[TensorSpec] = []
    for cache in kv_caches.tensors:
        storage = cache.tensor.untyped_storage()
        number = numbers.setdefault(storage.data_ptr(), len(storages))
        if number == len(storages):
            storages.append(torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data)
        tensors.append(
            TensorSpec(  # canonical tensors are int8: strides and offsets count bytes
                storage=number,
                offset=int(cache.tensor.storage_offset()),
                page_bytes=cache.page_size_bytes,
                block_stride=cache.tensor.stride(0),
            )
        )
    groups = tuple(
        GroupSpec(
            refs=tuple(
                TensorRef(tensor=ref.tensor_idx, page_bytes=ref.page_size_bytes) for ref in refs
            ),
            block_size=group.tokens_per_block,
        )
        for refs, group in zip(kv_caches.group_data_refs, config.groups, strict=True)
    )
    layout = RankLayout(
        num_blocks=int(kv_caches.tensors[0].tensor.shape[0]),  # by definition of canonical
        blocks_per_chunk=config.cache.blocks_per_chunk,
        hash_block_size=config.cache.tokens_per_hash,
        storages=tuple(len(storage) for storage in storages),
        tensors=tuple(tensors),
        groups=groups,
    )
    validate_layout(layout)
    return storages, layout
