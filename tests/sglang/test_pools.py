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
    FROM,
    KEYS,
    NODE,
    PAGE,
    TO,
    Kind,
    dense,
    dense_with_mtp,
    fill,
    indices,
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


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize(
    "make_kind", [mla, window, states, states_and_mla, mla_with_eagle, dense_with_mtp]
)
def test_every_pool_of_a_node_comes_back(
    daemon: Daemon, start_linker: StartLinker, make_kind: Callable[[], Kind], layerwise: bool
) -> None:
    """Into other pages, by another engine, every byte, and no byte of other pages is touched."""
    kind, other = make_kind(), make_kind()
    fill(kind.kv, 1)
    fill(other.kv, 2)
    for number, (side, there) in enumerate(
        zip(kind.sides.values(), other.sides.values(), strict=True)
    ):
        fill(side.buffers, 10 + number)
        fill(there.buffers, 20 + number)
    one, two = start_linker(daemon, kind), start_linker(daemon, other, layerwise=layerwise)
    keys = KEYS[:NODE]
    assert store(
        one,
        [
            PoolTransfer(PoolName.KV, device_indices=indices(FROM, PAGE), keys=keys),
            *(side.transfer(name, keys, side.stored) for name, side in kind.sides.items()),
        ],
    )

    asked = [
        PoolTransfer(PoolName.KV, keys=KEYS[: NODE + 3]),
        *(
            PoolTransfer(name, keys=KEYS[: NODE + 3][-len(side.loaded) :])
            for name, side in other.sides.items()
        ),
    ]
    expected = {PoolName.SWA: [NODE - 1, NODE], PoolName.MAMBA: [NODE]}
    lengths = next((expected[name] for name in other.sides), list(range(1, NODE + 1)))
    eventually(lambda: two.lookup("request", asked), lengths.__eq__)
    right = {None: moved(kind.kv, other.kv, PAGE, FROM, TO)}
    for name, side in other.sides.items():
        mine = kind.sides[name]
        sources = mine.stored[-len(side.loaded) :]
        right[name] = moved(mine.buffers, side.buffers, side.rows, sources, side.loaded)
    assert two.load(
        "request",
        [
            PoolTransfer(PoolName.KV, device_indices=indices(TO, PAGE), keys=keys),
            *(side.transfer(name, keys, side.loaded) for name, side in other.sides.items()),
        ],
    )
    number = two.start_layer_wise_loading()
    assert (number >= 0) is layerwise
    two.layer_done_counter.set_consumer(number)
    for layer in range(4 if layerwise else 0):
        two.layer_done_counter.wait_until(layer)
    assert two.finish_layer_wise_loading(number)
    for buffers, wanted in [(other.kv, right[None])] + [
        (side.buffers, right[name]) for name, side in other.sides.items()
    ]:
        assert all(torch.equal(*pair) for pair in zip(buffers, wanted, strict=True))


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
