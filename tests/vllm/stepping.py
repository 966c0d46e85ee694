"""vLLM's half of the connector in the scheduler, stepped as vLLM's scheduler does it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.kv_hints import KvHintsEnvelope
from vllm.v1.kv_offload.base import OffloadKey, make_offload_key
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvd_client import (
    NO_TIER,
    TIER_UNKNOWN,
    Label,
    LoadTicket,
    LookupResult,
    StoreAnswer,
    StoreTicket,
    TierHealth,
    TierInfo,
)
from kvd_client.changes import ChunkLocation, Differences
from kvd_client.vllm import KvdOffloadingManager, KvdOffloadingSpec
from kvd_client.vllm.scheduler import KvdConnectorScheduler, KvdWorkerMetadata
from kvd_proto.descriptions import Description
from tests.vllm.configs import BLOCK, configured, full

CHUNK_BYTES = 1000
WAITS: tuple[None, bool] = (None, False)


def hits(blocks: int) -> tuple[int, bool]:
    """What vLLM is told if so many blocks can be loaded."""
    return blocks * BLOCK, blocks > 0


class Used(NamedTuple):
    """One report of a finished request; see `Scheduler.request_finished`."""

    keys: list[bytes]
    prompt: int
    label: Label


class Lender:
    """A scheduler's session with a daemon whose slots, chunks and tiers the test sets.

    Attributes:
        loans: slots that are at hand; None: none, and no answer yet.
        present, pending: keys that are found, and keys that are being written.
        evicted: keys that are found, and gone when they are to be loaded.
        in_tiers: keys of chunks in tiers, and in which.
        health: of each tier.
        changes: what the next `take_changes` returns.
        descriptions: of chunks, by slot.
        offered: keys of each offer.
        failed: keys of stores that failed.
        requested: keys of each request for promotion, each key once.
        used, missed: what finished requests have used, and lookups not found, one by one.
        unstored: keys that were given up.
        unpinned: tickets of loads that have ended.
        hints: what was counted of them, request by request.
        prefill_seconds: the latest that was reported.
    """

    bytes_per_chunk = CHUNK_BYTES

    def __init__(self, loans: int | None, *tiers: TierInfo) -> None:
        self.attached = self.connected = True
        self.loans, self.tiers = loans, tiers
        self.present: set[bytes] = set()
        self.pending: set[bytes] = set()
        self.evicted: set[bytes] = set()
        self.in_tiers: dict[bytes, int] = {}
        self.health = [TierHealth(True, 0, 10**9, 0)] * len(tiers)
        self.describes = self.changes_behind = False
        self.changes = Differences()
        self.descriptions: tuple[Description, ...] = ()
        self.offered: list[tuple[bytes, ...]] = []
        self.failed: list[bytes] = []
        self.requested: list[list[bytes]] = []
        self.used: list[Used] = []
        self.missed: list[list[bytes]] = []
        self.unstored: list[bytes] = []
        self.unpinned: list[LoadTicket] = []
        self.hints: list[tuple[int, ...]] = []
        self.prefill_seconds: float | None = None
        self.report_missed, self.give_up = self.missed.append, self.unstored.extend
        self.complete_load = self.unpinned.append

    def lookup(self, key: bytes, *blocks: int) -> LookupResult:
        """See Scheduler."""
        del blocks
        if key in self.pending:
            return LookupResult.HIT_PENDING
        return LookupResult.HIT if key in self.present else LookupResult.MISS

    def prepare_store(
        self,
        keys: Sequence[bytes],
        blocks: object = None,
        descriptions: Callable[[int], bytes] | None = None,
    ) -> StoreTicket:
        """See Scheduler: the first keys get what there is, and are stored at once."""
        del blocks, descriptions
        self.offered.append(tuple(keys))
        answers, accepted = [], []
        for key in keys:
            if key in self.present:
                answers.append(StoreAnswer.PRESENT)
            elif self.loans:
                self.loans -= 1
                answers.append(StoreAnswer.ACCEPTED)
                accepted.append(key)
                self.present.add(key)
            else:
                answers.append(StoreAnswer.FULL)
        count = len(accepted)
        return StoreTicket(
            tuple(accepted), np.zeros(count, "<u4"), np.zeros(count, "<u8"), tuple(answers)
        )

    def complete_store(self, keys: list[bytes], *, success: bool) -> None:
        """See Scheduler: of failed ones alone."""
        assert not success
        self.failed.extend(keys)
        self.present.difference_update(keys)

    def prepare_load(self, keys: Sequence[bytes], blocks: object = None) -> LoadTicket:
        """See Scheduler."""
        del blocks
        loaded = tuple(key for key in keys if key not in self.evicted)
        return LoadTicket(loaded, np.zeros(len(loaded), "<u4"), np.zeros(len(loaded), "<u8"))

    def find_tier(self, key: bytes, *blocks: int) -> int:
        """See Scheduler."""
        del blocks
        shared = any(
            tier.shared and health.usable
            for tier, health in zip(self.tiers, self.health, strict=True)
        )
        number = self.in_tiers.get(key, TIER_UNKNOWN if shared else NO_TIER)
        return number if number < 0 or self.health[number].usable else NO_TIER

    def tier_status(self, number: int) -> TierHealth:
        """See Scheduler."""
        return self.health[number]

    def request_promotion(self, keys: Sequence[bytes]) -> int:
        """See Scheduler."""
        known = {key for step in self.requested for key in step}
        new = [key for key in keys if key not in known]
        if new:
            self.requested.append(new)
        return len(new)

    def count_hints(self, *counts: int) -> None:
        """See Scheduler."""
        self.hints.append(counts)

    def set_prefill_seconds(self, seconds_per_token: float) -> None:
        """See Scheduler."""
        self.prefill_seconds = seconds_per_token

    def request_finished(self, keys: list[bytes], *, prompt: int, label: Label) -> None:
        """See Scheduler."""
        self.used.append(Used(keys, prompt, label))

    def description(self, place: ChunkLocation) -> Description | None:
        """See Scheduler."""
        return dict(enumerate(self.descriptions)).get(place.slot)

    @property
    def changes_waiting(self) -> bool:
        """See Scheduler."""
        return bool(self.changes)

    def take_changes(self) -> Differences:
        """See Scheduler."""
        taken, self.changes = self.changes, Differences()
        return taken

    def reset(self, timeout: float) -> None:
        """See Scheduler."""
        assert timeout == 0
        self.present.clear()

    def ignore(self, *_: object) -> None:
        """See Scheduler."""

    count_tokens = end_step = close = ignore


class Stepping:
    """The half, and requests that are scheduled as the test says.

    Attributes:
        lender: the session with the daemon.
        now: what time.monotonic says.
        jobs: stores and loads that were begun.
        vllm_scheduler: what the half knows of vLLM's own scheduler.
    """

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        lender: Lender,
        *windows: KVCacheGroupSpec,
        extra: dict[str, Any] | None = None,
        events: bool = False,
    ) -> None:
        vllm_config, kv_cache_config, config = configured(
            folder, full(["a", "b"]), *windows, extra=extra, events=events
        )
        vllm_config.scheduler_config.async_scheduling = False
        self.vllm_scheduler: Any = SimpleNamespace(
            requests={},
            running=[],
            prev_step_scheduled_req_ids=set(),
            _preempt_request=self.preempt,
        )
        monkeypatch.setattr("kvd_client.vllm.spec.Scheduler", lambda *_, **__: lender)
        self.now = 100.0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        for module in ("manager", "promotions"):
            monkeypatch.setattr(f"kvd_client.vllm.{module}.time", clock)
        spec = KvdOffloadingSpec(config, vllm_config, kv_cache_config)
        monkeypatch.setattr(
            "kvd_client.vllm.scheduler.calling_scheduler", lambda: self.vllm_scheduler
        )
        self.half = KvdConnectorScheduler(spec, vllm_config, kv_cache_config)
        self.manager: KvdOffloadingManager = self.half.manager
        self.lender = lender
        self._groups = 1 + len(windows)
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.new: list[NewRequestData] = []
        self.next_block = 1
        self.requests: dict[str, Request] = {}
        self.ended: set[str] = set()
        self.jobs: dict[int, TransferJob] = {}

    def come(
        self,
        name: str,
        blocks: int,
        params: dict[str, Any] | None = None,
        hints: KvHintsEnvelope | None = None,
        begins_as: tuple[str, int] = ("", 0),
    ) -> Request:
        """A request of so many blocks has come, with these `kv_transfer_params` and `kv_hints`.

        `begins_as` is another request, and how many of its blocks this one begins with.
        """
        start = sum(map(len, self.requests)) * 1000 + len(self.requests)
        other, common = begins_as
        tokens = list(self.requests[other].all_token_ids[: common * BLOCK]) if other else []
        tokens += range(start, start + (blocks - common) * BLOCK)
        request = self.requests[name] = Request(
            name,
            tokens,
            SamplingParams(max_tokens=100, extra_args={"kv_transfer_params": params}),
            None,
            block_hasher=self.hasher,
            kv_hints=hints,
        )
        self.half.on_new_request(request)
        return request

    def add(self, name: str, blocks: int, first: int | None = None, **fields: Any) -> None:
        """A request has come, and is to run with the next step; nothing of it is found.

        Its blocks are new ones, or those from `first` on.
        """
        request = self.come(name, blocks, **fields)
        assert self.ask(name) == hits(0)
        begin = self.next_block if first is None else first
        self.next_block = max(self.next_block, begin + self._groups * blocks)
        ids = tuple(
            list(range(begin + group * blocks, begin + (group + 1) * blocks))
            for group in range(self._groups)
        )
        self.new.append(NewRequestData.from_request(request, ids))

    def keys(self, name: str, group: int = 0) -> list[OffloadKey]:
        """The keys of a request's chunks, where a chunk is a block."""
        return [make_offload_key(value, group) for value in self.requests[name].block_hashes]

    def ask(self, name: str, computed: int = 0) -> tuple[int | None, bool]:
        """What vLLM is told that the request can load beyond what the engine's own cache has."""
        answer: tuple[int | None, bool] = self.half.get_num_new_matched_tokens(
            self.requests[name], computed
        )
        return answer

    def admit(self, name: str, computed: int = 0, *blocks: Sequence[int]) -> int:
        """Look up a request again as one that waits, and admit it; the tokens that it loads.

        Args:
            name: of the request.
            computed: tokens that the engine's own cache has.
            blocks: of the request, the null block 0 for none, where something can be loaded; by
                group.
        """
        matched, _ = self.ask(name, computed)
        assert matched is not None
        cached = tuple(
            [
                SimpleNamespace(
                    block_id=block,
                    is_null=not block,
                    block_hash=b"cached" if number < computed // BLOCK else None,
                )
                for number, block in enumerate(group)
            ]
            for group in blocks
        )
        allocated: Any = SimpleNamespace(blocks=cached)
        self.half.update_state_after_alloc(self.requests[name], allocated, matched)
        return matched

    def preempt(self, request: Request, timestamp: float) -> None:
        """The half lets the request start over."""
        del timestamp
        request.status = RequestStatus.PREEMPTED

    def step(self, **tokens: int) -> dict[int, TransferJob]:
        """Schedule so many tokens of these requests; the stores that begin with it."""
        cached = CachedRequestData.make_empty()
        cached.req_ids = [*tokens.keys() - {new.req_id for new in self.new}]
        cached.new_block_ids = [None] * len(cached.req_ids)
        for name in cached.req_ids:
            request = self.requests[name]
            answered = request.num_computed_tokens >= request.num_prompt_tokens
            cached.num_output_tokens.append(int(answered))
        output = SchedulerOutput(
            scheduled_new_reqs=self.new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=[],
            finished_req_ids=self.ended,
            free_encoder_mm_hashes=[],
        )
        self.new, self.ended = [], set()
        meta = self.half.build_connector_meta(output)
        self.flushed = meta.jobs_to_flush
        for name, count in tokens.items():
            self.requests[name].num_computed_tokens += count
        stores: dict[int, TransferJob] = meta.store_jobs
        self.jobs |= stores | meta.load_jobs
        return stores

    def finish(self, name: str) -> None:
        """The request has its answer."""
        request = self.requests[name]
        request.status = RequestStatus.FINISHED_STOPPED
        self.half.request_finished(request)
        self.ended.add(name)

    def run(self, name: str, tokens: int) -> None:
        """Compute so many tokens of the request in one step, with which it ends."""
        jobs = self.step(**{name: tokens})
        self.finish(name)
        self.step()
        self.report(jobs)

    def report(
        self,
        jobs: Collection[int] | Mapping[int, object],
        *,
        failed: bool = False,
        failed_loads: Collection[str] = (),
    ) -> None:
        """All ranks have reported these jobs, and requests whose loads failed."""
        report = KvdWorkerMetadata(
            completed_jobs=dict.fromkeys(jobs, 1), failed_jobs=set(jobs) if failed else set()
        )
        self.half.update_connector_output(
            KVConnectorOutput(kv_connector_worker_meta=report, failed_recving=set(failed_loads))
        )

    def statistics(self) -> dict[str, float]:
        """The manager's statistics since the last time, by name and labels."""
        stats = self.manager.get_stats()
        figures: dict[str, float] = {} if stats is None else stats.reduce()
        return figures
