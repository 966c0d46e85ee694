"""What vLLM's state of requests says about their chunks: blocks, descriptions, common loads.

vLLM passes only keys of chunks to its manager. If the edge of a window lies inside a chunk, the
request has, and needs, only the blocks behind the edge. vLLM's own manager treats such a chunk as
whole. A chunk of kvd has the blocks that were stored, and only those are loaded.
"""

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    GroupOffloadConfig,
    RequestOffloadState,
    SchedulerOffloadConfig,
    TransferJobStatus,
)
from vllm.utils.math_utils import cdiv
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx
from vllm.v1.request import Request

from kvd_client.tickets import BlockRange
from kvd_client.vllm.upstream import require
from kvd_proto.descriptions import Description, encode
from kvd_proto.errors import DescriptionError


class BlockRanges:
    """Computes ranges of blocks within chunks, for the requests of one scheduler.

    Args:
        config: vLLM's configuration of groups and chunks.
        requests: vLLM's state of every request, by request id.

    Attributes:
        all_blocks: the range of all blocks of a chunk.
        has_partial_chunks: whether chunks of some group may have only some of their blocks.
    """

    def __init__(
        self, config: SchedulerOffloadConfig, requests: Mapping[str, RequestOffloadState]
    ) -> None:
        # By group index: the group's position in `kv_group_configs`, as in a request's
        # `group_states`, and its configuration.
        self._groups = {
            group.group_idx: (number, group) for number, group in enumerate(config.kv_group_configs)
        }
        self._requests = requests
        self._blocks_per_chunk = config.blocks_per_chunk
        self._last_block = (config.blocks_per_chunk - 1, 1)
        self.all_blocks: BlockRange = (0, config.blocks_per_chunk)
        # States are stored in a chunk's last block only; a window's edge may lie inside a chunk.
        self.has_partial_chunks = any(
            group.requires_cow_source or group.sliding_window_size_in_chunks is not None
            for group in config.kv_group_configs
        )

    def minimum(self, key: OffloadKey) -> BlockRange | tuple[()]:
        """Return the blocks that any load of the chunk needs; (): all of them.

        Of a window's chunk that is the last block.
        """
        if not self.has_partial_chunks:
            return ()
        _, group = self._groups[get_offload_group_idx(key)]
        return () if group.sliding_window_size_in_chunks is None else self._last_block

    def count_by_group(self, keys: Sequence[OffloadKey]) -> dict[int, int]:
        """Return the number of keys of each group."""
        if len(self._groups) > 1:
            return dict(Counter(map(get_offload_group_idx, keys)))
        return {next(iter(self._groups)): len(keys)} if keys else {}

    def chunk_of(self, key: OffloadKey, request: ReqContext) -> tuple[int, int] | None:
        """Return the group's position in `kv_group_configs`, and the chunk's in the request.

        None: vLLM would not offer the chunk again, whatever the request's `next_stored_chunk_idx`.
        This holds for states, which are handed over in one step, and tails smaller than a chunk.
        """
        number, group = self._groups[get_offload_group_idx(key)]
        end = request.get_offload_key_position(key)
        if end is None or end % group.tokens_per_chunk or group.requires_cow_source:
            return None
        return number, end // group.tokens_per_chunk - 1

    def full_attention_keys(self, req_id: str, num_tokens: int) -> list[OffloadKey]:
        """Return the keys of full-attention chunks that the request's first tokens fill.

        Empty if vLLM has forgotten the request.
        """
        state = self._requests.get(req_id)
        if state is None:
            return []
        return [
            key
            for number, group in self._groups.values()
            if group.sliding_window_size_in_chunks is None
            for key in state.group_states[number].offload_keys[
                : num_tokens // group.tokens_per_chunk
            ]
        ]

    def num_prompt_tokens(self, req_id: str) -> int | None:
        """Return the length of the request's prompt; None: vLLM has forgotten the request."""
        state = self._requests.get(req_id)
        return None if state is None else int(state.req.num_prompt_tokens)

    def missed(self, req_id: str, num_cached: int) -> list[OffloadKey]:
        """Return the keys of the prompt's chunks after its first `num_cached` tokens.

        Of the first group of full attention; empty if the model has no such group.
        """
        state = self._requests[req_id]
        for number, group in self._groups.values():
            if group.sliding_window_size_in_chunks is None:
                size, num_prompt = group.tokens_per_chunk, state.req.num_prompt_tokens
                keys = state.group_states[number].offload_keys
                return list(keys[num_cached // size : num_prompt // size])
        return []

    def offered(self, key: OffloadKey, request: ReqContext) -> BlockRange:
        """Return the blocks that the request has of a chunk that it offers, up to the last one."""
        number, group = self._groups[get_offload_group_idx(key)]
        if group.requires_cow_source:
            return self._last_block
        end_token = request.get_offload_key_position(key)
        state = self._requests.get(request.req_id)
        if end_token is None or state is None or end_token % group.tokens_per_chunk:
            return self.all_blocks
        end = end_token // group.tokens_per_block
        block_ids = state.group_states[number].block_ids[end - self._blocks_per_chunk : end]
        first = next((i for i in range(len(block_ids), 0, -1) if not block_ids[i - 1]), 0)
        if first >= self._blocks_per_chunk:
            return self._last_block
        return first, self._blocks_per_chunk - first

    def needed(self, req_id: str, num_tokens: int) -> dict[OffloadKey, BlockRange]:
        """Return the blocks of windows' chunks to load for this many further tokens."""
        state = self._requests[req_id]
        computed = state.num_locally_computed_tokens
        end = computed + num_tokens
        needed: dict[OffloadKey, BlockRange] = {}
        for number, group in self._groups.values():
            if group.sliding_window_size_in_chunks is None:
                continue
            skipped = skipped_tokens(group, end) // group.tokens_per_block
            first_block = max(cdiv(computed, group.tokens_per_block), skipped)
            end_block = cdiv(end, group.tokens_per_block)
            keys = state.group_states[number].offload_keys
            for chunk in range(
                first_block // self._blocks_per_chunk,
                min(cdiv(end_block, self._blocks_per_chunk), len(keys)),
            ):
                begin = max(0, first_block - chunk * self._blocks_per_chunk)
                stop = min(self._blocks_per_chunk, end_block - chunk * self._blocks_per_chunk)
                if begin < stop:
                    needed[keys[chunk]] = (begin, stop - begin)
        return needed


class SharedLoads:
    """Tells which loads under way a request may wait for, instead of loading the same chunks.

    A request that meets chunks that another one is loading waits: then the engine's own prefix
    cache has them, and they are loaded and kept once. With sliding windows or states this holds
    only if the request begins with all tokens up to the load's end: of a window, the blocks before
    this end are loaded and no others. Otherwise the engine's cache has nothing for the request
    after the wait, and requests with one beginning and different ends would load one after
    another, each in a later step. They load side by side.

    Args:
        config: vLLM's configuration of groups and chunks.
        jobs: vLLM's jobs under way, by number.
    """

    def __init__(
        self, config: SchedulerOffloadConfig, jobs: Mapping[int, TransferJobStatus]
    ) -> None:
        self._jobs = jobs
        self._tokens_per_hash = config.tokens_per_hash
        self._has_windows = any(
            group.sliding_window_size_in_chunks is not None for group in config.kv_group_configs
        )
        self._ends: dict[int, tuple[int, BlockHash]] = {}  # by load: its last hash, and of which

    def add(self, job_id: int, request: Request, end: int) -> None:
        """Add a load that has begun: of the request's chunks up to its first `end` tokens."""
        index = end // self._tokens_per_hash - 1
        if self._has_windows and 0 <= index < len(request.block_hashes):
            self._ends[job_id] = index, request.block_hashes[index]

    def usable(self, being_loaded: set[OffloadKey], request: Request) -> set[OffloadKey]:
        """Return those chunks that the request finds in the engine's cache after their loads."""
        if not self._has_windows:
            return being_loaded
        self._ends = {job_id: end for job_id, end in self._ends.items() if job_id in self._jobs}
        hashes = request.block_hashes
        return {
            key
            for job_id, (index, block_hash) in self._ends.items()
            if index < len(hashes) and hashes[index] == block_hash
            for key in self._jobs[job_id].keys & being_loaded
        }


def skipped_tokens(group: GroupOffloadConfig, num_computed: int) -> int:
    """Return how many of the computed tokens the group's layers no longer attend to.

    The formulas are those of `get_num_skipped_tokens` of vLLM's managers.
    """
    spec = group.kv_cache_spec
    if isinstance(spec, SlidingWindowSpec):
        retained: int = spec.sliding_window - 1 + spec.extra_retained_tokens
        return max(0, num_computed - retained)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        size: int = spec.attention_chunk_size
        return num_computed // size * size
    if isinstance(spec, MambaSpec):
        return max(0, num_computed - 1)
    return 0  # an unknown kind of window: all blocks of its chunks are loaded


# ------------------------------------------------------------- descriptions


class ChunkDescriber:
    """Describes chunks of the requests of one scheduler, for KV events.

    Args:
        config: vLLM's configuration of groups and chunks.
        requests: vLLM's state of every request, by request id.
        lookahead_tokens: number of tokens after a block that its hash covers too.
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
        """Return the encoded description of a chunk that the request stores.

        Empty if vLLM does not know the chunk's position, or the description is too large.
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
    """Return the description of the chunk that ends after the request's first `end` tokens.

    It has what vLLM's own events have. Without the extra keys, such as an image's or a
    `cache_salt`, a router would believe that any prompt with these tokens finds the block.

    A tail smaller than a chunk is described as one block: its state is useless for a prompt that
    shares only some of its tokens.
    """
    size = group.tokens_per_chunk
    start = (end - 1) // size * size
    block_size = group.tokens_per_block if end - start == size else end - start
    first_hash, end_hash = start // tokens_per_hash, end // tokens_per_hash
    hashes_per_block = block_size // tokens_per_hash
    hashes = request.block_hashes
    extra_keys, feature = [], 0
    for begin in range(start, end, block_size):
        block_keys, feature = _extra_keys(
            request, begin, begin + block_size, lookahead_tokens, feature
        )
        extra_keys.append(block_keys)
    lookahead = request.all_token_ids[end : end + lookahead_tokens]
    lora = request.lora_request
    event_keys = to_event_extra_keys(extra_keys) if any(extra_keys) else None
    return Description(
        parent=hashes[first_hash - 1] if first_hash else b"",
        # A hash covers all tokens before its end, so a block's last hash is the block's.
        hashes=tuple(hashes[first_hash + hashes_per_block - 1 : end_hash : hashes_per_block]),
        tokens=struct.pack(f"<{end - start}I", *request.all_token_ids[start:end]),
        block_size=block_size,
        group=group.group_idx,
        kind=group.kv_event_group_spec.kv_cache_spec_kind or "",
        window=group.kv_event_group_spec.kv_cache_spec_sliding_window,
        lora=lora.lora_name if lora else None,
        extra=None if event_keys is None else tuple(event_keys),
        lookahead=struct.pack(f"<{len(lookahead)}I", *lookahead),
    )


def _extra_keys(
    request: Request, begin: int, end: int, lookahead_tokens: int, feature: int
) -> tuple[tuple[Any, ...] | None, int]:
    """Return what a block's hash covers besides tokens, and the first feature of the next block."""
    if not lookahead_tokens:
        return generate_block_hash_extra_keys(request, begin, end, feature)  # type: ignore[no-any-return]
    with_lookahead = kv_cache_utils.generate_lookahead_block_hash_extra_keys  # since vLLM 0.33
    return with_lookahead(request, begin, end, end + lookahead_tokens, feature)  # type: ignore[no-any-return]
