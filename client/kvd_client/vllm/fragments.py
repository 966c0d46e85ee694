"""Where the pages of a rank's KV cache lie: from vLLM's views to fragments.

vLLM gives each layer a view (blocks, heads, tokens, contents) of its allocation, whose strides
say where a page's bytes are; `KVCacheConfig` says where the layers were to be placed, and both
must agree. A page is one run of bytes as a rule, and one for each head where heads are outside of
blocks. Runs of a group that follow each other within a block are one fragment: where blocks are
outermost, all layers of a block.

Nothing here depends on what a layout's name means, and padding (of pages, of blocks, of states to
the pages of attention) is where no run is.
"""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor

from kvd_client import UnsupportedMemory

_MOVED_GAP = 32  # padding of at most this part of what it follows is moved along: a copy fewer


@dataclass(frozen=True, slots=True)
class Fragment:
    """Bytes of each block that lie in one piece: block b is [offset + b * stride, + nbytes).

    storage: number of the allocation, by first use.
    """

    storage: int
    offset: int
    nbytes: int
    stride: int


@dataclass(frozen=True, slots=True)
class GroupPages:
    """What a block of one group is made of.

    fragments: in the order of their addresses.
    contents: digest of what their bytes are, in their order: layers, and dimensions in a page.
    """

    fragments: tuple[Fragment, ...]
    contents: str


class Pages:
    """The pages of a rank's KV cache.

    Args:
        kv_cache_config: where vLLM placed the layers.
        views: of each layer, as vLLM hands them to a connector.
    """

    def __init__(self, kv_cache_config: KVCacheConfig, views: Mapping[str, torch.Tensor]) -> None:
        self.num_blocks: int = kv_cache_config.num_blocks
        self.storages: list[torch.UntypedStorage] = []
        self._config = kv_cache_config
        self._views = views
        self._numbers: dict[int, int] = {}

    def group(self, number: int) -> GroupPages:
        """Return the pages of a group.

        Args:
            number: the group's in the KV cache's configuration.

        Raises:
            UnsupportedMemory: the layers lie elsewhere than configured, or not at all here.
        """
        group = self._config.kv_cache_groups[number]
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        runs: list[tuple[Fragment, list[str]]] = []
        placed: dict[str, tuple[int, tuple[int, ...]]] = {}
        for tensor in self._config.kv_cache_tensors:
            for index, layer in enumerate(tensor.layers):
                if layer not in group.layer_names:
                    continue
                view = self._view(layer)
                placed[layer] = (view.data_ptr(), view.stride())
                parts, form = self._runs(layer, view)
                _check_place(layer, tensor, index, view, parts[0].stride)
                said = [layer, form, repr(specs.get(layer, group.kv_cache_spec))]
                runs += [(part, [*said, str(at)]) for at, part in enumerate(parts)]
        if not runs:
            raise UnsupportedMemory(f"group {number} has no layer in this rank")
        for layer in set(group.layer_names) - placed.keys():  # one that shares another's pages
            view = self._view(layer)
            if (view.data_ptr(), view.stride()) not in placed.values():
                raise UnsupportedMemory(f"layer {layer} has no place in the KV cache's allocation")
        runs.sort(key=lambda run: (run[0].storage, run[0].stride, run[0].offset))
        words = json.dumps([said for _, said in runs])
        return GroupPages(
            fragments=tuple(_merged([run for run, _ in runs])),
            contents=hashlib.blake2b(words.encode(), digest_size=16).hexdigest(),
        )

    def _view(self, layer: str) -> torch.Tensor:
        view = self._views.get(layer)
        if not isinstance(view, torch.Tensor):
            raise UnsupportedMemory(f"layer {layer}: vLLM hands over {type(view).__name__}")
        return view

    def _runs(self, layer: str, view: torch.Tensor) -> tuple[list[Fragment], str]:
        """Return the runs of bytes of a layer's page, and its dimensions, the outermost first."""
        storage = view.untyped_storage()
        number = self._numbers.setdefault(storage._cdata, len(self.storages))  # noqa: SLF001  # what views share
        if number == len(self.storages):
            self.storages.append(storage)
        width = view.element_size()
        rows, rest = divmod(view.shape[0], self.num_blocks)  # kernel blocks of a block
        if rest or not rows:
            raise UnsupportedMemory(
                f"layer {layer}: {view.shape[0]} rows are no multiple of {self.num_blocks} blocks"
            )
        step = view.stride(0) * width
        # In a page: stride, size and number of each dimension, the largest stride first. Those of
        # one member have a stride that means nothing.
        sizes, strides = [rows, *view.shape[1:]], [step, *(s * width for s in view.stride()[1:])]
        dims = [d for d in zip(strides, sizes, range(len(sizes)), strict=True) if d[1] > 1]
        dims.sort(reverse=True)
        nbytes, outer = width, list(dims)
        while outer and outer[-1][0] == nbytes:
            nbytes *= outer.pop()[1]
        starts = [
            sum(places)
            for places in itertools.product(
                *(range(0, stride * size, stride) for stride, size, _ in outer)
            )
        ]
        offset, stride = int(view.storage_offset()) * width, step * rows
        ends = offset + starts[-1] + (self.num_blocks - 1) * stride + nbytes
        if ends > storage.nbytes() or nbytes > stride or (outer and nbytes == width):
            raise UnsupportedMemory(
                f"layer {layer}: pages of shape {tuple(view.shape)}, strides {view.stride()} of"
                f" {view.dtype} for {self.num_blocks} blocks cannot be moved, or do not fit"
                f" {storage.nbytes()} bytes"
            )
        form = ", ".join(f"dimension {number} of {size}" for _, size, number in dims)
        runs = [Fragment(number, offset + start, nbytes, stride) for start in starts]
        return runs, f"{form}, {view.dtype}"


def _check_place(
    layer: str, tensor: KVCacheTensor, index: int, view: torch.Tensor, stride: int
) -> None:
    offset = view.storage_offset() * view.element_size()
    planned = (tensor.offset + index * tensor.layer_stride, tensor.block_stride)
    if (offset, stride) != planned or tensor.host_resident:
        raise UnsupportedMemory(
            f"layer {layer} begins at byte {offset} with blocks {stride} bytes apart, vLLM's"
            f" configuration says {planned[0]} and {planned[1]}"
            f"{', in host memory' if tensor.host_resident else ''}; this KV cache cannot be"
            " offloaded"
        )


def _merged(runs: Sequence[Fragment]) -> list[Fragment]:
    """Join what follows each other within a block, small padding in between included.

    Padding inside a block belongs to the block, whoever owns it.
    """
    merged = [runs[0]]
    for run in runs[1:]:
        last = merged[-1]
        gap = run.offset - last.offset - last.nbytes
        nbytes = run.offset + run.nbytes - last.offset
        same = (run.storage, run.stride) == (last.storage, last.stride)
        if same and gap < 0:
            raise UnsupportedMemory(
                f"two layers of a group share bytes of their blocks at byte {run.offset}"
            )
        if same and gap * _MOVED_GAP <= last.nbytes and nbytes <= run.stride:
            merged[-1] = replace(last, nbytes=nbytes)
        else:
            merged.append(run)
    return merged
