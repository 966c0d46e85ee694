"""SGLang's interface to an external cache, on kvd's scheduler and worker.

SGLang's methods are called by the scheduler's thread of each rank. Nothing raises after the
start, whatever happens to the daemon or the CUDA driver. Nothing waits for the daemon but a
request for its load.
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
from kvd_client.sglang.pages import Piece, chunk_keys, covered, cut, prefix, windows
from kvd_client.sglang.pool_cache import PoolCache, read_options
from kvd_client.sglang.pools import Pools, find_pools, fingerprint
from kvd_client.sglang.transfers import Batch, LayerCounter, Offload, Offloads, Wanted
from kvd_proto.messages import MAX_KEYS

MAX_COUNTED = 4096

log = get_logger("kvd_client.sglang")


@dataclass(slots=True)
class _Pin:
    """What a lookup has found for a request, pinned.

    until: when the pins end by themselves, by time.monotonic.
    """

    tickets: list[tuple[PoolCache, LoadTicket]]
    until: float

    def drop(self) -> None:
        for cache, ticket in self.tickets:
            cache.unpin(ticket)


class KvdLinker(UnifiedCacheLinker):
    """kvd as the external cache of one rank.

    Args:
        server_args: SGLang's.
        params: SGLang's `CacheInitParams`.
        components: of its tree.
        extra_config: `linker_extra_config`; see `Options`.
        forward_stream: on which pages are written; None where the current stream is the only one.

    Raises:
        OptionsError: invalid settings.
        KvdClientError: with `required`, where the daemon is absent or cannot serve this memory.
        Exception: with `required`, what torch or the driver raised. Without `required` nothing is
            raised.
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
        self._ranks = Ranks(params)
        self._pins: dict[str, _Pin] = {}  # the oldest first
        self._counted: dict[str, None] = {}  # requests whose tokens are counted, the oldest first
        self._queued: dict[str, list[Wanted]] = {}
        self._loading: dict[int, int] = {}  # by batch: how many requests
        self._offloads = Offloads()
        try:
            found = find_pools(params, components)
            self._open(server_args, params, found)
        except Exception as error:
            self._close_caches()
            if self.options.required:
                raise
            log_no_offload(log, error)
            return
        self.pools = dict(found.entries)
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)

    def _open(self, server_args: Any, params: Any, found: Pools) -> None:
        kv_cache = params.token_to_kv_pool_allocator.get_kvcache()
        kind = f"{type(kv_cache).__name__} {getattr(kv_cache, 'kv_cache_layout', '')}".strip()
        ranks = self._ranks
        whose = "every rank" if found.replicated else f"rank {ranks.rank}"
        place = (
            f"tp {server_args.tp_size}, {whose} of {ranks.size},"
            f" cp rank {params.attn_cp_rank} of {params.attn_cp_size}"
        )
        engine = f"sglang-{server_args.port}-{uuid.uuid4().hex[:8]}-tp{ranks.rank}"
        for name, pool in found.by_name.items():
            per_chunk = 1 if name == PoolName.MAMBA else self.options.chunk_tokens
            factor = max(1, per_chunk // pool.page_tokens)
            print_ = fingerprint(server_args, pool, kind, place, self.options.label)
            self._caches[name] = PoolCache(pool, factor, engine, print_, self.options)
        attached = all(cache.worker.registered for cache in self._caches.values())
        log.info(
            "kvd at %s: %s; pools %s",
            self.options.runtime_dir,
            "registered" if attached else "no daemon serves this engine yet",
            ", ".join(f"{c.pool.name} of {c.pool.num_pages} pages" for c in self._caches.values()),
        )

    # --------------------------------------------------------------- lookups

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Return the prefix lengths, in pages, that can be loaded; pins the longest for `rid`."""
        self._forget_old()
        pin = self._pins.pop(rid, None)
        try:
            lengths = self._find(rid, transfers)
            if rid not in self._counted:  # a request that waits is looked up in each step
                self._report(rid, transfers, lengths[-1] if lengths else 0)
        except Exception:  # a lookup that fails is a miss
            log.exception("the pages of request %s could not be looked up", rid)
            lengths = []
        if pin is not None:
            pin.drop()  # after the new one is made
        return lengths

    def _find(self, rid: str, transfers: Sequence[PoolTransfer]) -> list[int]:
        by_name = {transfer.name: transfer for transfer in transfers}
        kv = by_name.pop(PoolName.KV, None)
        if kv is None or not kv.keys or PoolName.KV not in self._caches:
            return []
        if not by_name.keys() <= self._caches.keys():
            return []
        keys, cache = chunk_keys(kv.keys), self._caches[PoolName.KV]
        pieces = prefix(keys, cache.factor, cache.held)
        reach = sum(piece.pages for piece in pieces)
        lengths = set(range(1, reach + 1))
        sizes = {name: len(transfer.keys or ()) for name, transfer in by_name.items()}
        for name, size in sizes.items():
            other = self._caches[name]
            lengths &= windows(covered(keys[:reach], other.factor, other.held), size)
        if not lengths:
            return []
        longest = max(lengths)
        wanted = [(cache, keys[:longest])]
        wanted += [(self._caches[n], keys[max(0, longest - s) : longest]) for n, s in sizes.items()]
        tickets = self._pin([(c, prefix(some, c.factor, c.held)) for c, some in wanted])
        if tickets is None:
            return []
        self._pins[rid] = _Pin(tickets, time.monotonic() + self.options.lease)
        return sorted(lengths)

    def _pin(
        self, wanted: Sequence[tuple[PoolCache, Sequence[Piece]]]
    ) -> list[tuple[PoolCache, LoadTicket]] | None:
        """Pin all of it; None where some is not there any more."""
        tickets: list[tuple[PoolCache, LoadTicket]] = []
        for cache, pieces in wanted:
            ticket = cache.pin(pieces)
            if ticket is None:
                for other, pinned in tickets:
                    other.unpin(pinned)
                return None
            tickets.append((cache, ticket))
        return tickets

    def _report(self, rid: str, transfers: Sequence[PoolTransfer], found: int) -> None:
        """Report a request's first lookup: its tokens, what it missed, and its chunks as used.

        SGLang does not tell a linker when a request ends, nor of its pages before the first that
        its own cache lacks.

        Args:
            rid: of the request.
            transfers: as for `lookup`.
            found: the longest prefix that can be loaded, in pages.
        """
        self._counted[rid] = None
        if len(self._counted) > MAX_COUNTED:
            del self._counted[next(iter(self._counted))]
        kv = next((transfer for transfer in transfers if transfer.name == PoolName.KV), None)
        cache = self._caches.get(PoolName.KV)
        if cache is None or kv is None or not kv.keys:
            return
        page = cache.pool.page_tokens
        cache.scheduler.count_tokens(len(kv.keys) * page, found * page)
        rest = cut(chunk_keys(kv.keys[found:]), cache.factor)
        missed = [piece.key for piece in rest if piece.pages == cache.factor]
        cache.scheduler.report_missed(missed[:MAX_KEYS])
        pin = self._pins.get(rid)
        pinned = {} if pin is None else {pool: ticket.keys for pool, ticket in pin.tickets}
        for pool in self._caches.values():
            keys = [*pinned.get(pool, ()), *(missed if pool is cache else ())]
            pool.scheduler.request_finished(keys[:MAX_KEYS])

    def _forget_old(self) -> None:
        """Drop pins that have ended by themselves: SGLang does not tell of every abort."""
        now = time.monotonic()
        while self._pins and next(iter(self._pins.values())).until <= now:
            self._pins.pop(next(iter(self._pins))).drop()

    # ----------------------------------------------------------------- loads

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Load what is pinned, or queue it with `layerwise`: whether all ranks have done so.

        Where one cannot, the prompt is computed.
        """
        pin = self._pins.pop(rid, None)
        wanted: list[Wanted] = []
        try:
            self._want(transfers, wanted)
            done = bool(wanted) and (self.options.layerwise or self._load_now(wanted))
        except Exception:  # it is computed, on all ranks
            log.exception("the load of request %s could not be prepared", rid)
            self._drop(wanted)
            done = False
        if pin is not None:
            pin.drop()
        if not self._ranks.all(done):
            self._drop(wanted)
            return False
        if self.options.layerwise:
            self._queued[rid] = wanted
        return True

    def _load_now(self, wanted: list[Wanted]) -> bool:
        """Return when nothing is written any more: whether all of it is in."""
        batch = Batch(wanted, self.forward_stream, self.options.load_timeout, again=False)
        wanted.clear()  # the batch drops them
        done = batch.finish()
        if not done:
            log.warning("the request of this load is computed instead")
        return done

    @staticmethod
    def _drop(wanted: list[Wanted]) -> None:
        for each in wanted:
            each.drop()
        wanted.clear()

    def _want(self, transfers: Sequence[PoolTransfer], wanted: list[Wanted]) -> None:
        """Pin all that is to be loaded; nothing where some is not there."""
        for transfer in transfers:
            cache = self._caches.get(transfer.name)
            keys = chunk_keys(transfer.keys or ())
            pieces = [] if cache is None else prefix(keys, cache.factor, cache.held)
            if cache is None or not keys or sum(p.pages for p in pieces) < len(keys):
                self._drop(wanted)
                return
            rows = cache.rows(pieces, transfer.device_indices)  # before the pin: it may refuse
            ticket = cache.pin(pieces)
            if ticket is None:
                self._drop(wanted)
                return
            wanted.append(Wanted(cache, pieces, rows, ticket))

    def start_layer_wise_loading(self) -> int:
        """Begin the queued loads as one batch; return its number, -1 where nothing is queued."""
        queued, self._queued = self._queued, {}
        if not queued:
            return -1
        wanted = [each for several in queued.values() for each in several]
        batch = Batch(wanted, self.forward_stream, self.options.load_timeout)
        self._loading[index := self.layer_done_counter.add(batch)] = len(queued)
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Return when a batch does not write any more: whether all of it is in."""
        requests = self._loading.pop(counter_index, 0)
        done = self.layer_done_counter.finish(counter_index)
        if not done:
            log.error("SGLang aborts the %d requests of this load", requests)
            self._caches[PoolName.KV].scheduler.count_aborted(requests)
        return done

    def cancel_queued_load(self, rid: str) -> bool:
        """Drop a load that has not started: whether there was one."""
        wanted = self._queued.pop(rid, None)
        for each in wanted or ():
            each.drop()
        return wanted is not None

    # -------------------------------------------------------------- offloads

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        """Store a node's pages once they are written; `pop_completed_offload` says how it went.

        What cannot be stored is accepted as well, for ranks must agree on what is under way.
        """
        del session_id
        events: Sequence[Any] = ()
        try:
            parts = [
                (cache, chunk_keys(transfer.keys or ()), transfer.device_indices)
                for transfer in transfers
                if (cache := self._caches.get(transfer.name)) is not None and transfer.keys
            ]
            if any(cache.pool.device.type != "cpu" for cache, _, _ in parts):
                events = self.record_offload_ready()
        except Exception as error:  # noqa: BLE001  # keys that are no hashes, a lost device
            log.warning("a node cannot be stored: %s", cause(error))
            parts = []
        self._offloads.add(Offload(parts, events, whole=bool(parts)))
        return True

    def num_completed_offloads(self) -> int:
        """How many stores have ended, from the oldest on."""
        return self._offloads.completed()

    def pop_completed_offload(self) -> bool:
        """Take the oldest one: whether all of it is stored."""
        return self._offloads.pop()

    # ------------------------------------------------------------- lifecycle

    def reset(self) -> None:
        """Return when nothing reads or writes pages any more; what is stored stays."""
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        for pin in self._pins.values():
            pin.drop()
        self._pins.clear()
        self.layer_done_counter.finish_all()
        self._loading.clear()
        self._offloads.quiesce()

    def close(self) -> None:
        """End the sessions with the daemon."""
        try:
            self.reset()
        finally:
            self._offloads.close()
            self._close_caches()

    def _close_caches(self) -> None:
        for cache in self._caches.values():
            cache.close()
        self._caches = {}

    def __repr__(self) -> str:
        return f"<KvdLinker {self._ranks!r}, pools {', '.join(self._caches) or 'none'}>"


# TODO ranks.py
# """What the ranks of one engine must decide alike."""


class Ranks:
    """The processes that serve the same requests in step.

    Args:
        params: SGLang's `CacheInitParams`, with the groups that its tree agrees in.
    """

    def __init__(self, params: Any) -> None:
        groups = [params.attn_cp_cache_group, params.attn_tp_cache_group]
        self._groups = [g for g in groups if g is not None and dist.get_world_size(group=g) > 1]
        whole = params.tp_cache_group
        if not self._groups and whole is not None and dist.get_world_size(group=whole) > 1:
            self._groups = [whole]
        tensor = params.attn_tp_cache_group or whole
        self.rank = 0 if tensor is None else dist.get_rank(group=tensor)
        self.size = 1 if tensor is None else dist.get_world_size(group=tensor)

    def all(self, yes: bool) -> bool:
        """Whether all ranks say yes; each must ask as often, in the same order."""
        if not self._groups:
            return yes
        word = torch.tensor([int(yes)], dtype=torch.int)
        for group in self._groups:
            dist.all_reduce(word, op=dist.ReduceOp.MIN, group=group)
        return bool(word.item())

    def __repr__(self) -> str:
        return f"<Ranks {self.rank} of {self.size}>"
