"""SGLang's interface to an external cache, on kvd's scheduler and worker.

The scheduler's thread of each rank calls these methods. After the start none of them raises,
whatever happens to the daemon or the CUDA driver, and only a load waits for the daemon.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from kvd_client import LoadTicket
from kvd_client.errors import cause, get_logger, log_no_offload
from kvd_client.sglang.pages import (
    PagesInChunk,
    cached_pages,
    cached_prefix,
    chunk_keys,
    split_into_chunks,
    window_ends,
)
from kvd_client.sglang.pool_cache import PoolCache, read_options
from kvd_client.sglang.pools import DevicePools, find_pools, fingerprint
from kvd_client.sglang.transfers import LayerCounter, LoadBatch, NodeStore, PoolLoad, StoreQueue
from kvd_proto.messages import MAX_KEYS

MAX_REPORTED = 4096

log = get_logger("kvd_client.sglang")


@dataclass(slots=True)
class _LookupPins:
    """The pinned chunks of a request's lookup. `expires`: end of the leases, by time.monotonic."""

    tickets: list[tuple[PoolCache, LoadTicket]]
    expires: float

    def unpin(self) -> None:
        for cache, ticket in self.tickets:
            cache.unpin(ticket)


class RankGroup:
    """The ranks that serve the same requests in step and must decide alike.

    Args:
        params: SGLang's `CacheInitParams`, with the process groups in which its tree agrees.
    """

    def __init__(self, params: Any) -> None:
        groups = [params.attn_cp_cache_group, params.attn_tp_cache_group]
        self._groups = [g for g in groups if g is not None and dist.get_world_size(group=g) > 1]
        all_ranks = params.tp_cache_group
        if not self._groups and all_ranks is not None and dist.get_world_size(group=all_ranks) > 1:
            self._groups = [all_ranks]
        tensor_parallel = params.attn_tp_cache_group or all_ranks
        self.rank = 0 if tensor_parallel is None else dist.get_rank(group=tensor_parallel)
        self.size = 1 if tensor_parallel is None else dist.get_world_size(group=tensor_parallel)

    def all(self, value: bool) -> bool:
        """Return whether the value is true on all ranks.

        All ranks must call this equally often, in the same order.
        """
        if not self._groups:
            return value
        flag = torch.tensor([int(value)], dtype=torch.int)
        for group in self._groups:
            dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
        return bool(flag.item())


class KvdLinker(UnifiedCacheLinker):
    """kvd as the external cache of one rank.

    Args:
        server_args: SGLang's.
        params: SGLang's `CacheInitParams`.
        components: of SGLang's tree.
        extra_config: `linker_extra_config`; see `SglangOptions`.
        forward_stream: that writes pages; None: only the current stream does.

    Raises:
        OptionsError: invalid settings.
        KvdClientError: with `required`: the daemon is absent or cannot serve this memory.
        Exception: with `required`: what torch or the driver raised. Without `required` only
            OptionsError is raised.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: set[Any],
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        self.options = read_options(extra_config)
        self.forward_stream = forward_stream
        self.layer_done_counter = LayerCounter()
        self.pools: dict[PoolName, Any] = {}
        self._caches: dict[str, PoolCache] = {}
        self._ranks = RankGroup(params)
        self._pins: dict[str, _LookupPins] = {}  # by request, the oldest first
        self._reported: dict[str, None] = {}  # requests whose lookup is reported, the oldest first
        self._queued: dict[str, list[PoolLoad]] = {}  # loads, by request
        self._batch_sizes: dict[int, int] = {}  # by number of a started batch: its requests
        self._stores = StoreQueue()
        try:
            pools = find_pools(params, components)
            self._open_caches(server_args, params, pools)
        except Exception as error:
            self._close_caches()
            if self.options.required:
                raise
            log_no_offload(log, error)
            return
        self.pools = dict(pools.entries)
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)

    def _open_caches(self, server_args: Any, params: Any, pools: DevicePools) -> None:
        """Open the cache of each pool at the daemon."""
        kv_cache = params.token_to_kv_pool_allocator.get_kvcache()
        pool_class = f"{type(kv_cache).__name__} {getattr(kv_cache, 'kv_cache_layout', '')}".strip()
        ranks = self._ranks
        owner = "every rank" if pools.replicated else f"rank {ranks.rank}"
        parallelism = (
            f"tp {server_args.tp_size}, {owner} of {ranks.size},"
            f" cp rank {params.attn_cp_rank} of {params.attn_cp_size}"
        )
        engine = f"sglang-{server_args.port}-{uuid.uuid4().hex[:8]}-tp{ranks.rank}"
        for name, pool in pools.by_name.items():
            chunk_tokens = 1 if name == PoolName.MAMBA else self.options.chunk_tokens
            self._caches[name] = PoolCache(
                pool,
                max(1, chunk_tokens // pool.page_tokens),
                engine,
                fingerprint(server_args, pool, pool_class, parallelism, self.options.label),
                self.options,
            )
        registered = all(cache.worker.registered for cache in self._caches.values())
        log.info(
            "kvd at %s: %s; pools %s",
            self.options.runtime_dir,
            "registered" if registered else "no daemon serves this engine yet",
            ", ".join(f"{c.pool.name} of {c.pool.num_pages} pages" for c in self._caches.values()),
        )

    # --------------------------------------------------------------- lookups

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Return the loadable prefix lengths, in pages; pin the longest prefix for `rid`."""
        self._drop_expired_pins()
        previous_pins = self._pins.pop(rid, None)
        try:
            lengths = self._find_and_pin(rid, transfers)
            if rid not in self._reported:  # a waiting request is looked up in each step
                self._report(rid, transfers, lengths[-1] if lengths else 0)
        except Exception:  # a lookup that fails is a miss
            log.exception("the pages of request %s could not be looked up", rid)
            lengths = []
        if previous_pins is not None:
            previous_pins.unpin()  # after the new pins: the chunks stay pinned throughout
        return lengths

    def _find_and_pin(self, rid: str, transfers: Sequence[PoolTransfer]) -> list[int]:
        """Return the prefix lengths that all pools have; pin the longest prefix."""
        by_name = {transfer.name: transfer for transfer in transfers}
        kv = by_name.pop(PoolName.KV, None)
        if kv is None or not kv.keys or PoolName.KV not in self._caches:
            return []
        if not by_name.keys() <= self._caches.keys():
            return []
        keys, kv_cache = chunk_keys(kv.keys), self._caches[PoolName.KV]
        chunks = cached_prefix(keys, kv_cache.pages_per_chunk, kv_cache.blocks_of)
        num_cached = sum(chunk.num_pages for chunk in chunks)
        lengths = set(range(1, num_cached + 1))
        windows = {name: len(transfer.keys or ()) for name, transfer in by_name.items()}
        for name, window in windows.items():
            cache = self._caches[name]
            cached = cached_pages(keys[:num_cached], cache.pages_per_chunk, cache.blocks_of)
            lengths &= window_ends(cached, window)
        if not lengths:
            return []
        longest = max(lengths)
        to_pin = [(kv_cache, keys[:longest])]
        to_pin += [
            (self._caches[name], keys[max(0, longest - window) : longest])
            for name, window in windows.items()
        ]
        tickets = self._pin_all(
            [
                (cache, cached_prefix(some_keys, cache.pages_per_chunk, cache.blocks_of))
                for cache, some_keys in to_pin
            ]
        )
        if tickets is None:
            return []
        self._pins[rid] = _LookupPins(tickets, time.monotonic() + self.options.lease)
        return sorted(lengths)

    def _pin_all(
        self, chunks_by_cache: Sequence[tuple[PoolCache, Sequence[PagesInChunk]]]
    ) -> list[tuple[PoolCache, LoadTicket]] | None:
        """Pin these chunks in all pools, or none of them: None if a chunk is gone."""
        tickets: list[tuple[PoolCache, LoadTicket]] = []
        for cache, chunks in chunks_by_cache:
            ticket = cache.pin(chunks)
            if ticket is None:
                for pinned_cache, pinned_ticket in tickets:
                    pinned_cache.unpin(pinned_ticket)
                return None
            tickets.append((cache, ticket))
        return tickets

    def _report(self, rid: str, transfers: Sequence[PoolTransfer], num_cached: int) -> None:
        """Report a request's first lookup: its tokens, missed chunks and used chunks.

        This happens at the lookup because SGLang does not tell a linker when a request ends. Pages
        that SGLang's own cache has are not in `transfers`.

        Args:
            rid: of the request.
            transfers: as for `lookup`.
            num_cached: pages of the longest loadable prefix.
        """
        self._reported[rid] = None
        if len(self._reported) > MAX_REPORTED:
            del self._reported[next(iter(self._reported))]
        kv = next((transfer for transfer in transfers if transfer.name == PoolName.KV), None)
        kv_cache = self._caches.get(PoolName.KV)
        if kv_cache is None or kv is None or not kv.keys:
            return
        page_tokens = kv_cache.pool.page_tokens
        kv_cache.scheduler.count_tokens(len(kv.keys) * page_tokens, num_cached * page_tokens)
        chunks = split_into_chunks(chunk_keys(kv.keys[num_cached:]), kv_cache.pages_per_chunk)
        missed = [chunk.key for chunk in chunks if chunk.num_pages == kv_cache.pages_per_chunk]
        kv_cache.scheduler.report_missed(missed[:MAX_KEYS])
        pins = self._pins.get(rid)
        pinned = {} if pins is None else {cache: ticket.keys for cache, ticket in pins.tickets}
        for cache in self._caches.values():
            keys = [*pinned.get(cache, ()), *(missed if cache is kv_cache else ())]
            cache.scheduler.request_finished(keys[:MAX_KEYS])

    def _drop_expired_pins(self) -> None:
        """Drop pins whose leases have ended: SGLang does not report every abort."""
        now = time.monotonic()
        while self._pins and next(iter(self._pins.values())).expires <= now:
            self._pins.pop(next(iter(self._pins))).unpin()

    # ----------------------------------------------------------------- loads

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Load the request's pages; with `layerwise` only queue the load.

        Returns:
            Whether all ranks succeeded. If not, SGLang computes the request.
        """
        pins = self._pins.pop(rid, None)
        loads: list[PoolLoad] = []
        try:
            self._prepare_loads(transfers, loads)
            ok = bool(loads) and (self.options.layerwise or self._load_now(loads))
        except Exception:  # then all ranks compute the request
            log.exception("the load of request %s could not be prepared", rid)
            self._unpin_all(loads)
            ok = False
        if pins is not None:
            pins.unpin()
        if not self._ranks.all(ok):
            self._unpin_all(loads)
            return False
        if self.options.layerwise:
            self._queued[rid] = loads
        return True

    def _load_now(self, loads: list[PoolLoad]) -> bool:
        """Load and wait until nothing is written any more; return whether all bytes are loaded."""
        batch = LoadBatch(list(loads), self.forward_stream, self.options.load_timeout, retry=False)
        loads.clear()  # the batch unpins them
        ok = batch.finish()
        if not ok:
            log.warning("the request of this load is computed instead")
        return ok

    @staticmethod
    def _unpin_all(loads: list[PoolLoad]) -> None:
        for load in loads:
            load.unpin()
        loads.clear()

    def _prepare_loads(self, transfers: Sequence[PoolTransfer], loads: list[PoolLoad]) -> None:
        """Pin the chunks of all transfers, into `loads`, which is empty if one is missing."""
        for transfer in transfers:
            cache = self._caches.get(transfer.name)
            keys = chunk_keys(transfer.keys or ())
            chunks = (
                [] if cache is None else cached_prefix(keys, cache.pages_per_chunk, cache.blocks_of)
            )
            if cache is None or not keys or sum(chunk.num_pages for chunk in chunks) < len(keys):
                self._unpin_all(loads)
                return
            rows = cache.rows(chunks, transfer.device_indices)  # before the pin: it may raise
            ticket = cache.pin(chunks)
            if ticket is None:
                self._unpin_all(loads)
                return
            loads.append(PoolLoad(cache, chunks, rows, ticket))

    def start_layer_wise_loading(self) -> int:
        """Start the queued loads as one batch; return its number, -1: nothing is queued."""
        queued, self._queued = self._queued, {}
        if not queued:
            return -1
        loads = [load for request_loads in queued.values() for load in request_loads]
        batch = LoadBatch(loads, self.forward_stream, self.options.load_timeout)
        self._batch_sizes[index := self.layer_done_counter.add(batch)] = len(queued)
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until a batch writes no more; return whether all bytes are loaded."""
        num_requests = self._batch_sizes.pop(counter_index, 0)
        ok = self.layer_done_counter.finish(counter_index)
        if not ok:
            log.error("SGLang aborts the %d requests of this load", num_requests)
            self._caches[PoolName.KV].scheduler.count_aborted(num_requests)
        return ok

    def cancel_queued_load(self, rid: str) -> bool:
        """Drop a load that has not started; return whether there was one."""
        loads = self._queued.pop(rid, None)
        for load in loads or ():
            load.unpin()
        return loads is not None

    # ---------------------------------------------------------------- stores

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Queue the store of a tree node; `pop_completed_offload` returns its result.

        Always True: ranks must agree on which stores are in flight. One that fails here is queued
        without pages.
        """
        del session_id
        events: Sequence[Any] = ()
        try:
            pages = [
                (cache, chunk_keys(transfer.keys or ()), transfer.device_indices)
                for transfer in transfers
                if (cache := self._caches.get(transfer.name)) is not None and transfer.keys
            ]
            if any(cache.pool.device.type != "cpu" for cache, _, _ in pages):
                events = self.record_offload_ready()
        except Exception as error:  # noqa: BLE001  # keys that are no hashes, a lost device
            log.warning("a node cannot be stored: %s", cause(error))
            pages = []
        self._stores.add(NodeStore(pages, events, complete=bool(pages)))
        return True

    def num_completed_offloads(self) -> int:
        """Return how many stores have ended, counted from the oldest up to the first running."""
        return self._stores.num_ended()

    def pop_completed_offload(self) -> bool:
        """Remove the oldest store, which has ended; return whether the whole node is stored."""
        return self._stores.pop()

    # ------------------------------------------------------------- lifecycle

    def reset(self) -> None:
        """Wait until no job reads or writes pages, and drop all requests. Chunks stay stored."""
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        for pins in self._pins.values():
            pins.unpin()
        self._pins.clear()
        self.layer_done_counter.finish_all()
        self._batch_sizes.clear()
        self._stores.discard_all()

    def close(self) -> None:
        """End the sessions with the daemon."""
        try:
            self.reset()
        finally:
            self._stores.close()
            self._close_caches()

    def _close_caches(self) -> None:
        for cache in self._caches.values():
            cache.close()
        self._caches = {}
