"""A rank's side of vLLM's offloading interface, on a kvd `Worker`.

`get_finished` reports every submitted job once, as a success or a failure. After the start nothing
raises, whatever happens to the daemon or the CUDA driver.
"""

import logging
import time
from collections.abc import Callable

from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvd_client import JobBlocks, JobResult, JobStatus, KvdClientError, Load, Store, Worker
from kvd_client.errors import cause, get_logger, log_no_offload
from kvd_client.routes import STAGING
from kvd_client.torch_memory import work_so_far
from kvd_client.vllm.manager import ChunkLoadStoreSpec
from kvd_client.vllm.options import VllmOptions

RELEASE_SECONDS = 10.0  # that going to sleep waits for running copies
NOT_REGISTERED = "this rank's KV cache is not registered with kvd; an earlier log line says why"

log = get_logger("kvd_client.vllm")


class KvdOffloadingWorker(OffloadingWorker):
    """Runs the jobs of one rank.

    Args:
        worker: the registered worker; None: this rank's memory cannot be served, all jobs fail.
        group_ids: vLLM's number of each group, in the layout's order.
        blocks_per_chunk: of the layout.
        options: timeouts.
        register: registers the present memory of the KV cache.
    """

    def __init__(
        self,
        worker: Worker | None,
        group_ids: tuple[int, ...],
        blocks_per_chunk: int,
        options: VllmOptions,
        register: Callable[[Worker], None],
    ) -> None:
        self.worker = worker
        self._group_ids = group_ids
        self._blocks_per_chunk = blocks_per_chunk
        self._options = options
        self._register = register
        self.before_release: Callable[[], None] = lambda: None  # called before vLLM frees memory
        self._load_deadlines: dict[int, float] = {}  # by job; infinite once cancelled
        self._results: list[TransferResult] = []  # that `get_finished` returns next
        self._expedited: set[int] = set()  # loads that the step is yet to wait for
        self._late_loads: set[int] = set()
        self._logged: set[str] = set()  # lines about failures

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Submit a store. Always True: `get_finished` reports failures."""
        assert isinstance(dst_spec, ChunkLoadStoreSpec)  # noqa: S101  # this spec's manager made it
        problem = self._why_incomplete(src_spec, dst_spec)
        if problem:
            self._fail(job_id, problem)
        elif self.worker is None:
            self._fail(job_id, NOT_REGISTERED)
        else:
            self._submit(self.worker, Store, job_id, src_spec, dst_spec)
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Submit a load, if it is expedited before all others, for `wait`.

        Always True: `get_finished` reports failures.
        """
        assert isinstance(src_spec, ChunkLoadStoreSpec)  # noqa: S101  # this spec's manager made it
        if src_spec.missing:
            self._fail(job_id, f"{src_spec.missing} chunks are not in the cache any more")
        elif self.worker is None:
            self._fail(job_id, NOT_REGISTERED)
        else:
            self._load_deadlines[job_id] = time.monotonic() + self._options.load_timeout
            self._submit(self.worker, Load, job_id, dst_spec, src_spec, expedited=expedited)
        if expedited:
            self._expedited.add(job_id)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the results of ended jobs; cancel loads that take longer than `load_timeout`.

        A cancelled load ends, and is reported, only when nothing writes to its blocks any more.
        """
        self._collect_results()
        results, self._results = self._results, []
        if self.worker is None:
            return results
        if self._load_deadlines:
            now = time.monotonic()
            overdue = [job for job, end in self._load_deadlines.items() if now >= end]
            if overdue:
                log.warning(
                    "%d loads took longer than load_timeout=%g s and are stopped",
                    len(overdue),
                    self._options.load_timeout,
                )
                self._load_deadlines.update(dict.fromkeys(overdue, float("inf")))
                self.worker.cancel(overdue)
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Wait for expedited loads, or until the blocks of stores may be overwritten.

        For loads up to `sync_load_timeout`: `take_late_loads` has those that are not loaded then.
        For stores up to `preemption_timeout`. Other loads are not waited for: their blocks are kept
        until they are reported.
        """
        expedited, self._expedited = self._expedited & job_ids, self._expedited - job_ids
        if expedited:
            self._wait_for_loads(expedited)
        stores = job_ids - expedited - self._load_deadlines.keys()
        if self.worker is not None and stores:
            self.worker.wait(stores, self._options.preemption_timeout)

    def take_late_loads(self) -> set[int]:
        """Return the loads that were not loaded at the end of `wait`, failed or late."""
        late_loads, self._late_loads = self._late_loads, set()
        return late_loads

    def _wait_for_loads(self, job_ids: set[int]) -> None:
        running = job_ids & self._load_deadlines.keys()
        if self.worker is not None and running:
            timeout = self._options.sync_load_timeout
            if unfinished := self.worker.wait(running, timeout):
                self._log_once(
                    f"{len(unfinished)} loads took longer than sync_load_timeout={timeout:g} s and"
                    " are stopped"
                )
                self._load_deadlines.update(dict.fromkeys(unfinished, float("inf")))
                self.worker.cancel(unfinished)
        self._collect_results()
        loaded = {result.job_id for result in self._results if result.success}
        self._late_loads |= job_ids - loaded

    def _collect_results(self) -> None:
        if self.worker is not None:
            self._results += self._convert(self.worker.get_finished())

    def release_memory(self) -> None:
        """Let nothing use the KV cache any more, before vLLM frees it. Never raises."""
        self.before_release()
        if self.worker is None:
            return
        is_staging = self.worker.transfer == STAGING
        try:
            if is_staging:
                released = self.worker.suspend(RELEASE_SECONDS)
            else:
                released = self.worker.unregister(RELEASE_SECONDS)
        except KvdClientError as error:  # it was shut down
            log.debug("nothing to release: %s", error)
            return
        except Exception:  # the engine goes to sleep all the same
            log.exception(
                "the daemon could not be told that the KV cache is to be freed; its memory is free"
                " once the daemon has ended this session"
            )
            return
        if not released and is_staging:
            log.error("a copy of the KV cache has not ended, and vLLM frees its memory")
        elif not released:
            log.warning(
                "the daemon did not let go of the KV cache in time; its memory is free once the"
                " daemon has ended this session"
            )

    def restore_memory(self) -> None:
        """Serve the KV cache again, after vLLM has allocated it. Never raises."""
        if self.worker is None:
            return
        try:
            if self.worker.transfer == STAGING:
                self.worker.resume()
            elif self.worker.device is None:
                self._register(self.worker)
        except Exception as error:  # noqa: BLE001  # the engine wakes up all the same
            log_no_offload(log, error)

    def shutdown(self) -> None:
        """Unregister the memory and end the session. May be called again."""
        worker, self.worker = self.worker, None  # from now on there is nothing to release
        if worker is not None:
            worker.close()

    def _submit(
        self,
        worker: Worker,
        kind: type[Store] | type[Load],
        job_id: int,
        blocks: GPULoadStoreSpec,
        chunks: ChunkLoadStoreSpec,
        *,
        expedited: bool = False,
    ) -> None:
        arrays = blocks.block_ids, blocks.group_sizes, blocks.block_indices
        try:
            job = JobBlocks.of(*arrays, chunks.slots, chunks.generations)
            worker.submit(kind, job_id, job, after=work_so_far(worker), expedited=expedited)
        except Exception as error:  # noqa: BLE001  # also from torch or the driver: a miss
            self._log_once(f"a {kind.__name__.lower()} failed and is a cache miss: {cause(error)}")
            self._fail(job_id, str(error))

    def _why_incomplete(self, blocks: GPULoadStoreSpec, chunks: ChunkLoadStoreSpec) -> str:
        """Return an error text if a store does not list its chunks' blocks up to their ends.

        vLLM leaves out blocks that a sliding window has passed. That is valid at the front of the
        first chunk. Anywhere else the following blocks would be stored in wrong places.
        """
        for group_id, size, index in zip(
            self._group_ids, blocks.group_sizes, blocks.block_indices, strict=True
        ):
            num_chunks = chunks.chunks.get(group_id, 0)
            num_listed = size + index % self._blocks_per_chunk if size else 0
            if num_listed != num_chunks * self._blocks_per_chunk:
                return (
                    f"group {group_id} lists {size} blocks from {index} on for"
                    f" {num_chunks} chunks of {self._blocks_per_chunk}"
                )
        return ""

    def _fail(self, job_id: int, reason: str) -> None:
        log.debug("job %d failed: %s", job_id, reason)
        self._load_deadlines.pop(job_id, None)
        self._results.append(TransferResult(job_id, success=False))

    def _convert(self, results: list[JobResult]) -> list[TransferResult]:
        """Convert results to vLLM's; log each reason of a failure once until a job succeeds.

        A store whose slots the engine has no more is normal, after a reset for instance.
        """
        if any(result.success for result in results):
            self._logged.clear()
        for result in results:
            kind = "store" if self._load_deadlines.pop(result.job_id, None) is None else "load"
            line = f"a {kind} failed and is a cache miss: {result.text}"
            if not result.success:
                stale_store = kind == "store" and result.status is JobStatus.STALE
                self._log_once(line, logging.DEBUG if stale_store else logging.WARNING)
        return [
            TransferResult(
                result.job_id,
                success=True,
                transfer_size=result.bytes,
                transfer_time=result.seconds,
            )
            if result.success
            else TransferResult(result.job_id, success=False)
            for result in results
        ]

    def _log_once(self, line: str, level: int = logging.WARNING) -> None:
        """Log why a job failed, once until a job succeeds."""
        if line not in self._logged:
            self._logged.add(line)
            log.log(level, "%s", line)
