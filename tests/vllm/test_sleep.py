"""Sleep mode: the daemon has no KV cache that vLLM has freed, and gets the one after it."""

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pytest
import torch
from vllm.device_allocator.sleep_mode_backend import (
    CuMemBackend,
    SleepModeBackend,
    SleepModeBackendFactory,
)
from vllm.v1.kv_offload.base import LookupResult, make_offload_key

from kvd_client import UnsupportedMemory, Worker
from kvd_client.vllm import KvdOffloadingManager
from tests.conftest import Daemon
from tests.vllm.configs import BLOCKS, WholeChunks, whole
from tests.vllm.moving import pages
from tests.vllm.test_spec import FACTOR, LOAD, REQUEST, STORE, ended, found, job, make_spec
from tests.waiting import PATIENCE, eventually

NAME = "noted"


class NotedBackend(SleepModeBackend):  # type: ignore[misc]  # vLLM has no types here
    """A sleep mode that frees nothing; it notes what is asked of it, and whether kvd has let go."""

    asked: ClassVar[list[tuple[object, ...]]] = []
    worker: ClassVar[Worker | None] = None

    def note(self, *what: object) -> None:
        """See the class."""
        assert self.worker is not None
        self.asked.append((*what, self.worker.registered))

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
    NotedBackend.asked.clear()
    yield
    known.clear()
    known.update(before)


def sleeping(spec: Any, name: str = NAME, *, sleep: bool = True, cumem: bool = True) -> Any:
    """The configuration of the spec's engine, with this sleep mode."""
    config = spec._vllm_config.model_config
    config.enable_sleep_mode, config.enable_cumem_allocator = sleep, cumem
    config.sleep_mode_backend = name
    return config


def served(tmp_path: Path, runtime_dir: Path) -> tuple[Any, Worker, Any]:
    """A rank that serves, its worker, and what puts its engine to sleep."""
    spec, views = make_spec(tmp_path, runtime_dir)
    config = sleeping(spec)
    rank = spec.make_worker(views)
    assert rank.worker is not None
    NotedBackend.worker = rank.worker
    return rank, rank.worker, SleepModeBackendFactory.create_backend(config)


def test_an_engine_that_sleeps_frees_its_cache_and_finds_its_chunks_again(
    tmp_path: Path, daemon: Daemon
) -> None:
    """The memory is let go of before it is freed and registered when it is back, not before."""
    spec, views = make_spec(tmp_path, daemon.runtime_dir, required=True)
    config = sleeping(spec)
    manager, rank = spec.get_manager(), spec.make_worker(views)
    assert isinstance(manager, KvdOffloadingManager)
    assert rank.worker is not None
    manager.ranges = WholeChunks(FACTOR)
    NotedBackend.worker = rank.worker
    backend = SleepModeBackendFactory.create_backend(config)
    try:
        assert manager.scheduler.wait_attached(PATIENCE)
        keys = [make_offload_key(bytes([n] * 32), 0) for n in range(2)]
        before = pages(views, [*views], [*range(1, 1 + 2 * FACTOR)], BLOCKS)
        output = manager.prepare_store(keys, REQUEST)
        rank.submit_store(STORE, job(2, 0, 1, 1), output.store_spec)
        assert ended(rank, STORE)
        manager.complete_store(keys, REQUEST)
        eventually(partial(found, manager, keys), {LookupResult.HIT}.issuperset)

        backend.suspend(2)
        source = manager.prepare_load(keys, REQUEST)
        rank.submit_load(LOAD, source, job(2, 0, 1, BLOCKS // 2))
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
        assert NotedBackend.asked == [
            ("suspend", 2, False),
            ("resume", ["weights"], False),
            ("resume", ["kv_cache"], False),
            ("discard", ("weights",), True),
            ("discard", ("kv_cache",), False),
            ("resume", None, False),
        ]

        assert manager.scheduler.wait_attached(PATIENCE)
        whole(views).zero_()
        source = manager.prepare_load(keys, REQUEST)
        assert not source.missing
        rank.submit_load(LOAD, source, job(2, 0, 1, BLOCKS // 2))
        assert ended(rank, LOAD)
        after = pages(views, [*views], [*range(BLOCKS // 2, BLOCKS // 2 + 2 * FACTOR)], BLOCKS)
        assert all(map(torch.equal, before, after))
    finally:
        rank.shutdown()
        manager.shutdown()
    backend.suspend()
    backend.resume()


def test_what_goes_wrong_is_a_line_each_and_no_exception(
    tmp_path: Path, runtime_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A daemon that does not let go in time, memory that cannot be shared again, no memory."""
    rank, worker, backend = served(tmp_path, runtime_dir)
    caplog.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "unregister", lambda _: False)
        backend.suspend()
    worker.unregister()

    def refuse(_: Worker) -> None:
        raise UnsupportedMemory("this is memory that the daemon cannot map")

    rank._register = refuse
    backend.resume()
    rank.worker = None  # as where the first registration was refused
    backend.suspend()
    backend.resume()
    lines = [(line.levelname, line.getMessage()) for line in caplog.records]
    assert [level for level, _ in lines] == ["WARNING", "ERROR"]
    assert "did not let go of the KV cache" in lines[0][1]
    assert lines[1][1].endswith("cannot map; the engine runs without offload")
    worker.close()


def test_an_error_that_nobody_expects_stops_no_engine(
    tmp_path: Path, runtime_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever goes wrong when memory is freed or comes back is logged with its stack."""
    rank, worker, backend = served(tmp_path, runtime_dir)
    caplog.clear()

    def broken(_: object) -> NoReturn:
        raise RuntimeError("an error of the driver")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "unregister", broken)
        backend.suspend()
    worker.unregister()
    rank._register = broken
    backend.resume()
    lines = [(line.levelname, line.getMessage()) for line in caplog.records if line.exc_info]
    assert [level for level, _ in lines] == ["ERROR", "ERROR"]
    assert "could not be told" in lines[0][1]
    assert lines[1][1] == (
        "kvd: the KV cache cannot be registered: RuntimeError: an error of the driver; the engine"
        " runs without offload"
    )
    worker.close()


@pytest.mark.parametrize(
    ("sleep", "cumem", "told"), [(True, True, True), (False, True, True), (False, False, False)]
)
def test_vllms_own_backend_is_told_where_memory_can_be_freed(
    tmp_path: Path, runtime_dir: Path, sleep: bool, cumem: bool, told: bool
) -> None:
    """It is the same backend otherwise, under the same name, once for however many engines."""
    spec, views = make_spec(tmp_path, runtime_dir)
    config = sleeping(spec, "cumem", sleep=sleep, cumem=cumem)
    kinds = []
    for _ in range(2):
        spec.make_worker(views).shutdown()
        kinds.append(type(SleepModeBackendFactory.create_backend(config)))
    assert kinds[0] is kinds[1]
    assert (kinds[0] is CuMemBackend) is not told
    assert issubclass(kinds[0], CuMemBackend)
    assert kinds[0].preserves_communicators()
    assert sys.modules[kinds[0].__module__] is sys.modules[CuMemBackend.__module__]
