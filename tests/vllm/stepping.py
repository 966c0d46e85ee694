"""vLLM's half of the connector in the scheduler, stepped as vLLM's scheduler does it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingWorkerMetadata,
    TransferJob,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.kv_hints import KvHintsEnvelope
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvd_client import Label, LoadTicket, LookupResult, StoreAnswer, StoreTicket, TierInfo
from kvd_client.changes import ChunkLocation, Differences
from kvd_client.vllm import KvdOffloadingManager, KvdOffloadingSpec
from kvd_client.vllm.scheduler import KvdConnectorScheduler
from tests.vllm.configs import BLOCK, configured, full


class Used(NamedTuple):
    """One report of a finished request; see `Scheduler.request_finished`."""

    keys: list[bytes]
    prompt: int
    label: Label


class Lender:
    """A scheduler's session with a daemon that lends as many slots as the test says.

    Attributes:
        loans: how many are at hand; None: none, and no answer yet.
        present: keys that are found.
        offered: keys of each offer.
        changes: what the next `take_changes` returns.
        used, missed: what finished requests have used, and lookups not found, one by one.
        unstored: keys that were given up.
        hints: what was counted of them, request by request.
        prefill_seconds: the latest that was reported.
    """

    def __init__(self, loans: int | None) -> None:
        self.attached = self.connected = True
        self.tiers: tuple[TierInfo, ...] = ()
        self.loans = loans
        self.present: set[bytes] = set()
        self.offered: list[tuple[bytes, ...]] = []
        self.describes = False
        self.changes_behind = False
        self.changes = Differences()
        self.used: list[Used] = []
        self.missed: list[list[bytes]] = []
        self.unstored: list[bytes] = []
        self.hints: list[tuple[int, int, int]] = []
        self.prefill_seconds: float | None = None

    def lookup(self, key: bytes, *blocks: int) -> LookupResult:
        """See Scheduler."""
        del blocks
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

    def prepare_load(self, keys: Sequence[bytes], blocks: object = None) -> LoadTicket:
        """See Scheduler: every key is found."""
        del blocks
        count = len(keys)
        return LoadTicket(tuple(keys), np.zeros(count, "<u4"), np.zeros(count, "<u8"))

    def complete_load(self, ticket: LoadTicket) -> None:
        """See Scheduler."""

    def count_tokens(self, asked: int, found: int) -> None:
        """See Scheduler."""

    def count_hints(self, hints: int, ignored: int, cut: int) -> None:
        """See Scheduler."""
        self.hints.append((hints, ignored, cut))

    def set_prefill_seconds(self, seconds_per_token: float) -> None:
        """See Scheduler."""
        self.prefill_seconds = seconds_per_token

    def request_finished(self, keys: list[bytes], *, prompt: int, label: Label) -> None:
        """See Scheduler."""
        self.used.append(Used(keys, prompt, label))

    def report_missed(self, keys: list[bytes]) -> None:
        """See Scheduler."""
        self.missed.append(keys)

    def give_up(self, keys: list[bytes]) -> None:
        """See Scheduler."""
        self.unstored.extend(keys)

    def end_step(self) -> None:
        """See Scheduler."""

    def description(self, place: ChunkLocation) -> None:
        """See Scheduler: nothing is kept."""
        del place

    @property
    def changes_waiting(self) -> bool:
        """See Scheduler."""
        return bool(self.changes)

    def take_changes(self) -> Differences:
        """See Scheduler."""
        taken, self.changes = self.changes, Differences()
        return taken

    def close(self) -> None:
        """See Scheduler."""

    def reset(self, timeout: float) -> None:
        """See Scheduler."""
        assert timeout == 0
        self.present.clear()


class Stepping:
    """The half, and requests that are scheduled as the test says.

    Args:
        folder: for the model's configuration.
        monkeypatch: of the test.
        scheduler: of the manager.
        windows: groups beside one of full attention.
        extra: of the connector.
        events: whether vLLM publishes KV events.
    """

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        scheduler: Any,
        *windows: KVCacheGroupSpec,
        extra: dict[str, Any] | None = None,
        events: bool = False,
    ) -> None:
        vllm_config, kv_cache_config, config = configured(
            folder, full(["a", "b"]), *windows, extra=extra, events=events
        )
        self.manager = KvdOffloadingManager(scheduler, pending_timeout=1.0, seek_timeout=0.05)
        spec = KvdOffloadingSpec(config, vllm_config, kv_cache_config)
        monkeypatch.setattr(spec, "get_manager", lambda: self.manager)
        self.half = KvdConnectorScheduler(spec, vllm_config, kv_cache_config)
        self._groups = 1 + len(windows)
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.new: list[NewRequestData] = []
        self.next_block = 1
        self.requests: dict[str, Request] = {}
        self.ended: set[str] = set()
        self.jobs: dict[int, TransferJob] = {}

    def add(
        self,
        name: str,
        blocks: int,
        first: int | None = None,
        params: dict[str, Any] | None = None,
        hints: KvHintsEnvelope | None = None,
    ) -> Request:
        """A request of so many blocks, all of its own, is to run with the next step.

        Its blocks are new ones, or those from this number on; `params` and `hints` are its
        `kv_transfer_params` and `kv_hints`.
        """
        start = sum(map(len, self.requests)) * 1000 + len(self.requests)
        request = Request(
            name,
            list(range(start, start + blocks * BLOCK)),
            SamplingParams(max_tokens=100, extra_args={"kv_transfer_params": params}),
            None,
            block_hasher=self.hasher,
            kv_hints=hints,
        )
        self.requests[name] = request
        self.half.on_new_request(request)
        assert self.half.get_num_new_matched_tokens(request, 0) == (0, False)
        begin = self.next_block if first is None else first
        self.next_block = max(self.next_block, begin + self._groups * blocks)
        ids = tuple(
            list(range(begin + group * blocks, begin + (group + 1) * blocks))
            for group in range(self._groups)
        )
        self.new.append(NewRequestData.from_request(request, ids))
        return request

    def admit(self, name: str, computed: int, blocks: Sequence[int] = ()) -> int:
        """Look up a request again as one that waits, and admit it with what is found.

        Args:
            name: of the request.
            computed: tokens that the engine's own cache has.
            blocks: of the request, the null block 0 for none, where something can be loaded.

        Returns:
            Tokens that are loaded.
        """
        request = self.requests[name]
        found, _ = self.half.get_num_new_matched_tokens(request, computed)
        assert found is not None
        cached = [
            SimpleNamespace(
                block_id=block,
                is_null=not block,
                block_hash=b"cached" if number < computed // BLOCK else None,
            )
            for number, block in enumerate(blocks)
        ]
        allocated: Any = SimpleNamespace(blocks=(cached,))
        self.half.update_state_after_alloc(request, allocated, found)
        return found

    def step(self, **tokens: int) -> dict[int, TransferJob]:
        """Schedule so many tokens of these requests; the stores that begin with it."""
        output = SchedulerOutput(
            scheduled_new_reqs=self.new,
            scheduled_cached_reqs=CachedRequestData.make_empty(),
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
        self.jobs |= stores
        return stores

    def finish(self, name: str) -> None:
        """The request has its answer."""
        request = self.requests[name]
        request.status = RequestStatus.FINISHED_STOPPED
        self.half.request_finished(request)
        self.ended.add(name)

    def report(self, jobs: Collection[int] | Mapping[int, object]) -> None:
        """All ranks have reported these jobs."""
        report = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(jobs, 1))
        self.half.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
