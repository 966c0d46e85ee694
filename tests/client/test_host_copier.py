"""Blocks of host memory go to staging pages and come back, however they lie in memory."""

import numpy as np
import pytest

from kvd_client.staging_layout import staging_layout
from kvd_client.staging_memory import HostCopier, StagingMemory
from kvd_proto.layout import GroupSpec, RankLayout, TensorRef, TensorSpec

BLOCKS = 16


@pytest.mark.parametrize("stride", [24, 40])
@pytest.mark.parametrize("num_refs", [1, 3])
def test_blocks_come_back(stride: int, num_refs: int) -> None:
    """Dense and padded blocks, of one ref and of several."""
    page = 24
    nbytes = BLOCKS * stride
    refs = range(num_refs)
    layout = RankLayout(
        num_blocks=BLOCKS,
        blocks_per_chunk=1,
        hash_block_size=16,
        storages=(nbytes,) * num_refs,
        tensors=tuple(TensorSpec(i, 0, page, stride) for i in refs),
        groups=(GroupSpec(tuple(TensorRef(i, page) for i in refs), 16),),
    )
    source = np.random.default_rng(1)
    storages = [source.integers(0, 256, (BLOCKS, stride), np.uint8) for _ in refs]
    before = [storage.copy() for storage in storages]
    staging = StagingMemory(staging_layout(layout, 2**20))
    try:
        copier = HostCopier([s.ctypes.data for s in storages], layout, staging, storages)
        stored, loaded = np.array([9, 2, 13]), np.array([1, 15, 4])
        first = staging.pages.first_page
        copier.gather([(0, stored[:2]), (0, stored[2:])], first + 3, ())
        pages = staging.window.reshape(-1, staging.pages.page_bytes)[3:6, : num_refs * page]
        assert np.array_equal(pages, np.hstack([b[stored, :page] for b in before]))
        copier.scatter([(0, loaded)], first + 3, ())
        for storage, old in zip(storages, before, strict=True):
            old[loaded, :page] = old[stored, :page]
            assert np.array_equal(storage, old)
        copier.close()
    finally:
        staging.memory.close()
