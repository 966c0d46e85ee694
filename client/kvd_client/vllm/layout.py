"""The physical layout of a rank's KV cache, from vLLM's configuration to the registered layout.

1. `requested_layout` decides which layout kvd requests from vLLM. A layout orders layers (L),
   blocks (B), heads (H), tokens (N) and a head's contents (C). With blocks outermost, all layers'
   pages of a block lie side by side, and copies are few and large.
2. `KvCachePages` finds where the pages lie. vLLM gives each layer a view (blocks, heads, tokens,
   contents) of its allocation, whose strides say where a page's bytes are. `KVCacheConfig` says
   where vLLM planned the layers; both must agree. A page is usually one run of bytes, or one run
   for each head if heads are outside of blocks. Adjacent runs of a group within a block form one
   fragment: with blocks outermost, all layers of a block. Padding of pages, blocks and states is
   not part of any run. None of this depends on the meaning of a layout's name.
3. `describe_caches` describes the memory to the daemon.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_offload.config import OffloadingConfig

from kvd_client import GroupSpec, RankLayout, TensorRef, UnsupportedMemory
from kvd_client.torch_memory import BlockTensor, TorchTensors, describe_torch
from kvd_client.vllm.options import VllmOptions
from kvd_proto.text import format_size

BLOCKS_OUTERMOST = "BLHNC"
MAX_UNSPLIT_TOKENS = 64  # attention backends with fixed block sizes take this one or a smaller one
# Bytes. Below this, vLLM's own offloading does not use copy engines (swap_blocks_triton.py).
SMALL_FRAGMENT = 28 * 1024
FORCED_LAYOUT = "VLLM_KV_CACHE_LAYOUT"  # vLLM's variable, which overrides the connector's request
NULL_BLOCK = 0  # of vLLM's BlockPool: never handed out; 0 in a block table means "skipped"
_GAP_DIVISOR = 32  # a gap of up to 1/32 of the fragment before it is copied too: one copy fewer


def requested_layout(vllm_config: VllmConfig, options: VllmOptions) -> str | None:
    """Return the name of the layout to request; None: vLLM's own choice.

    By default that is blocks of all layers, but only where vLLM and its attention can use it. vLLM
    does not start if an attention backend would split such blocks into kernel blocks. That may
    happen with hybrid models, whose blocks are as large as a state, with caches of several types,
    and with block sizes that the operator chose. Backends for MLA claim to take every layout, but
    the CPU's reads the cache as one row and fails. In all these cases pages are large anyway.
    """
    if options.kv_layout == "none":
        return None
    if options.kv_layout != "auto":
        return options.kv_layout
    model, cache = vllm_config.model_config, vllm_config.cache_config
    not_plain = model.use_mla or model.is_hybrid or cache.kv_cache_dtype_skip_layers
    may_split = cache.user_specified_block_size and cache.block_size > MAX_UNSPLIT_TOKENS
    return None if not_plain or may_split else BLOCKS_OUTERMOST


def layout_line(
    layout: RankLayout, actual: str, requested: str | None, backends: Iterable[str], *, host: bool
) -> str:
    """Return the worker's log line about its layout: name, fragments, and a remedy for small ones.

    Args:
        layout: as registered.
        actual: name of the layout that vLLM uses.
        requested: name of the layout that kvd requested.
        backends: names of the attention backends that do not support the requested layout.
        host: the KV cache is in host memory, where small copies are not slower.
    """
    sizes = {ref.page_bytes for group in layout.groups for ref in group.refs}
    max_fragments = max(len(group.refs) for group in layout.groups)
    size_range = " to ".join(format_size(size) for size in sorted({min(sizes), max(sizes)}))
    line = f"KV cache layout {actual}: fragments of {size_range}, {max_fragments} a block"
    remedy = f"set kv_layout={BLOCKS_OUTERMOST} in kv_connector_extra_config"
    if requested is not None and requested != actual:
        names, forced = ", ".join(backends), os.environ.get(FORCED_LAYOUT)
        if forced is not None:
            reason, remedy = f"{FORCED_LAYOUT}={forced} decides", f"unset {FORCED_LAYOUT}"
        elif names:
            reason = f"attention backend {names} cannot use it"
            remedy = "choose one that can, with --attention-backend"
        else:
            reason, remedy = "vLLM cannot use it for this model", ""
        line += f"; {requested} was asked for, but {reason}"
    if KVCacheLayout[actual].is_block_outermost:
        remedy = ""
    if host or min(sizes) >= SMALL_FRAGMENT:
        return line
    return f"{line}; copies of less than 28 KiB are slow: {remedy or 'raise --block-size'}"


# -------------------------------------------------------------------- pages


@dataclass(frozen=True, slots=True)
class Fragment:
    """Contiguous bytes of each block: those of block b begin at offset + b * stride.

    Attributes:
        storage: number of the allocation, by first use.
        offset, nbytes, stride: in bytes.
    """

    storage: int
    offset: int
    nbytes: int
    stride: int


@dataclass(frozen=True, slots=True)
class GroupPages:
    """The parts of a block of one group.

    Attributes:
        fragments: in the order of their addresses.
        contents: digest of what their bytes are, in this order: layers, and dimensions in a page.
    """

    fragments: tuple[Fragment, ...]
    contents: str


class KvCachePages:
    """The pages of a rank's KV cache.

    Args:
        kv_cache_config: where vLLM planned the layers.
        views: of each layer, as vLLM hands them to a connector.
    """

    def __init__(self, kv_cache_config: KVCacheConfig, views: Mapping[str, torch.Tensor]) -> None:
        self.num_blocks: int = kv_cache_config.num_blocks
        self.storages: list[torch.UntypedStorage] = []
        self._config = kv_cache_config
        self._views = views
        self._storage_numbers: dict[int, int] = {}

    def group(self, number: int) -> GroupPages:
        """Return the pages of a group.

        Args:
            number: of the group in the KV cache's configuration.

        Raises:
            UnsupportedMemory: a layer is missing, or does not lie where it was planned.
        """
        group = self._config.kv_cache_groups[number]
        layer_specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        runs: list[tuple[Fragment, list[str]]] = []  # with a description of their bytes
        placed: dict[str, tuple[int, tuple[int, ...]]] = {}
        for tensor in self._config.kv_cache_tensors:
            for index, layer in enumerate(tensor.layers):
                if layer not in group.layer_names:
                    continue
                view = self._view(layer)
                placed[layer] = (view.data_ptr(), view.stride())
                layer_runs, form = self._runs(layer, view)
                _check_placement(layer, tensor, index, view, layer_runs[0].stride)
                description = [layer, form, repr(layer_specs.get(layer, group.kv_cache_spec))]
                runs += [(run, [*description, str(i)]) for i, run in enumerate(layer_runs)]
        if not runs:
            raise UnsupportedMemory(f"group {number} has no layer in this rank")
        for layer in set(group.layer_names) - placed.keys():  # must share another layer's pages
            view = self._view(layer)
            if (view.data_ptr(), view.stride()) not in placed.values():
                raise UnsupportedMemory(f"layer {layer} has no place in the KV cache's allocation")
        runs.sort(key=lambda run: (run[0].storage, run[0].stride, run[0].offset))
        descriptions = json.dumps([description for _, description in runs])
        return GroupPages(
            fragments=tuple(_merged([run for run, _ in runs])),
            contents=hashlib.blake2b(descriptions.encode(), digest_size=16).hexdigest(),
        )

    def _view(self, layer: str) -> torch.Tensor:
        view = self._views.get(layer)
        if not isinstance(view, torch.Tensor):
            raise UnsupportedMemory(f"layer {layer}: vLLM hands over {type(view).__name__}")
        return view

    def _runs(self, layer: str, view: torch.Tensor) -> tuple[list[Fragment], str]:
        """Return the runs of a layer's page, and its dimensions as text, the outermost first."""
        storage = view.untyped_storage()
        storage_number = self._storage_numbers.setdefault(storage._cdata, len(self.storages))  # noqa: SLF001  # same for all views of a storage
        if storage_number == len(self.storages):
            self.storages.append(storage)
        item_bytes = view.element_size()
        rows, remainder = divmod(view.shape[0], self.num_blocks)  # kernel blocks of a block
        if remainder or not rows:
            raise UnsupportedMemory(
                f"layer {layer}: {view.shape[0]} rows are no multiple of {self.num_blocks} blocks"
            )
        row_stride = view.stride(0) * item_bytes
        # (stride, size, number) of the dimensions in a page, the largest stride first. Dimensions
        # of size 1 are left out: their stride means nothing.
        sizes = [rows, *view.shape[1:]]
        strides = [row_stride, *(stride * item_bytes for stride in view.stride()[1:])]
        dimensions = [d for d in zip(strides, sizes, range(len(sizes)), strict=True) if d[1] > 1]
        dimensions.sort(reverse=True)
        nbytes, dims_across_runs = item_bytes, list(dimensions)
        while dims_across_runs and dims_across_runs[-1][0] == nbytes:  # it is within a run
            nbytes *= dims_across_runs.pop()[1]
        starts = [
            sum(offsets)
            for offsets in itertools.product(
                *(range(0, stride * size, stride) for stride, size, _ in dims_across_runs)
            )
        ]
        offset, block_stride = int(view.storage_offset()) * item_bytes, row_stride * rows
        end = offset + starts[-1] + (self.num_blocks - 1) * block_stride + nbytes
        scattered = dims_across_runs and nbytes == item_bytes
        if end > storage.nbytes() or nbytes > block_stride or scattered:
            raise UnsupportedMemory(
                f"layer {layer}: pages of shape {tuple(view.shape)}, strides {view.stride()} of"
                f" {view.dtype} for {self.num_blocks} blocks cannot be moved, or do not fit"
                f" {storage.nbytes()} bytes"
            )
        form = ", ".join(f"dimension {number} of {size}" for _, size, number in dimensions)
        runs = [Fragment(storage_number, offset + start, nbytes, block_stride) for start in starts]
        return runs, f"{form}, {view.dtype}"


def _check_placement(
    layer: str, tensor: KVCacheTensor, index: int, view: torch.Tensor, stride: int
) -> None:
    """Check that a layer lies where vLLM's configuration says; raise UnsupportedMemory if not."""
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
    """Join a group's runs, sorted by storage, stride and offset, if the gap between them is small.

    The bytes of a gap (`_GAP_DIVISOR`) are copied too. No run reaches into the next block.

    Raises:
        UnsupportedMemory: two runs overlap.
    """
    merged = [runs[0]]
    for run in runs[1:]:
        last = merged[-1]
        gap = run.offset - last.offset - last.nbytes
        nbytes = run.offset + run.nbytes - last.offset
        same_blocks = (run.storage, run.stride) == (last.storage, last.stride)
        if same_blocks and gap < 0:
            raise UnsupportedMemory(
                f"two layers of a group share bytes of their blocks at byte {run.offset}"
            )
        if same_blocks and gap * _GAP_DIVISOR <= last.nbytes and nbytes <= run.stride:
            merged[-1] = replace(last, nbytes=nbytes)
        else:
            merged.append(run)
    return merged


# ----------------------------------------------------------- registered layout


def describe_caches(
    views: Mapping[str, torch.Tensor], config: OffloadingConfig, kv_cache_config: KVCacheConfig
) -> tuple[TorchTensors, RankLayout]:
    """Describe the KV cache's memory, for `Worker.register`.

    `num_blocks` is the engine's configured number, with the operator's override. Groups that vLLM
    does not offload are not in the layout.

    Args:
        views: of each layer, as vLLM hands them to a connector.
        config: which groups are offloaded, and the size of chunks.
        kv_cache_config: where vLLM planned the layers.

    Raises:
        UnsupportedMemory: a page does not lie where it was planned.
    """
    pages = KvCachePages(kv_cache_config, views)
    groups = [pages.group(group.group_id) for group in config.groups]
    tensor_numbers: dict[Fragment, int] = {}  # groups may lie over each other and share fragments
    for group in groups:
        for fragment in group.fragments:
            tensor_numbers.setdefault(fragment, len(tensor_numbers))
    described = describe_torch([_block_tensor(pages, fragment) for fragment in tensor_numbers])
    layout = RankLayout(
        num_blocks=pages.num_blocks,
        blocks_per_chunk=config.cache.blocks_per_chunk,
        hash_block_size=config.cache.tokens_per_hash,
        storages=described.storages,
        tensors=described.tensors,
        groups=tuple(
            GroupSpec(
                refs=tuple(
                    TensorRef(tensor_numbers[fragment], fragment.nbytes)
                    for fragment in group_pages.fragments
                ),
                block_size=group.tokens_per_block,
                kind=type(spec).__name__,
                sliding_window=getattr(spec, "sliding_window", None),
                contents=group_pages.contents,
            )
            for group, group_pages in zip(config.groups, groups, strict=True)
            for spec in (kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec,)
        ),
        replicated=config.replicated_layout,
        null_block=NULL_BLOCK,
    )
    return described, layout


def _block_tensor(pages: KvCachePages, fragment: Fragment) -> BlockTensor:
    """Return a fragment's bytes as a tensor [blocks, bytes]."""
    storage = pages.storages[fragment.storage]
    rows = torch.empty(0, dtype=torch.int8, device=storage.device).set_(
        storage, fragment.offset, (pages.num_blocks, fragment.nbytes), (fragment.stride, 1)
    )
    return BlockTensor(rows, page_bytes=fragment.nbytes, block_stride=fragment.stride)
