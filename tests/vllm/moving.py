"""Jobs on a KV cache as a lane runs them, and what attention finds in a block afterwards."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvd_client import RankLayout
from kvd_proto.expand import Expander
from kvd_proto.jobs import JobBlocks, chunks_per_group
from tests.vllm.configs import whole

Views = Mapping[str, torch.Tensor]


@dataclass
class Lane:
    """One rank's memory, a pool, and copies between them: the runs that a lane's device gets."""

    layout: RankLayout
    memory: torch.Tensor
    slots: int

    def __post_init__(self) -> None:
        self.expander = Expander(self.layout)
        self.pool = np.full(self.slots * self.layout.slot_bytes, 0x55, np.uint8)

    def job(self, group: int, index: int, blocks: list[int]) -> JobBlocks:
        """Blocks of one group from this index on; its chunks are in the last slots."""
        sizes, indices = [0] * len(self.layout.groups), [0] * len(self.layout.groups)
        sizes[group], indices[group] = len(blocks), index
        count = sum(chunks_per_group(sizes, indices, self.layout.blocks_per_chunk))
        slots = range(self.slots - count, self.slots)
        job = JobBlocks.of(blocks, sizes, indices, slots, [1] * count)
        job.check(self.layout, self.slots)
        return job

    def move(self, job: JobBlocks, *, store: bool) -> int:
        """Copy; return the number of runs. Both ways to expand a job give the same bytes."""
        copies = self.expander.expand_many(job)
        copies.check_bounds(self.layout.storages, self.pool.nbytes)
        runs = copies.runs
        assert sorted(runs) == sorted(self.expander.expand_few(job))
        memory = self.memory.numpy().view(np.uint8)
        for storage, offset, at, nbytes in runs:
            assert storage == 0
            here, there = memory[offset : offset + nbytes], self.pool[at : at + nbytes]
            if store:
                there[:] = here
            else:
                here[:] = there
        return len(runs)


def rows(view: torch.Tensor, block: int, num_blocks: int) -> torch.Tensor:
    """A layer's page of one block, as vLLM's view has it: all its kernel blocks."""
    count = view.shape[0] // num_blocks
    return view[block * count : (block + 1) * count]


def pages(
    views: Views, layers: list[str], blocks: list[int], num_blocks: int
) -> list[torch.Tensor]:
    """What attention finds in these blocks, layer by layer, as bytes: a number may be none."""
    return [
        rows(views[layer], block, num_blocks)
        .clone(memory_format=torch.contiguous_format)
        .view(torch.uint8)
        for layer in layers
        for block in blocks
    ]


def owned(
    views: Views, config: KVCacheConfig, layers: list[str], blocks: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which bytes are pages of these blocks, and which are theirs at all, padding included.

    bool[bytes of the cache] each.
    """
    size = whole(views).numel()
    used, all_of_them = torch.zeros(size, dtype=torch.bool), torch.zeros(size, dtype=torch.bool)
    for tensor in config.kv_cache_tensors:
        for layer in set(tensor.layers).intersection(layers):
            view = views[layer]
            width = view.element_size()
            mask = used.as_strided(
                (*view.shape, width),
                (*(stride * width for stride in view.stride()), 1),
                view.storage_offset() * width,
            )
            for block in blocks:
                rows(mask, block, config.num_blocks)[:] = True
                if tensor.block_stride > tensor.layer_stride:  # all layers of a block are here
                    begin = block * tensor.block_stride
                    all_of_them[begin : begin + tensor.block_stride] = True
    return used, all_of_them | used
