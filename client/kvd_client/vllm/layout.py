"""From vLLM's KV cache to shared memory and the layout that a daemon serves."""

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
from kvd_client.torch_memory import BlockTensor, SharedTensors, share_torch
from kvd_client.vllm.options import Options
from kvd_proto.sizes import format_size

NULL_BLOCK = 0  # of vLLM's BlockPool: never handed out; 0 in a block table means "skipped"


def share_caches(
    views: Mapping[str, torch.Tensor], config: OffloadingConfig, kv_cache_config: KVCacheConfig
) -> tuple[SharedTensors, RankLayout]:
    """Move the KV cache's memory into shared memory, in place, and describe what is offloaded.

    `num_blocks` is the engine's configured number, including the operator's override. Groups that
    vLLM does not offload have no part in the layout; their bytes count, for all groups lie over
    each other.

    Args:
        views: of each layer, as vLLM hands them to a connector.
        config: which groups are offloaded, and the chunk's size.
        kv_cache_config: where vLLM placed the layers.

    Raises:
        UnsupportedMemory: memory that another process cannot map, or pages that lie elsewhere than
            configured.
    """
    pages = Pages(kv_cache_config, views)
    groups = [pages.group(group.group_id) for group in config.groups]
    of: dict[Fragment, int] = {}  # groups that lie over each other share them
    for group in groups:
        for fragment in group.fragments:
            of.setdefault(fragment, len(of))
    shared = share_torch([_rows(pages, fragment) for fragment in of])
    layout = RankLayout(
        num_blocks=pages.num_blocks,
        blocks_per_chunk=config.cache.blocks_per_chunk,
        hash_block_size=config.cache.tokens_per_hash,
        storages=shared.storages,
        tensors=shared.tensors,
        groups=tuple(
            GroupSpec(
                refs=tuple(TensorRef(of[part], part.nbytes) for part in found.fragments),
                block_size=group.tokens_per_block,
                kind=type(spec).__name__,
                sliding_window=getattr(spec, "sliding_window", None),
                contents=found.contents,
            )
            for group, found in zip(config.groups, groups, strict=True)
            for spec in (kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec,)
        ),
        replicated=config.replicated_layout,
        null_block=NULL_BLOCK,
    )
    return shared, layout


def _rows(pages: Pages, fragment: Fragment) -> BlockTensor:
    """A fragment's bytes as a tensor [blocks, bytes]."""
    storage = pages.storages[fragment.storage]
    rows = torch.empty(0, dtype=torch.int8, device=storage.device).set_(
        storage, fragment.offset, (pages.num_blocks, fragment.nbytes), (fragment.stride, 1)
    )
    return BlockTensor(rows, page_bytes=fragment.nbytes, block_stride=fragment.stride)


# TODO fragments.py
# """Where the pages of a rank's KV cache lie: from vLLM's views to fragments.
#
# vLLM gives each layer a view (blocks, heads, tokens, contents) of its allocation, whose strides
# say where a page's bytes are; `KVCacheConfig` says where the layers were to be placed, and both
# must agree. A page is one run of bytes as a rule, and one for each head where heads are outside of
# blocks. Runs of a group that follow each other within a block are one fragment: where blocks are
# outermost, all layers of a block.
#
# Nothing here depends on what a layout's name means, and padding (of pages, of blocks, of states to
# the pages of attention) is where no run is.
# """

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


# TODO wish.py
# """Which physical layout of the KV cache the connector asks vLLM for, and what came of it.
#
# A layout orders layers (L), blocks (B), heads (H), tokens (N) and a head's contents (C). Where
# blocks are outermost, all layers' pages of a block lie side by side, and copies are few and large.
# """

BLOCKS_OUTERMOST = "BLHNC"
SMALL = 28 * 1024  # bytes; below, vLLM's own offloading avoids copy engines (swap_blocks_triton.py)
_UNSPLIT = 64  # tokens; attention backends that take fixed block sizes take this one or smaller
_FORCED = "VLLM_KV_CACHE_LAYOUT"  # vLLM's own setting, stronger than a connector's wish


def wanted_layout(vllm_config: VllmConfig, options: Options) -> str | None:
    """Return the name of the layout to ask for; None: vLLM's own choice.

    By itself the connector asks for blocks of all layers only where attention is known to read
    them. Blocks that an attention backend takes in parts ("kernel blocks") cannot be such: vLLM
    does not start then. That concerns hybrid models, whose blocks are made as large as a state,
    caches of several types, and sizes that no backend chose. Backends for MLA take every layout by
    their own word, but the CPU's reads the cache as one row and fails. All of these have large
    pages in every layout.
    """
    if options.kv_layout == "none":
        return None
    if options.kv_layout != "auto":
        return options.kv_layout
    model, cache = vllm_config.model_config, vllm_config.cache_config
    apart = model.use_mla or model.is_hybrid or cache.kv_cache_dtype_skip_layers
    given = cache.user_specified_block_size and cache.block_size > _UNSPLIT
    return None if apart or given else BLOCKS_OUTERMOST


def layout_line(
    layout: RankLayout, taken: str, wanted: str | None, backends: Iterable[str], *, host: bool
) -> str:
    """Return what the worker's log says of its layout: what was taken, fragments, what to do.

    Args:
        layout: as it is registered.
        taken: the layout's name.
        wanted: that of the layout which the connector asked for.
        backends: names of attention backends that do not take it.
        host: the KV cache is in host memory, where small copies are no slower.
    """
    sizes = {ref.page_bytes for group in layout.groups for ref in group.refs}
    most = max(len(group.refs) for group in layout.groups)
    span = " to ".join(format_size(size) for size in sorted({min(sizes), max(sizes)}))
    line = f"KV cache layout {taken}: fragments of {span}, {most} a block"
    remedy = f"set kv_layout={BLOCKS_OUTERMOST} in kv_connector_extra_config"
    if wanted is not None and wanted != taken:
        names, forced = ", ".join(backends), os.environ.get(_FORCED)
        if forced is not None:
            why, remedy = f"{_FORCED}={forced} decides", f"unset {_FORCED}"
        elif names:
            why = f"attention backend {names} cannot use it"
            remedy = "choose one that can, with --attention-backend"
        else:
            why, remedy = "vLLM cannot use it for this model", ""
        line += f"; {wanted} was asked for, but {why}"
    if KVCacheLayout[taken].is_block_outermost:
        remedy = ""
    if host or min(sizes) >= SMALL:
        return line
    return f"{line}; copies of less than 28 KiB are slow: {remedy or 'raise --block-size'}"
