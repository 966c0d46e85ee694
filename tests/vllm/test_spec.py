"""What vLLM's logic is given: a manager and a worker."""

import itertools
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec, ReqContext

from kvd_client import UnsupportedMemory, cuda_driver
from kvd_client.routes import EXPORT, STAGING
from kvd_client.vllm import KvdOffloadingSpec, KvdOffloadingWorker
from kvd_client.vllm.manager import ChunkLoadStoreSpec
from tests.client.fake_daemon import FakeDaemon
from tests.client.stand_in_driver import FAILURES, TORCH, install
from tests.conftest import Daemon
from tests.fakecuda.harness import functions_named
from tests.vllm.configs import Engine, allocated, configured, whole
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
    spec, views, _ = make_spec(tmp_path, daemon.runtime_dir, transfer=EXPORT)
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


def test_memory_that_cannot_be_exported_is_staged(
    tmp_path: Path, daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    """By default: the rank is registered, and one line says why and what it costs."""
    spec, views, _ = make_spec(tmp_path, daemon.runtime_dir, required=True)
    whole(views).untyped_storage().share_memory_()
    rank = spec.make_worker(views)
    assert rank.worker is not None
    assert (rank.worker.registered, rank.worker.transfer) == (True, STAGING)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "kvd_client"]
    assert rank.worker.transfer_reason in line
    assert "; the KV cache is staged: this process copies each byte" in line
    rank.shutdown()


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
