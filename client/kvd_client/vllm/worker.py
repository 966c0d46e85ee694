"""A rank's side of vLLM's offloading interface, on a kvd `Worker`.

Every submitted job is reported once by `get_finished`, as a success or as a
failure; nothing raises after the start, whatever happens to the daemon or the CUDA driver.
"""

import logging
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from vllm.config import ModelConfig
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeBackendFactory
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from kvd_client import JobBlocks, JobResult, JobStatus, KvdClientError, Load, Store, Worker
from kvd_client.errors import cause, get_logger, log_no_offload
from kvd_client.torch_memory import work_so_far
from kvd_client.vllm.manager import ChunkSlots
from kvd_client.vllm.options import Options

LET_GO_SECONDS = 10.0  # a sleep may wait for copies that are under way

log = get_logger("kvd_client.vllm")


class KvdOffloadingWorker(OffloadingWorker):
    """Runs the jobs of one rank.

    Args:
        worker: the registered worker; None where this rank's memory cannot be served, and then
            every job fails.
        group_ids: vLLM's number of each group, in the layout's order.
        blocks_per_chunk: of the layout.
        options: timeouts.
        share: registers the KV caches' memory as it is when it is called.
    """

    def __init__(
        self,
        worker: Worker | None,
        group_ids: tuple[int, ...],
        blocks_per_chunk: int,
        options: Options,
        share: Callable[[Worker], None],
    ) -> None:
        self.worker = worker
        self._group_ids = group_ids
        self._blocks_per_chunk = blocks_per_chunk
        self._options = options
        self._share = share
        self._loads: dict[int, float] = {}  # by job: when it is cancelled; infinite afterwards
        self._failed: list[TransferResult] = []
        self._logged: set[str] = set()  # lines about failures

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Begin to store; always true: a failure is reported by `get_finished`."""
        assert isinstance(dst_spec, ChunkSlots)  # noqa: S101  # this spec's manager made it
        torn = self._torn_chunks(src_spec, dst_spec)
        if torn:
            self._fail(job_id, torn)
        elif self.worker is None:
            self._fail(job_id, "this rank's memory is not served")
        else:
            self._submit(self.worker, Store, job_id, src_spec, dst_spec)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Begin to load; always true: a failure is reported by `get_finished`."""
        assert isinstance(src_spec, ChunkSlots)  # noqa: S101  # this spec's manager made it
        if src_spec.missing:
            self._fail(job_id, f"{src_spec.missing} chunks are not in the cache any more")
        elif self.worker is None:
            self._fail(job_id, "this rank's memory is not served")
        else:
            self._loads[job_id] = time.monotonic() + self._options.load_timeout
            self._submit(self.worker, Load, job_id, dst_spec, src_spec)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return jobs that have ended; loads that take too long are cancelled.

        A load is reported only when nothing writes to its blocks any more.
        """
        done, self._failed = self._failed, []
        if self.worker is None:
            return done
        done += self._results(self.worker.get_finished())
        if self._loads:
            now = time.monotonic()
            late = [job for job, end in self._loads.items() if now >= end]
            if late:
                log.warning(
                    "%d loads took longer than load_timeout=%g s and are stopped",
                    len(late),
                    self._options.load_timeout,
                )
                self._loads.update(dict.fromkeys(late, float("inf")))
                self.worker.cancel(late)
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Return when the blocks of these stores may be overwritten.

        Loads are not waited for: vLLM keeps their blocks until they are reported.
        """
        if self.worker is not None:
            self.worker.wait(job_ids - self._loads.keys(), self._options.preemption_timeout)

    def let_go(self) -> None:
        """The memory is about to be freed: jobs end, and the daemon has it no more."""
        if self.worker is None:
            return
        try:
            free = self.worker.unregister(LET_GO_SECONDS)
        except KvdClientError as error:  # it was shut down
            log.debug("nothing to let go of: %s", error)
            return
        except Exception:  # the engine goes to sleep all the same
            log.exception(
                "the daemon could not be told that the KV cache is to be freed; its memory is free"
                " once the daemon has ended this session"
            )
            return
        if not free:
            log.warning(
                "the daemon did not let go of the KV cache in time; its memory is free once the"
                " daemon has ended this session"
            )

    def take_up(self) -> None:
        """There is memory again: the daemon gets it, when it is there."""
        if self.worker is None or self.worker.device is not None:
            return
        try:
            self._share(self.worker)
        except Exception as error:  # noqa: BLE001  # the engine wakes up all the same
            log_no_offload(log, error)

    def shutdown(self) -> None:
        """Unregister the memory and end the session."""
        if self.worker is not None:
            self.worker.close()

    def _submit(
        self,
        worker: Worker,
        kind: type[Store] | type[Load],
        job_id: int,
        blocks: GPULoadStoreSpec,
        chunks: ChunkSlots,
    ) -> None:
        arrays = blocks.block_ids, blocks.group_sizes, blocks.block_indices
        try:
            job = JobBlocks.of(*arrays, chunks.slots, chunks.generations)
            worker.submit(kind, job_id, job, after=work_so_far(worker))
        except Exception as error:  # noqa: BLE001  # of torch or the driver too: a miss
            self._log_once(f"a {kind.__name__.lower()} failed and is a cache miss: {cause(error)}")
            self._fail(job_id, str(error))

    def _torn_chunks(self, blocks: GPULoadStoreSpec, chunks: ChunkSlots) -> str:
        """Return what is wrong with a store that does not list its chunks' blocks up to the end.

        vLLM leaves out blocks that a sliding window has passed. At the front of the first chunk
        that is valid; anywhere else the blocks that follow would be stored in wrong places.
        """
        for group_id, size, index in zip(
            self._group_ids, blocks.group_sizes, blocks.block_indices, strict=True
        ):
            needed = chunks.chunks.get(group_id, 0) * self._blocks_per_chunk
            have = size + index % self._blocks_per_chunk if size else 0
            if have != needed:
                return (
                    f"group {group_id} lists {size} blocks from {index} on for"
                    f" {chunks.chunks.get(group_id, 0)} chunks of {self._blocks_per_chunk}"
                )
        return ""

    def _fail(self, job_id: int, why: str) -> None:
        log.debug("job %d is not done: %s", job_id, why)
        self._loads.pop(job_id, None)
        self._failed.append(TransferResult(job_id, success=False))

    def _results(self, ended: list[JobResult]) -> list[TransferResult]:
        """Convert results; each reason of a failure is logged once until a job succeeds.

        A store whose chunks are not the engine's any more is ordinary: after a reset for instance.
        """
        if any(result.success for result in ended):
            self._logged.clear()
        for result in ended:
            kind = "store" if self._loads.pop(result.job_id, None) is None else "load"
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
            for result in ended
        ]

    def _log_once(self, line: str, level: int = logging.WARNING) -> None:
        """Log a reason why jobs fail, once until a job succeeds."""
        if line not in self._logged:
            self._logged.add(line)
            log.log(level, "%s", line)

    def __repr__(self) -> str:
        return f"<KvdOffloadingWorker {len(self._loads)} loads, {self.worker!r}>"


# TODO sleep.py
# """Sleep mode: the daemon lets go of a KV cache that vLLM frees, and gets the one after it.
#
# Memory that the daemon has mapped is not freed when vLLM frees it, and the memory that it
# makes at the same addresses when it wakes up is other memory. vLLM tells connectors neither.
# What frees the memory and brings it back is a backend, which a rank makes by its name when it
# first needs one (`SleepModeBackendFactory`); in a rank's process the one of that name is
# replaced by one that does the same and tells kvd.
# """

KV_CACHE = "kv_cache"  # what vLLM calls the memory of KV caches


class Rank(Protocol):
    """A rank whose KV cache the daemon has."""

    def let_go(self) -> None:
        """The memory is about to be freed. Raises nothing."""

    def take_up(self) -> None:
        """There is memory again. Raises nothing."""


_RANKS: "weakref.WeakSet[Rank]" = weakref.WeakSet()


class _Told(SleepModeBackend):
    """Tells the ranks of this process; the class after it does the work."""

    def suspend(self, level: int = 1) -> None:
        """Free the memory of weights and KV caches."""
        for rank in tuple(_RANKS):
            rank.let_go()
        super().suspend(level)

    def resume(self, tags: list[str] | None = None) -> None:
        """Bring back the memory with these tags; None: all of it."""
        super().resume(tags)
        if tags is None or KV_CACHE in tags:
            for rank in tuple(_RANKS):
                rank.take_up()

    def discard(self, tags: tuple[str, ...]) -> None:
        """Free the memory with these tags."""
        if KV_CACHE in tags:
            for rank in tuple(_RANKS):
                rank.let_go()
        super().discard(tags)


def tell(rank: Rank, model_config: ModelConfig) -> None:
    """Tell this rank from now on, where its engine can free its KV cache."""
    if not (model_config.enable_sleep_mode or model_config.enable_cumem_allocator):
        return
    _RANKS.add(rank)
    name = model_config.sleep_mode_backend
    found = SleepModeBackendFactory.get_backend_class(name)
    if not issubclass(found, _Told):
        told = type(found.__name__, (_Told, found), {"__module__": found.__module__})
        backends: dict[str, Callable[[], type]] = SleepModeBackendFactory._registry  # noqa: SLF001  # what the factory looks up
        backends[name] = lambda: told
