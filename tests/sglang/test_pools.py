"""SGLang's own device pools on the CPU, stored and loaded through a linker as its tree does."""

from collections.abc import Callable

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

from kvd_client import UnsupportedMemory
from kvd_client.sglang.pools import find_pools
from tests.conftest import Daemon
from tests.sglang.conftest import StartLinker
from tests.sglang.device_pools import (
    KEYS,
    NODE,
    PAGE,
    Kind,
    dense,
    dense_with_mtp,
    mla,
    mla_with_eagle,
    moved,
    parameters,
    states,
    states_and_mla,
    store,
    window,
)
from tests.waiting import eventually


@pytest.mark.parametrize(
    ("layerwise", "stored_by", "loaded_by"),
    [
        (False, "export", "export"),
        (True, "export", "export"),
        (False, "staging", "export"),
        (True, "export", "staging"),
    ],
)
@pytest.mark.parametrize(
    "make_kind", [mla, window, states, states_and_mla, mla_with_eagle, dense_with_mtp]
)
def test_every_pool_of_a_node_comes_back(
    daemon: Daemon,
    start_linker: StartLinker,
    make_kind: Callable[[], Kind],
    layerwise: bool,
    stored_by: str,
    loaded_by: str,
) -> None:
    """Into other pages, by another engine, every byte, and no byte of other pages is touched.

    Whether either engine exports its memory or stages it: their chunks are the same.
    """
    kind, other = make_kind(), make_kind()
    kind.fill(1)
    other.fill(2)
    one = start_linker(daemon, kind, transfer=stored_by)
    two = start_linker(daemon, other, transfer=loaded_by, layerwise=layerwise)
    keys, more_keys = KEYS[:NODE], KEYS[: NODE + 3]
    assert store(one, [pool.transfer(keys, pool.stored) for pool in kind.pools])
    _, *others = other.pools
    asked = [
        PoolTransfer(PoolName.KV, keys=more_keys),
        *(PoolTransfer(pool.name, keys=more_keys[-len(pool.loaded) :]) for pool in others),
    ]
    expected = {PoolName.SWA: [NODE - 1, NODE], PoolName.MAMBA: [NODE]}
    lengths = next((expected[pool.name] for pool in others), list(range(1, NODE + 1)))
    eventually(lambda: two.lookup("request", asked), lengths.__eq__)
    contents = [moved(*pools) for pools in zip(kind.pools, other.pools, strict=True)]
    assert two.load("request", [pool.transfer(keys, pool.loaded) for pool in other.pools])
    number = two.start_layer_wise_loading()
    assert (number >= 0) is layerwise
    two.layer_done_counter.set_consumer(number)
    for layer in range(4 if layerwise else 0):
        two.layer_done_counter.wait_until(layer)
    assert two.finish_layer_wise_loading(number)
    for pool, buffers in zip(other.pools, contents, strict=True):
        assert all(torch.equal(*pair) for pair in zip(pool.buffers, buffers, strict=True))
    for linker, transfer in ((one, stored_by), (two, loaded_by)):
        for cache in linker._caches.values():
            assert cache.worker.transfer == transfer
            cache.worker.check_integrity()


@pytest.mark.parametrize("make_kind", [dense, mla, window])
def test_pages_that_are_split_among_ranks_are_refused(make_kind: Callable[[], Kind]) -> None:
    """With dcp_size the tree's pages have more tokens than a rank's, which holds some of each."""
    kind = make_kind()
    with pytest.raises(UnsupportedMemory, match="dcp_size"):
        find_pools(parameters(kind, page_size=2 * PAGE), kind.components)


@pytest.mark.parametrize(
    ("make_kind", "replicated"), [(dense, False), (mla, True), (mla_with_eagle, False)]
)
def test_ranks_share_chunks_where_all_hold_the_same_bytes(
    make_kind: Callable[[], Kind], replicated: bool
) -> None:
    """MLA's latents are the same on every rank; a draft's keys and values are not."""
    kind = make_kind()
    assert find_pools(parameters(kind), kind.components).replicated is replicated
