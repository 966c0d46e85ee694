"""Ranks that stage and ranks that export hold the same bytes, for every kind of KV cache."""

import dataclasses
import random
from pathlib import Path

import msgspec
import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import GPULoadStoreSpec, make_offload_key

from kvd_client import LoadTicket, LookupResult, Scheduler, StoreTicket
from kvd_client.routes import EXPORT, STAGING, Transfer
from kvd_client.vllm import KvdOffloadingSpec
from kvd_client.vllm.manager import ChunkLoadStoreSpec
from tests.conftest import Daemon
from tests.daemon.engines import lend
from tests.vllm.configs import allocated, pages, whole
from tests.vllm.kv_models import MODELS, made
from tests.vllm.support import STAGING_BYTES
from tests.waiting import DEADLINE, PATIENCE, eventually

FACTOR = 2  # blocks of a chunk
BLOCKS = 64
COPIED = 28  # blocks of a job, over all groups: more than staging takes at a time
EACH = [
    (model, layout)
    for model, (_, layouts) in MODELS.items()
    for layout in dict.fromkeys((layouts[0], layouts[-1]))
]


class Engine:
    """An engine of one rank.

    Attributes:
        cache: what vLLM says of its KV cache.
        views: its KV cache by layer; every byte is random.
        chunks: number of chunks of each group that a job copies.
        rank, scheduler: its sides.
    """

    def __init__(
        self, folder: Path, daemon: Daemon, label: str, model: str, layout: str, transfer: Transfer
    ) -> None:
        vllm_config, self.cache, config = made(
            folder, model, layout, blocks_per_chunk=FACTOR, blocks=BLOCKS
        )
        name = f"{label}-{transfer}"
        spec = KvdOffloadingSpec(
            dataclasses.replace(config, engine_id=name), vllm_config, self.cache
        )
        spec.options = msgspec.structs.replace(
            spec.options,
            runtime_dir=str(daemon.runtime_dir),
            label=label,
            deadline=DEADLINE,
            required=True,
            transfer=transfer,
            staging_bytes=STAGING_BYTES,
        )
        self.views = allocated(vllm_config, self.cache)
        num_groups = len(self.cache.kv_cache_groups)
        self.chunks = COPIED // num_groups // FACTOR
        self.rank = spec.make_worker(self.views)
        assert self.rank.worker is not None
        assert self.rank.worker.transfer == transfer
        self.scheduler = Scheduler(daemon.runtime_dir, name, deadline=DEADLINE)
        assert self.scheduler.wait_attached(PATIENCE)

    def spec(self, ticket: LoadTicket | StoreTicket) -> ChunkLoadStoreSpec:
        """The slots of a job."""
        counts = dict.fromkeys(range(len(self.cache.kv_cache_groups)), self.chunks)
        assert len(ticket) == sum(counts.values())
        return ChunkLoadStoreSpec(ticket.slots, ticket.generations, counts)

    def blocks(self, seed: int) -> GPULoadStoreSpec:
        """Random blocks for the chunks of a job; those of groups may be the same memory."""
        num_groups, size = len(self.cache.kv_cache_groups), self.chunks * FACTOR
        block_ids = random.Random(seed).sample(range(1, BLOCKS), num_groups * size)
        return GPULoadStoreSpec(block_ids, [size] * num_groups, [0] * num_groups)

    def wait(self, job_id: int) -> None:
        """Wait for this job, which is a success."""
        assert self.rank.worker is not None
        assert not self.rank.worker.wait([job_id], PATIENCE)
        (result,) = self.rank.get_finished()
        assert (result.job_id, result.success) == (job_id, True)

    def store(self, keys: list[bytes], blocks: GPULoadStoreSpec) -> None:
        """Store blocks as the chunks of these keys."""
        lend(self.scheduler, len(keys))
        ticket = self.scheduler.prepare_store(keys)
        self.scheduler.end_step()  # lanes wait until the broker has read it
        self.rank.submit_store(1, blocks, self.spec(ticket))
        self.wait(1)
        self.scheduler.complete_store(ticket)
        self.scheduler.end_step()

    def load(self, keys: list[bytes], blocks: GPULoadStoreSpec) -> None:
        """Load the chunks of these keys, once all of them are there."""
        eventually(lambda: {self.scheduler.lookup(key) for key in keys}, {LookupResult.HIT}.__eq__)
        ticket = self.scheduler.prepare_load(keys)
        self.scheduler.end_step()
        self.rank.submit_load(2, self.spec(ticket), blocks)
        self.wait(2)
        self.scheduler.complete_load(ticket)
        self.scheduler.end_step()

    def close(self) -> None:
        """End both sides."""
        self.rank.shutdown()
        self.scheduler.close()


def pages_of(
    views: dict[str, torch.Tensor], cache: KVCacheConfig, blocks: GPULoadStoreSpec
) -> list[torch.Tensor]:
    """The pages of these blocks, group by group and layer by layer."""
    found: list[torch.Tensor] = []
    begin = 0
    for group, size in zip(cache.kv_cache_groups, blocks.group_sizes, strict=True):
        ids = [int(block) for block in blocks.block_ids[begin : begin + size]]
        found += pages(views, list(group.layer_names), ids, cache.num_blocks)
        begin += size
    return found


@pytest.mark.parametrize(("model", "layout"), EACH)
def test_what_one_way_stores_the_other_loads(
    tmp_path: Path, shared_daemon: Daemon, label: str, model: str, layout: str
) -> None:
    """Chunks are found by engines that go the other way, to the last byte.

    Memory that is not of the loaded blocks stays as it is.
    """
    exporting = Engine(tmp_path, shared_daemon, label, model, layout, EXPORT)
    staging = Engine(tmp_path, shared_daemon, label, model, layout, STAGING)
    for number, (writer, reader) in enumerate(((exporting, staging), (staging, exporting))):
        keys = [
            make_offload_key(bytes([number, chunk, *label.encode()[-30:]]).ljust(32), group)
            for group in range(len(writer.cache.kv_cache_groups))
            for chunk in range(writer.chunks)
        ]
        source, target = writer.blocks(number), reader.blocks(10 + number)
        others = [block for block in range(BLOCKS) if block not in target.block_ids]
        layers = [*reader.views]
        others_before = pages(reader.views, layers, others, BLOCKS)
        writer.store(keys, source)
        stored = pages_of(writer.views, writer.cache, source)
        whole(writer.views).random_(-128, 128)
        reader.load(keys, target)
        assert all(map(torch.equal, stored, pages_of(reader.views, reader.cache, target)))
        others_after = pages(reader.views, layers, others, BLOCKS)
        assert all(map(torch.equal, others_before, others_after))
    exporting.close()
    staging.close()
