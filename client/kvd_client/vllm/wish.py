"""Which physical layout of the KV cache the connector asks vLLM for, and what came of it.

A layout orders layers (L), blocks (B), heads (H), tokens (N) and a head's contents (C). Where
blocks are outermost, all layers' pages of a block lie side by side, and copies are few and large.
"""

import os
from collections.abc import Iterable

from vllm.config import VllmConfig
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvd_client import RankLayout
from kvd_client.vllm.options import Options
from kvd_proto.text import format_size

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
