"""What vLLM's logic is given: a manager and a worker, also where its engine sleeps."""

import itertools
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import msgspec
import numpy as np
import pytest
import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.device_allocator.sleep_mode_backend import (
    CuMemBackend,
    SleepModeBackend,
    SleepModeBackendFactory,
)
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LookupResult, ReqContext, make_offload_key

from kvd_client import UnsupportedMemory, Worker, cuda_driver
from kvd_client.vllm import KvdOffloadingSpec, KvdOffloadingWorker
from kvd_client.vllm.manager import ChunkLoadStoreSpec
from kvd_client.vllm.scheduler import KvdConnectorScheduler
from tests.client.fake_daemon import FakeDaemon
from tests.client.stand_in_driver import FAILURES, TORCH, install
from tests.conftest import Daemon
from tests.fakecuda.harness import functions_named
from tests.vllm.configs import BLOCKS, Engine, allocated, configured, pages, whole
from tests.waiting import DEADLINE, PATIENCE, eventually

FACTOR = 2
REQUEST = ReqContext("request")
STORE, LOAD = 1, 2


def make_spec(
    folder: Path, runtime_dir: Path, **extra: Any
) -> tuple[KvdOffloadingSpec, dict[str, torch.Tensor], Engine]:
    """A spec as the connector makes it, the KV cache by layer, and what both are made of."""
    settings = {"runtime_dir": str(runtime_dir), "blocks_per_chunk": FACTOR, "deadline": DEADLINE}
    engine = vllm_config, kv_cache_config, config = configured(folder, extra=settings | extra)
    spec = KvdOffloadingSpec(config, vllm_config, kv_cache_config)
    return spec, allocated(vllm_config, kv_cache_config), engine


def job(chunks: int, first: int) -> GPULoadStoreSpec:
    """Blocks of so many chunks, from this block on."""
    count = chunks * FACTOR
    return GPULoadStoreSpec(list(range(first, first + count)), [count], [0])


def ended(worker: KvdOffloadingWorker, job_id: int) -> bool:
    """Wait for this job; whether it was a success."""
    assert worker.worker is not None
    assert not worker.worker.wait([job_id], PATIENCE)
    (result,) = worker.get_finished()
    assert result.job_id == job_id
    return bool(result.success)


def test_memory_that_cannot_be_shared_is_a_cache_that_misses(
    tmp_path: Path, daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says so, and the rank runs with nothing to serve its jobs.

    With required=true the same sentence ends the start.
    """
    spec, views, _ = make_spec(tmp_path, daemon.runtime_dir)
    whole(views).untyped_storage().share_memory_()
    worker = spec.make_worker(views)
    (line,) = [record for record in caplog.records if record.name == "kvd_client.vllm"]
    assert line.levelno == logging.ERROR
    assert "share tensors with kvd before share_memory_()" in line.getMessage()
    assert line.getMessage().endswith("; the engine runs without offload")
    assert "\n" not in line.getMessage()
    assert worker.worker is None
    spec.options = msgspec.structs.replace(spec.options, required=True)
    with pytest.raises(UnsupportedMemory, match="before share_memory_"):
        spec.make_worker(views)


def test_no_failure_of_the_driver_or_of_torch_reaches_the_engine(
    tmp_path: Path,
    runtime_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whichever call fails, and however, at the start or later: the engine starts and steps.

    Without its memory registered it runs without offload, which one line says; else its jobs fail,
    and each is reported once.
    """
    driver = install(monkeypatch)
    spec, views, _ = make_spec(tmp_path, runtime_dir)
    slots = ChunkLoadStoreSpec(np.zeros(1, "<u4"), np.ones(1, "<u8"), {0: 1})
    runtime_dir.mkdir()
    names = sorted(functions_named(cuda_driver) | {TORCH})
    refused, failed = Counter[str](), Counter[str]()

    with FakeDaemon(runtime_dir):
        for name, driver.failure, late in itertools.product(names, FAILURES, (False, True)):
            caplog.clear()
            driver.failing = "" if late else name
            rank = spec.make_worker(views)
            driver.failing = name
            lines = [record.getMessage() for record in caplog.records if record.levelno > 30]
            assert len(lines) == (rank.worker is None)
            assert all(line.endswith("; the engine runs without offload") for line in lines)
            refused[name] += rank.worker is None
            rank.submit_store(STORE, job(1, 1), slots)
            rank.submit_load(LOAD, slots, job(1, 1))
            rank.wait({STORE, LOAD})
            outcomes = dict[int, bool]()

            def both_ended(
                rank: KvdOffloadingWorker = rank, outcomes: dict[int, bool] = outcomes
            ) -> bool:
                for result in rank.get_finished():
                    assert result.job_id not in outcomes
                    outcomes[result.job_id] = result.success
                return outcomes.keys() == {STORE, LOAD}

            eventually(both_ended)
            failed[name] += [*outcomes.values()].count(False)
            rank.release_memory()
            rank.restore_memory()
            rank.shutdown()
    rounds = len(FAILURES)
    assert (refused["cuMemHostRegister"], failed["cuMemHostRegister"]) == (rounds, 2 * rounds)
    assert (refused["cuStreamWriteValue64"], failed["cuStreamWriteValue64"]) == (0, 4 * rounds)
    assert (refused[TORCH], failed[TORCH]) == (rounds, 4 * rounds)


# ------------------------------------------------------------------- sleep mode

NAME = "noted"


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
def backends() -> Iterator[None]:
    """The factory knows the noted backend, and afterwards what it knew before."""
    known = SleepModeBackendFactory._registry
    before = dict(known)
    SleepModeBackendFactory.register_backend(NAME, __name__, NotedBackend.__name__)
    NotedBackend.calls.clear()
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


def test_an_engine_that_sleeps_frees_its_cache_and_finds_its_chunks_again(
    tmp_path: Path, daemon: Daemon
) -> None:
    """The memory is let go of before it is freed and registered when it is back, not before."""
    spec, views, (vllm_config, kv_cache_config, _) = make_spec(
        tmp_path, daemon.runtime_dir, required=True
    )
    config = sleeping(vllm_config)
    manager = KvdConnectorScheduler(spec, vllm_config, kv_cache_config).manager
    rank = spec.make_worker(views)
    assert rank.worker is not None
    NotedBackend.worker = rank.worker
    backend = SleepModeBackendFactory.create_backend(config)
    try:
        assert manager.scheduler.wait_attached(PATIENCE)
        keys = [make_offload_key(bytes([n] * 32), 0) for n in range(2)]
        before = pages(views, [*views], [*range(1, 1 + 2 * FACTOR)], BLOCKS)
        output = manager.prepare_store(keys, REQUEST)
        rank.submit_store(STORE, job(2, 1), output.store_spec)
        assert ended(rank, STORE)
        manager.complete_store(keys, REQUEST)
        for key in keys:
            eventually(partial(manager.lookup, key, REQUEST), {LookupResult.HIT}.__contains__)

        backend.suspend(2)
        source = manager.prepare_load(keys, REQUEST)
        rank.submit_load(LOAD, source, job(2, BLOCKS // 2))
        assert not ended(rank, LOAD)
        manager.complete_load(keys, REQUEST)
        registered = []
        for step in (
            partial(backend.resume, ["weights"]),
            partial(backend.resume, ["kv_cache"]),
            partial(backend.discard, ("weights",)),
            partial(backend.discard, ("kv_cache",)),
            backend.resume,
            rank.restore_memory,
        ):
            step()
            registered.append(rank.worker.registered)
        assert registered == [False, True, True, False, True, True]
        assert NotedBackend.calls == [
            ("suspend", 2, False),
            ("resume", ["weights"], False),
            ("resume", ["kv_cache"], False),
            ("discard", ("weights",), True),
            ("discard", ("kv_cache",), False),
            ("resume", None, False),
        ]

        assert manager.scheduler.wait_attached(PATIENCE)
        whole(views).zero_()

        def load() -> bool:
            source = manager.prepare_load(keys, REQUEST)
            rank.submit_load(LOAD, source, job(2, BLOCKS // 2))
            is_loaded = ended(rank, LOAD) and not source.missing
            manager.complete_load(keys, REQUEST)
            return is_loaded

        eventually(load)  # a miss until scheduler and lane know that the rank is back
        after = pages(views, [*views], [*range(BLOCKS // 2, BLOCKS // 2 + 2 * FACTOR)], BLOCKS)
        assert all(map(torch.equal, before, after))
    finally:
        rank.shutdown()
        manager.shutdown()
    backend.suspend()
    backend.resume()


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
    spec, views, (vllm_config, *_) = make_spec(tmp_path, runtime_dir)
    config, rank = sleeping(vllm_config), spec.make_worker(views)
    assert rank.worker is not None
    NotedBackend.worker = worker = rank.worker
    backend = SleepModeBackendFactory.create_backend(config)
    caplog.clear()
    with monkeypatch.context() as patch:
        patch.setattr(worker, "unregister", unregister)
        backend.suspend()
    worker.unregister()
    monkeypatch.setattr(rank, "_register", register)
    backend.resume()
    rank.worker = None  # as where the first registration was refused
    backend.suspend()
    backend.resume()
    logged = [record.getMessage() for record in caplog.records]
    assert all(words in line for words, line in zip(lines, logged, strict=True))
    worker.close()


@pytest.mark.parametrize(
    ("sleep", "cumem", "notified"), [(True, True, True), (False, True, True), (False, False, False)]
)
def test_vllms_own_backend_is_told_where_memory_can_be_freed(
    tmp_path: Path, runtime_dir: Path, sleep: bool, cumem: bool, notified: bool
) -> None:
    """It is the same backend otherwise, under the same name, once for however many engines."""
    spec, views, (vllm_config, *_) = make_spec(tmp_path, runtime_dir)
    config = sleeping(vllm_config, "cumem", sleep=sleep, cumem=cumem)
    kinds = []
    for _ in range(2):
        spec.make_worker(views).shutdown()
        kinds.append(type(SleepModeBackendFactory.create_backend(config)))
    assert kinds[0] is kinds[1]
    assert (kinds[0] is CuMemBackend) is not notified
    assert issubclass(kinds[0], CuMemBackend)
    assert kinds[0].preserves_communicators()
    assert sys.modules[kinds[0].__module__] is sys.modules[CuMemBackend.__module__]
