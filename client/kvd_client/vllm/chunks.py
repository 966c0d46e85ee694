"""Which blocks of a chunk a request offers, and which it needs.

vLLM asks its manager about chunks by their keys alone. Where a window's edge lies inside a
chunk, the request has, and needs, only the blocks behind the edge. vLLM's own manager treats
such a chunk as whole; a chunk of kvd's has the blocks that were stored, and no others are loaded.
"""

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
    RequestOffloadState,
    SchedulerOffloadConfig,
)
from vllm.utils.math_utils import cdiv
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, to_event_extra_keys
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx
from vllm.v1.request import Request

from kvd_client.arguments import Blocks
from kvd_client.vllm.upstream import require
from kvd_proto.descriptions import Description, encode
from kvd_proto.errors import DescriptionError


class BlockRanges:
    """Computes ranges of blocks within chunks, for the requests of one scheduler.

    Args:
        config: vLLM's configuration of groups and chunks.
        requests: vLLM's state of every request, by request id.

    Attributes:
        whole: the range of all blocks of a chunk.
        parts: whether a chunk of some group may have only some of its blocks.
    """

    def __init__(
        self, config: SchedulerOffloadConfig, requests: Mapping[str, RequestOffloadState]
    ) -> None:
        self._groups = {
            group.group_idx: (number, group) for number, group in enumerate(config.kv_group_configs)
        }
        self._requests = requests
        self._size = config.blocks_per_chunk
        self._last = (config.blocks_per_chunk - 1, 1)
        self.whole: Blocks = (0, config.blocks_per_chunk)
        self.parts = any(
            group.requires_cow_source or group.sliding_window_size_in_chunks is not None
            for group in config.kv_group_configs
        )

    def least(self, key: OffloadKey) -> Blocks | tuple[()]:
        """Return what any load needs of the chunk: of a window's chunk at least the last block.

        Nothing where that are all of its blocks.
        """
        if not self.parts:
            return ()
        _, group = self._groups[get_offload_group_idx(key)]
        return () if group.sliding_window_size_in_chunks is None else self._last

    def per_group(self, keys: Sequence[OffloadKey]) -> dict[int, int]:
        """Count keys by group."""
        if len(self._groups) > 1:
            return dict(Counter(map(get_offload_group_idx, keys)))
        return {next(iter(self._groups)): len(keys)} if keys else {}

    def chunk_of(self, key: OffloadKey, request: ReqContext) -> tuple[int, int] | None:
        """Return the number of the key's group, and of its chunk in the request.

        None where vLLM would not offer the chunk again, whatever the request is said to store next:
        states that are handed over in one step, and tails that are no whole chunk.
        """
        number, group = self._groups[get_offload_group_idx(key)]
        end = request.get_offload_key_position(key)
        if end is None or end % group.tokens_per_chunk or group.requires_cow_source:
            return None
        return number, end // group.tokens_per_chunk - 1

    def full_attention_keys(self, req_id: str, tokens: int) -> list[OffloadKey]:
        """Return the keys of chunks that the request's first tokens fill, windows left out.

        Nothing of a request that vLLM has forgotten.
        """
        state = self._requests.get(req_id)
        if state is None:
            return []
        return [
            key
            for number, group in self._groups.values()
            if group.sliding_window_size_in_chunks is None
            for key in state.group_states[number].offload_keys[: tokens // group.tokens_per_chunk]
        ]

    def prompt_tokens(self, req_id: str) -> int | None:
        """Return how many tokens the request's prompt has; None where vLLM has forgotten it."""
        state = self._requests.get(req_id)
        return None if state is None else int(state.req.num_prompt_tokens)

    def missed(self, req_id: str, found: int) -> list[OffloadKey]:
        """Return the keys of the prompt's chunks behind its first `found` tokens.

        Of the first group of full attention; none where a model has no such group.
        """
        state = self._requests[req_id]
        for number, group in self._groups.values():
            if group.sliding_window_size_in_chunks is None:
                size, prompt = group.tokens_per_chunk, state.req.num_prompt_tokens
                return list(state.group_states[number].offload_keys[found // size : prompt // size])
        return []

    def offered(self, key: OffloadKey, request: ReqContext) -> Blocks:
        """Return which blocks the request has of a chunk that it offers, up to the chunk's end."""
        number, group = self._groups[get_offload_group_idx(key)]
        if group.requires_cow_source:
            return self._last
        end = request.get_offload_key_position(key)
        state = self._requests.get(request.req_id)
        if end is None or state is None or end % group.tokens_per_chunk:
            return self.whole
        after = end // group.tokens_per_block
        block_ids = state.group_states[number].block_ids[after - self._size : after]
        missing = next((i for i in range(len(block_ids), 0, -1) if not block_ids[i - 1]), 0)
        return (missing, self._size - missing) if missing < self._size else self._last

    def needed(self, req_id: str, tokens: int) -> dict[OffloadKey, Blocks]:
        """Return what to load of windows' chunks for this many tokens more."""
        state = self._requests[req_id]
        computed = state.num_locally_computed_tokens
        end = computed + tokens
        needed: dict[OffloadKey, Blocks] = {}
        for number, group in self._groups.values():
            if group.sliding_window_size_in_chunks is None:
                continue
            skipped = skipped_tokens(group, end) // group.tokens_per_block
            first = max(cdiv(computed, group.tokens_per_block), skipped)
            after = cdiv(end, group.tokens_per_block)
            keys = state.group_states[number].offload_keys
            for chunk in range(first // self._size, min(cdiv(after, self._size), len(keys))):
                begin = max(0, first - chunk * self._size)
                stop = min(self._size, after - chunk * self._size)
                if begin < stop:
                    needed[keys[chunk]] = (begin, stop - begin)
        return needed


def skipped_tokens(group: GroupOffloadConfig, computed: int) -> int:
    """Return how many of the computed tokens the group's layers do not attend to any more.

    The formulas are those of `get_num_skipped_tokens` of vLLM's managers.
    """
    spec = group.kv_cache_spec
    if isinstance(spec, SlidingWindowSpec):
        kept: int = spec.sliding_window - 1 + spec.extra_retained_tokens
        return max(0, computed - kept)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        size: int = spec.attention_chunk_size
        return computed // size * size
    if isinstance(spec, MambaSpec):
        return max(0, computed - 1)
    return 0  # another kind of window: all of its chunk is asked for


# TODO descriptions.py
# """Descriptions of the chunks that requests store, as vLLM's own events have their blocks.
#
# Without the extra keys, such as an image's or a `cache_salt`, a router would take a block for one
# that any prompt with these tokens finds.
# """


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
