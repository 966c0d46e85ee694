"""Pages of a device pool, stored and loaded layer by layer as a linker of SGLang's does it.

On a real daemon and torch tensors; SGLang itself is not needed for it.
"""

import signal
from collections.abc import Callable, Iterator

import pytest
import torch

from kvd_client import Fingerprint
from kvd_client.sglang.pages import LayerPages, PagePool, cached_prefix
from kvd_client.sglang.pool_cache import PoolCache, SglangOptions
from kvd_client.sglang.transfers import LayerCounter, LoadBatch, NodeStore, PoolLoad, StoreQueue
from tests.conftest import Daemon, StartDaemon
from tests.waiting import DEADLINE, PATIENCE, eventually

LAYERS, PAGES, WIDTH = 4, 64, 32
MakeCache = Callable[..., PoolCache]
KEYS = [bytes([page]) * 32 for page in range(1, 200)]
TIMEOUT = 2 * PATIENCE


def make_pool(page_tokens: int) -> PagePool:
    """Keys and values of some layers, with room for a padding page."""
    tokens = PAGES * page_tokens
    layers = [
        LayerPages(layer, torch.zeros(tokens, 2, WIDTH, dtype=torch.bfloat16), page_tokens)
        for layer in range(LAYERS)
        for _ in range(2)
    ]
    return PagePool("kv", page_tokens, tuple(layers))


@pytest.fixture
def make_cache() -> Iterator[MakeCache]:
    """Makes a pool's cache at a daemon; all are closed."""
    made: list[PoolCache] = []

    def make(daemon: Daemon, page_tokens: int = 1, factor: int = 4) -> PoolCache:
        options = SglangOptions(
            runtime_dir=str(daemon.runtime_dir),
            deadline=DEADLINE,
            load_timeout=TIMEOUT,
            loan_timeout=PATIENCE,
        )
        pool, model = make_pool(page_tokens), Fingerprint(model="m")
        cache = PoolCache(pool, factor, f"engine-{len(made)}", model, options)
        made.append(cache)
        eventually(lambda: cache.scheduler.attached)
        return cache

    yield make
    for cache in made:
        cache.close()


def indices(cache: PoolCache, pages: list[int]) -> torch.Tensor:
    """SGLang's indices of pages."""
    size = cache.pool.page_tokens
    return torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages])


def content(key: bytes, layer: int, shape: torch.Size) -> torch.Tensor:
    """Values that differ for every page and layer."""
    seed = torch.Generator().manual_seed(key[0] * 100 + layer)
    return torch.randn(shape, generator=seed).to(torch.bfloat16)


def pages_of(
    cache: PoolCache, keys: list[bytes], pages: list[int]
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Each page of each part: its layer, its bytes and what they are to be."""
    for number, part in enumerate(cache.pool.layers):
        for key, page in zip(keys, pages, strict=True):
            tensor = part.tensor[page * part.rows : (page + 1) * part.rows]
            yield part.number, tensor, content(key, number, tensor.shape)


def fill(cache: PoolCache, keys: list[bytes], pages: list[int]) -> None:
    """Compute these pages."""
    for _, tensor, expected in pages_of(cache, keys, pages):
        tensor[:] = expected


def num_wrong(cache: PoolCache, keys: list[bytes], pages: list[int], layers: int = LAYERS) -> int:
    """Of the first layers, how many pages have other bytes than they should."""
    return sum(
        layer < layers and not torch.equal(tensor, expected)
        for layer, tensor, expected in pages_of(cache, keys, pages)
    )


def store(cache: PoolCache, keys: list[bytes], pages: list[int]) -> bool:
    """Store a node; whether all of it was taken."""
    queue = StoreQueue()
    try:
        queue.add(NodeStore([(cache, keys, indices(cache, pages))], ()))
        eventually(lambda: queue.num_ended() == 1)
        return queue.pop()
    finally:
        queue.close()


def pin(cache: PoolCache, keys: list[bytes], pages: list[int]) -> PoolLoad:
    """Pin what is to be loaded."""
    runs = eventually(
        lambda: cached_prefix(keys, cache.pages_per_chunk, cache.blocks_of),
        lambda runs: sum(run.num_pages for run in runs) == len(keys),
    )
    ticket = cache.pin(runs)
    assert ticket is not None
    return PoolLoad(cache, runs, cache.rows(runs, indices(cache, pages)), ticket)


@pytest.mark.parametrize(("page_tokens", "factor"), [(1, 8), (4, 4), (16, 1)])
def test_what_one_engine_stores_another_loads(
    daemon: Daemon, make_cache: MakeCache, page_tokens: int, factor: int
) -> None:
    """Nodes that begin anywhere, pages anywhere: each layer is right as soon as it is counted."""
    one, other = (make_cache(daemon, page_tokens, factor) for _ in range(2))
    keys = KEYS[:21]
    for first, end in ((0, 5), (5, 16), (16, 21)):
        pages = list(range(first + 1, end + 1))
        fill(one, keys[first:end], pages)
        assert store(one, keys[first:end], pages)
    for at, end in ((0, 21), (3, 16)):  # a lookup may begin anywhere
        pages = [40 + (7 * page) % 23 for page in range(end - at)]
        fill(other, [KEYS[100]] * len(pages), pages)
        counter = LayerCounter()
        index = counter.add(LoadBatch([pin(other, keys[at:end], pages)], None, TIMEOUT))
        counter.set_consumer(index)
        for layer in range(LAYERS):
            counter.wait_until(layer)
            assert num_wrong(other, keys[at:end], pages, layer + 1) == 0
        assert counter.finish(index)
        assert num_wrong(other, keys[at:end], pages) == 0


def test_a_load_goes_on_at_the_daemon_that_follows(
    start_daemon: StartDaemon, make_cache: MakeCache
) -> None:
    """Killed between lookup and load: the load waits for the next daemon, which has the chunks."""
    daemon = start_daemon("--keep-pool", "yes")
    cache = make_cache(daemon)
    keys, pages = KEYS[:12], list(range(20, 32))
    fill(cache, keys, list(range(1, 13)))
    assert store(cache, keys, list(range(1, 13)))
    load = pin(cache, keys, pages)
    daemon.stop(signal.SIGKILL)
    batch = LoadBatch([load], None, TIMEOUT)
    start_daemon("--keep-pool", "yes", ready=False)
    assert batch.finish()
    assert num_wrong(cache, keys, pages) == 0
