"""vLLM's connectors that also write down when a request passes through their calls.

They are loaded by name into the processes of an engine, in place of `OffloadingConnector` and
`KvdConnector`, and change nothing else. Each moment is a line of the file that KVD_BENCH_MOMENTS
names: what it is, and nanoseconds of the clock of `time.perf_counter`, which all processes of a
machine share. `moments.py` reads them.
"""

import os
import time
from typing import Any

from moments import MOMENTS_FILE
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvd_client.vllm import KvdConnector


class StampedOffloading(OffloadingConnector):  # type: ignore[misc]  # types are checked without vLLM
    """vLLM's offloading connector; each process of the engine has one."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._file = os.open(os.environ[MOMENTS_FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._bound = self._polls = 0

    # ------------------------------------------------------------- scheduler

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """The scheduler looks the prompt up."""
        self._note("asked")
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Chunks to load are prepared."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self._note("prepared")

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """A step's end in the scheduler."""
        meta = super().build_connector_meta(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            self._note("scheduled", len(scheduler_output.scheduled_new_reqs))
        return meta

    def update_connector_output(self, connector_output: Any) -> None:
        """The scheduler gets to know what ended."""
        if connector_output.finished_recving:
            self._note("told")
        super().update_connector_output(connector_output)

    # ---------------------------------------------------------------- worker

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """A step's beginning in the worker."""
        super().bind_connector_metadata(connector_metadata)
        self._bound = time.perf_counter_ns()

    def start_load_kv(self, forward_context: Any, **keywords: Any) -> None:
        """Behind the model's computing of the step, if there is any."""
        if forward_context.attn_metadata is not None:
            self._note("begun", at=self._bound)
            self._note("computed")
        super().start_load_kv(forward_context, **keywords)
        if self._connector_metadata.load_jobs:
            self._note("received", at=self._bound)
            self._note("submitted")
            self._polls = 0

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """The worker looks for jobs that ended."""
        results = super().get_transfer_results(finished_req_ids)
        self._polls += 1
        if results.finished_recving:
            self._note("seen", self._polls)
        return results

    def _note(self, what: str, number: int = 0, at: int = 0) -> None:
        os.write(self._file, f"{what} {at or time.perf_counter_ns()} {number}\n".encode())


class StampedKvd(StampedOffloading, KvdConnector):
    """kvd's connector, with the same moments."""


class StampedSideBySide(StampedKvd):
    """kvd's connector, whose requests do not wait for each other's loads."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        if self.connector_scheduler is not None:
            # vLLM has no setting for it; it does so without a prefix cache of the engine's own.
            self.connector_scheduler._chunks_being_loaded = None  # noqa: SLF001
