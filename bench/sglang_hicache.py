"""SGLang's own hierarchical cache (HiCache) on a CPU, as a plugin of the engine.

On a CPU SGLang 0.5.23 lacks two things that HiCache calls. One is `transfer_kv_direct`, which its
kernels have for GPUs only; here it is what it is there: one copy for each run of slots that are
neighbours on both sides. With `--hicache-io-backend direct --hicache-mem-layout layer_first`
nothing else is called. The other is host memory that is not registered with CUDA. Everything else
is SGLang's own, and it is not told that it has kernels. torch's streams and events of a CPU do
nothing and copies return when they are done, so that a load is whole before the forward pass
begins, and a store before the answer goes on.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

ARGUMENTS = (
    "--enable-hierarchical-cache",
    *("--hicache-write-policy", "write_through"),
    *("--hicache-io-backend", "direct"),
    *("--hicache-mem-layout", "layer_first"),
)


def install() -> None:
    """Give SGLang what it lacks; it calls this in each of its processes."""
    from sglang.srt.mem_cache.pool_host import common, mha  # noqa: PLC0415  # not for the parent

    mha.transfer_kv_direct = transfer_kv_direct
    common.ALLOC_MEMORY_FUNCS["cpu"] = partial(_allocate, common.alloc_with_host_register)


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copy slots of tokens in all of these layers, from `src_indices` to `dst_indices`."""
    del page_size  # neighbours are found whatever the page
    for source, target, count in _runs(src_indices, dst_indices):
        for one, other in zip(src_layers, dst_layers, strict=True):
            other[target : target + count].copy_(one[source : source + count])


def _runs(sources: torch.Tensor, targets: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """The first slot of both sides and the length of each run."""
    breaks = (sources.diff() != 1) | (targets.diff() != 1)
    ends = [*(breaks.nonzero().flatten() + 1).tolist(), len(sources)]
    begin = 0
    for end in ends:
        yield int(sources[begin]), int(targets[begin]), end - begin
        begin = end


def _allocate(allocate: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Host memory that no GPU has to reach."""
    memory: torch.Tensor = allocate(*args, **(kwargs | {"pin_memory": False}))
    return memory
