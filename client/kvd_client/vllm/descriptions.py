"""Descriptions of the chunks that requests store, as vLLM's own events have their blocks.

Without the extra keys, such as an image's or a `cache_salt`, a router would take a block for one
that any prompt with these tokens finds.
"""

import struct
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
    RequestOffloadState,
    SchedulerOffloadConfig,
)
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, to_event_extra_keys
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx
from vllm.v1.request import Request

from kvd_client.vllm.upstream import require
from kvd_proto.descriptions import Description, encode
from kvd_proto.errors import DescriptionError


class ChunkDescriber:
    """Describes chunks that the requests of one scheduler have.

    Args:
        config: vLLM's configuration of groups and chunks.
        requests: vLLM's state of every request, by request id.
        lookahead_tokens: tokens after a block that its hash covers too.
    """

    def __init__(
        self,
        config: SchedulerOffloadConfig,
        requests: Mapping[str, RequestOffloadState],
        *,
        lookahead_tokens: int = 0,
    ) -> None:
        self._groups = {group.group_idx: group for group in config.kv_group_configs}
        self._tokens_per_hash = config.tokens_per_hash
        self._requests = requests
        self._lookahead_tokens = lookahead_tokens
        if lookahead_tokens:
            require(kv_cache_utils, "generate_lookahead_block_hash_extra_keys")

    def encoded(self, key: OffloadKey, request: ReqContext) -> bytes:
        """Return the description of a chunk that the request stores, as the daemon keeps it.

        Nothing where vLLM does not say where in the request the chunk is, or it cannot be kept.
        """
        end = request.get_offload_key_position(key)
        state = self._requests.get(request.req_id)
        if end is None or state is None:
            return b""
        group = self._groups[get_offload_group_idx(key)]
        try:
            return encode(
                describe(state.req, group, end, self._tokens_per_hash, self._lookahead_tokens)
            )
        except DescriptionError:
            return b""


def describe(
    request: Request,
    group: GroupOffloadConfig,
    end: int,
    tokens_per_hash: int,
    lookahead_tokens: int = 0,
) -> Description:
    """Describe the chunk of a request that ends after so many tokens.

    A tail that is no whole chunk is one block of its tokens: its state is of no use for a prompt
    that is the same for a part of them.
    """
    size = group.tokens_per_chunk
    start = (end - 1) // size * size
    block = group.tokens_per_block if end - start == size else end - start
    first, after, step = start // tokens_per_hash, end // tokens_per_hash, block // tokens_per_hash
    hashes = request.block_hashes
    extra, feature = [], 0
    for begin in range(start, end, block):
        keys, feature = _extra_keys(request, begin, begin + block, lookahead_tokens, feature)
        extra.append(keys)
    lookahead = request.all_token_ids[end : end + lookahead_tokens]
    lora = request.lora_request
    untagged = to_event_extra_keys(extra) if any(extra) else None
    return Description(
        parent=hashes[first - 1] if first else b"",
        # A hash is of all tokens before its end: the last one of a block is the block's.
        hashes=tuple(hashes[first + step - 1 : after : step]),
        tokens=struct.pack(f"<{end - start}I", *request.all_token_ids[start:end]),
        block_size=block,
        group=group.group_idx,
        kind=group.kv_event_group_spec.kv_cache_spec_kind or "",
        window=group.kv_event_group_spec.kv_cache_spec_sliding_window,
        lora=lora.lora_name if lora else None,
        extra=None if untagged is None else tuple(untagged),
        lookahead=struct.pack(f"<{len(lookahead)}I", *lookahead),
    )


def _extra_keys(
    request: Request, begin: int, end: int, lookahead_tokens: int, feature: int
) -> tuple[tuple[Any, ...] | None, int]:
    """Return what a block's hash is made of besides tokens, and where the next block's begins."""
    if not lookahead_tokens:
        return generate_block_hash_extra_keys(request, begin, end, feature)  # type: ignore[no-any-return]
    with_lookahead = kv_cache_utils.generate_lookahead_block_hash_extra_keys  # since vLLM 0.33
    return with_lookahead(request, begin, end, end + lookahead_tokens, feature)  # type: ignore[no-any-return]
