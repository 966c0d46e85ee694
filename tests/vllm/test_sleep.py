"""A rank whose engine sleeps, through vLLM's own calls of its worker process.

vLLM 0.33 calls the connector; with 0.32 kvd puts a class of its own before vLLM's backend.
"""

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

import pytest
import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.device_allocator.sleep_mode_backend import (
    CuMemBackend,
    SleepModeBackend,
    SleepModeBackendFactory,
)
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    TransferJob,
)
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LookupResult, ReqContext, make_offload_key
from vllm.v1.worker.gpu_worker import Worker as GpuWorker

from kvd_client import UnsupportedMemory, Worker
from kvd_client.routes import EXPORT, STAGING, Transfer
from kvd_client.staging_memory import Copy, HostCopier
from kvd_client.vllm import KvdConnector, KvdOffloadingWorker
from kvd_client.vllm.manager import ChunkLoadStoreSpec
from kvd_client.vllm.scheduler import KvdConnectorScheduler
from tests.conftest import Daemon
from tests.vllm.configs import BLOCKS, allocated, configured, pages, whole
from tests.waiting import DEADLINE, PATIENCE, eventually

FACTOR = 2
REQUEST = ReqContext("request")
STORE, LOAD = 1, 2
NAME = "noted"
# vLLM 0.32 calls no connector when memory is freed.
CALLS_CONNECTORS = hasattr(KVConnectorBase_V1, "unregister_kv_caches")


class NotedBackend(SleepModeBackend):  # type: ignore[misc]  # vLLM has no types here
    """A sleep mode that frees nothing; it notes its calls, and whether kvd has let go by then."""

    calls: ClassVar[list[tuple[object, ...]]] = []
    worker: ClassVar[Worker | None] = None

    def note(self, *call: object) -> None:
        """See the class."""
        assert self.worker is not None
        self.calls.append((*call, self.worker.registered))

    def suspend(self, level: int = 1) -> None:
        """See vLLM."""
        self.note("suspend", level)

    def resume(self, tags: list[str] | None = None) -> None:
        """See vLLM."""
        self.note("resume", tags)

    def discard(self, tags: tuple[str, ...]) -> None:
        """See vLLM."""
        self.note("discard", tags)


@pytest.fixture(autouse=True)
def backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The factory knows the noted backend; afterwards what it knew before. There is no GPU."""
    known = SleepModeBackendFactory._registry
    before = dict(known)
    SleepModeBackendFactory.register_backend(NAME, __name__, NotedBackend.__name__)
    NotedBackend.calls.clear()
    # Else kvd's log lines go to vLLM's handlers, for all tests that follow.
    monkeypatch.setattr("kvd_client.vllm.connector._log_as_vllm_does", lambda: None)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (0, 0))
    yield
    known.clear()
    known.update(before)


def sleeping(
    vllm_config: VllmConfig, name: str = NAME, *, sleep: bool = True, cumem: bool = True
) -> ModelConfig:
    """The engine's model configuration, with this sleep mode."""
    config = vllm_config.model_config
    config.enable_sleep_mode, config.enable_cumem_allocator = sleep, cumem
    config.sleep_mode_backend = name
    return config


class RankProcess:
    """A rank's process: kvd's connector, and vLLM's worker with what its sleep mode uses.

    Attributes:
        config, kv_cache_config: the engine's.
        views: of its KV cache.
        connector: the rank's.
        gpu_worker: vLLM's; its model has no weights.
    """

    def __init__(
        self,
        folder: Path,
        runtime_dir: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        required: bool = False,
        transfer: Transfer = EXPORT,
        **sleep: Any,
    ) -> None:
        settings = {
            "runtime_dir": str(runtime_dir),
            "deadline": DEADLINE,
            "required": required,
            "transfer": transfer,
        }
        self.config, self.kv_cache_config, _ = configured(
            folder, extra={"blocks_per_chunk": FACTOR, **settings}
        )
        sleeping(self.config, **sleep)
        self.config._verify_kv_transfer_compat()
        self.views = allocated(self.config, self.kv_cache_config)
        self.connector = KvdConnector(self.config, KVConnectorRole.WORKER, self.kv_cache_config)
        self.connector.register_kv_caches(self.views)
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", self.connector)
        self.gpu_worker = GpuWorker.__new__(GpuWorker)
        self.gpu_worker.vllm_config = self.config
        self.gpu_worker.model_config = self.config.model_config
        self.gpu_worker.model_runner = SimpleNamespace(model=torch.nn.Module())
        self.gpu_worker.get_draft_model = lambda: None
        self.gpu_worker._sleep_mode_backend = None
        self.gpu_worker._sleep_saved_parameters = {}
        self.gpu_worker._sleep_saved_buffers = {}
        self.gpu_worker._sleep_saved_draft_buffers = {}
        NotedBackend.worker = self.worker

    @property
    def rank(self) -> KvdOffloadingWorker:
        """What the connector made."""
        assert self.connector.connector_worker is not None
        assert self.connector.connector_worker.worker is not None
        return self.connector.connector_worker.worker

    @property
    def worker(self) -> Worker:
        """The client's."""
        assert self.rank.worker is not None
        return self.rank.worker

    def scheduler_half(self) -> KvdConnectorScheduler:
        """The connector's half in the engine's scheduler."""
        assert self.connector.connector_worker is not None
        spec = self.connector.connector_worker.spec
        return KvdConnectorScheduler(spec, self.config, self.kv_cache_config)

    def load(self, *job: Any) -> bool:
        """Submit a load; whether it was a success."""
        self.rank.submit_load(LOAD, *job)
        return self.ended(LOAD)

    def ended(self, job_id: int) -> bool:
        """Wait for this job; whether it was a success."""
        assert not self.worker.wait([job_id], PATIENCE)
        (result,) = self.rank.get_finished()
        assert result.job_id == job_id
        return bool(result.success)


def job(chunks: int, first: int) -> GPULoadStoreSpec:
    """Blocks of so many chunks, from this block on."""
    count = chunks * FACTOR
    return GPULoadStoreSpec(list(range(first, first + count)), [count], [0])


@pytest.mark.parametrize("transfer", [EXPORT, STAGING])
def test_an_engine_that_sleeps_frees_its_cache_and_finds_its_chunks_again(
    tmp_path: Path, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, transfer: Transfer
) -> None:
    """The memory is let go of before it is freed and used again when it is back, not before.

    Exported memory is registered again then. With staging the registration stays.
    """
    staged = transfer == STAGING
    process = RankProcess(
        tmp_path, daemon.runtime_dir, monkeypatch, required=True, transfer=transfer
    )
    assert process.worker.transfer == transfer
    manager = process.scheduler_half().manager
    views, rank, vllm = process.views, process.rank, process.gpu_worker
    try:
        assert manager.scheduler.wait_attached(PATIENCE)
        keys = [make_offload_key(bytes([n] * 32), 0) for n in range(2)]
        before = pages(views, [*views], [*range(1, 1 + 2 * FACTOR)], BLOCKS)
        output = manager.prepare_store(keys, REQUEST)
        rank.submit_store(STORE, job(2, 1), output.store_spec)
        assert process.ended(STORE)
        manager.complete_store(keys, REQUEST)
        for key in keys:
            eventually(partial(manager.lookup, key, REQUEST), {LookupResult.HIT}.__contains__)

        vllm.sleep(2)
        assert not process.load(manager.prepare_load(keys, REQUEST), job(2, BLOCKS // 2))
        manager.complete_load(keys, REQUEST)
        registered, usable = [], []
        for step in (
            partial(vllm.wake_up, ["weights"]),
            partial(vllm.wake_up, ["kv_cache"]),
            partial(vllm.discard, ("weights",)),
            partial(vllm.discard, ("kv_cache",)),
            vllm.sleep,
            vllm.wake_up,
            partial(vllm.wake_up, ["kv_cache"]),
        ):
            step()
            registered.append(process.worker.registered)
            source = manager.prepare_load(keys, REQUEST)
            usable.append(process.load(source, job(2, BLOCKS // 2)) and not source.missing)
            manager.complete_load(keys, REQUEST)
        awake = [False, True, True, False, False, True, True]
        assert registered == [staged or is_awake for is_awake in awake]
        if staged:  # nobody has to learn that the rank is back
            assert usable == awake
        else:
            assert not any(
                is_usable and not is_awake
                for is_usable, is_awake in zip(usable, awake, strict=True)
            )
        assert NotedBackend.calls == [
            ("suspend", 2, staged),
            ("resume", ["weights"], staged),
            ("resume", ["kv_cache"], staged),
            ("discard", ("weights",), True),
            ("discard", ("kv_cache",), staged),
            ("suspend", 1, staged),
            ("resume", None, staged),
            ("resume", ["kv_cache"], True),
        ]

        assert manager.scheduler.wait_attached(PATIENCE)
        whole(views).zero_()

        def load() -> bool:
            source = manager.prepare_load(keys, REQUEST)
            is_loaded = process.load(source, job(2, BLOCKS // 2)) and not source.missing
            manager.complete_load(keys, REQUEST)
            return is_loaded

        eventually(load)  # a miss until scheduler and lane know that the rank is back
        after = pages(views, [*views], [*range(BLOCKS // 2, BLOCKS // 2 + 2 * FACTOR)], BLOCKS)
        assert all(map(torch.equal, before, after))
    finally:
        process.connector.shutdown()
        manager.shutdown()
    vllm.sleep()
    vllm.wake_up()


class GatedGather:
    """Stands for `HostCopier.gather`: the second call does not end before the test lets it.

    Attributes:
        calls: how many have begun.
        is_running: the second one has begun, and not ended.
        may_end: it ends once this is set.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.is_running, self.may_end = threading.Event(), threading.Event()
        gather = HostCopier.gather

        def gated(*arguments: Any) -> Copy:
            self.calls += 1
            if self.calls == 2:
                self.is_running.set()
                assert self.may_end.wait(PATIENCE)
            copy = gather(*arguments)
            self.is_running.clear()
            return copy

        monkeypatch.setattr(HostCopier, "gather", gated)


def test_no_copy_touches_a_staged_cache_while_its_engine_sleeps(
    tmp_path: Path, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that runs is waited for; then none begins. What is found later is from before.

    The store that was running fails, but for the chunks that the lane had already.
    """
    gather = GatedGather(monkeypatch)
    process = RankProcess(
        tmp_path, daemon.runtime_dir, monkeypatch, required=True, transfer=STAGING
    )
    manager = process.scheduler_half().manager
    views, rank, vllm = process.views, process.rank, process.gpu_worker
    try:
        assert manager.scheduler.wait_attached(PATIENCE)
        num_chunks = (BLOCKS - 1) // FACTOR  # in three pieces
        keys = [make_offload_key(bytes([n] * 32), 0) for n in range(num_chunks)]
        slots = manager.prepare_store(keys, REQUEST).store_spec
        manager.end_step()
        before = whole(views).clone()
        rank.submit_store(STORE, job(num_chunks, 1), slots)
        assert gather.is_running.wait(PATIENCE)
        threading.Timer(0.1, gather.may_end.set).start()
        vllm.sleep()
        assert gather.may_end.is_set()
        assert not gather.is_running.is_set()
        assert not process.ended(STORE)
        whole(views).zero_()
        rank.submit_store(STORE, job(num_chunks, 1), slots)
        assert not process.ended(STORE)
        assert not process.load(slots, job(num_chunks, 1))
        assert gather.calls == 2
        assert not whole(views).any()
        manager.complete_store(keys, REQUEST, success=False)
        manager.end_step()
        vllm.wake_up()

        settled = {LookupResult.HIT, LookupResult.MISS}
        found = [
            eventually(partial(manager.lookup, key, REQUEST), settled.__contains__) for key in keys
        ]
        num_found = found.count(LookupResult.HIT)
        assert found == [LookupResult.HIT] * num_found + [LookupResult.MISS] * (
            num_chunks - num_found
        )
        assert num_found < num_chunks
        if num_found:
            source = manager.prepare_load(keys[:num_found], REQUEST)
            manager.end_step()
            assert process.load(source, job(num_found, 1))
            manager.complete_load(keys, REQUEST)
        loaded = [*range(1, 1 + num_found * FACTOR)]
        after = pages(views, [*views], loaded, BLOCKS)
        whole(views).copy_(before)
        assert all(map(torch.equal, pages(views, [*views], loaded, BLOCKS), after))
    finally:
        gather.may_end.set()
        process.connector.shutdown()
        manager.shutdown()


def test_stores_that_wait_for_the_next_step_fail_when_the_engine_sleeps(
    tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their blocks are freed before that step: each is reported once, and not submitted."""
    process = RankProcess(tmp_path, runtime_dir, monkeypatch)
    half = process.connector.connector_worker
    assert half is not None
    store = TransferJob("request", job(1, 1), ChunkLoadStoreSpec())
    half.prepare_store_kv(OffloadingConnectorMetadata({}, {STORE: store}))
    submitted: list[object] = []
    monkeypatch.setattr(process.rank, "submit_store", lambda *store: submitted.append(store))
    process.gpu_worker.sleep()
    process.gpu_worker.wake_up()
    half.start_kv_transfers(OffloadingConnectorMetadata({}, {}))
    assert not submitted
    report = half.build_connector_worker_meta()
    assert report is not None
    assert (report.completed_jobs, report.failed_jobs) == ({STORE: 1}, {STORE})
    process.connector.shutdown()


def late(_: object) -> bool:
    """A daemon does not let go of memory in time."""
    return False


def refuse(_: object) -> NoReturn:
    """Memory cannot be shared again."""
    raise UnsupportedMemory("this is memory that the daemon cannot map")


def break_down(_: object) -> NoReturn:
    """An error that is not expected."""
    raise RuntimeError("an error of the driver")


@pytest.mark.parametrize(
    ("unregister", "register", "lines"),
    [
        (late, refuse, ["did not let go of the KV cache", "daemon cannot map; the engine runs"]),
        (
            *(break_down, break_down),
            ["could not be told", "RuntimeError: an error of the driver; the engine runs"],
        ),
    ],
)
def test_what_goes_wrong_is_a_line_each_and_no_exception(
    tmp_path: Path,
    runtime_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    unregister: Any,
    register: Any,
    lines: list[str],
) -> None:
    """When memory is freed, when it comes back, and when there was none to register."""
    process = RankProcess(tmp_path, runtime_dir, monkeypatch)
    worker, vllm = process.worker, process.gpu_worker
    caplog.clear()
    with monkeypatch.context() as patch:
        patch.setattr(worker, "unregister", unregister)
        vllm.sleep()
    worker.unregister()
    monkeypatch.setattr(process.rank, "_register", register)
    vllm.wake_up()
    process.rank.worker = None  # as where the first registration was refused
    vllm.sleep()
    vllm.wake_up()
    logged = [record for record in caplog.records if record.name == "kvd_client.vllm"]
    assert all(words in record.getMessage() for words, record in zip(lines, logged, strict=True))
    worker.close()


@pytest.mark.parametrize(("sleep", "cumem"), [(True, True), (False, True), (False, False)])
def test_vllms_backend_is_changed_only_where_it_must_tell_the_connector(
    tmp_path: Path, runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, sleep: bool, cumem: bool
) -> None:
    """With vLLM 0.32, where memory can be freed: the same backend otherwise, once for all ranks."""
    kinds = []
    for _ in range(2):
        process = RankProcess(
            tmp_path, runtime_dir, monkeypatch, name="cumem", sleep=sleep, cumem=cumem
        )
        process.connector.shutdown()
        config = process.config.model_config
        kinds.append(type(SleepModeBackendFactory.create_backend(config)))
    assert kinds[0] is kinds[1]
    assert (kinds[0] is CuMemBackend) == (CALLS_CONNECTORS or not cumem)
    assert issubclass(kinds[0], CuMemBackend)
    assert kinds[0].preserves_communicators()
    assert kinds[0].__module__ == CuMemBackend.__module__
