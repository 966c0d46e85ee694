"""A plugin of pytest that puts kvd's halves of the connector into vLLM's own tests.

vLLM's tests make `OffloadingConnectorScheduler` and `OffloadingConnectorWorker` over fakes of
managers, specs and workers. With this plugin they get kvd's classes by these names:

- the scheduler's half is `KvdConnectorScheduler`. Events are vLLM's own, because the fakes announce
  their chunks there.
- the worker's half is `KvdConnectorWorker`; results are collected by kvd's `get_transfer_results`.
  KV caches are registered as vLLM does it: kvd's registration needs a daemon, and
  `tests/vllm/test_layout.py` tests it.
- `OffloadingWorkerMetadata` is `KvdWorkerMetadata`.

The fakes get what kvd's manager and worker have beyond vLLM's interfaces, from real ones: the
manager's daemon has every block and no tiers, the worker has no jobs.

`releases.toml` lists the tests that are expected to fail. One of them that passes fails the run, as
does any other that fails.
"""

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import common, scheduler, worker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import OffloadingManager, OffloadingWorker

from kvd_client import LookupResult, Scheduler
from kvd_client.vllm.connector import KvdConnectorWorker
from kvd_client.vllm.manager import KvdOffloadingManager
from kvd_client.vllm.options import VllmOptions
from kvd_client.vllm.scheduler import KvdConnectorScheduler, KvdWorkerMetadata
from kvd_client.vllm.worker import KvdOffloadingWorker

VllmScheduler = scheduler.OffloadingConnectorScheduler
VllmWorker = worker.OffloadingConnectorWorker

RELEASES = Path(__file__).with_name("releases.toml")


def release() -> dict[str, Any]:
    """Return what `releases.toml` says about the installed vLLM."""
    releases = tomllib.loads(RELEASES.read_text())
    entry: dict[str, Any] = releases[vllm.__version__.partition("+")[0]]
    return entry


# ------------------------------------------------------------------- halves


def kvd_manager() -> KvdOffloadingManager:
    """Return kvd's manager over a daemon that has every block, and no tiers."""
    session = MagicMock(spec=Scheduler, name="session")  # named: not a part of a fake manager
    session.tiers = ()
    session.lookup.return_value = LookupResult.HIT
    return KvdOffloadingManager(session, pending_timeout=1.0, seek_timeout=1.0, config_info={})


def kvd_worker() -> KvdOffloadingWorker:
    """Return kvd's worker without jobs."""
    return KvdOffloadingWorker(None, (), 1, VllmOptions(), register=lambda _: None)


def add_what_only_kvd_has(fake: object, part: object, interface: type) -> None:
    """Give a fake the public attributes of kvd's part that vLLM's interface lacks."""
    for name in dir(part):
        if not name.startswith("_") and not hasattr(interface, name):
            setattr(fake, name, getattr(part, name))


class EventsOfFakes:
    """Events of the fake manager, in the place of `PoolEvents`."""

    def __init__(self, half: KvdConnectorScheduler) -> None:
        self._half = half

    def watch(self, gpu_block_pool: BlockPool) -> None:
        """Do nothing: there are no events of the engine's own cache."""

    def take(self, *, idle: bool) -> Iterable[KVCacheEvent]:
        """Return what vLLM's own half would."""
        assert not idle
        events: Iterable[KVCacheEvent] = VllmScheduler.take_events(self._half)
        return events


class SchedulerOverFakes(KvdConnectorScheduler):
    """kvd's half in the scheduler, over vLLM's fakes."""

    def __init__(self, spec: Any, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        is_fake = isinstance(vllm_config, MagicMock)
        # Fake configurations do not say whether the engine can load within a step.
        can_say = not is_fake and hasattr(spec.config, "replicated_layout")
        spec.publishes, spec.options = False, VllmOptions(sync_load_budget_bytes=int(can_say))
        if is_fake:
            vllm_config.num_hash_lookahead_tokens = 0
        super().__init__(spec, vllm_config, kv_cache_config)
        self.events: Any = EventsOfFakes(self)

    def __setattr__(self, name: str, value: object) -> None:
        """Prepare a fake manager, also one that a test sets later."""
        if name == "manager":
            add_what_only_kvd_has(value, kvd_manager(), OffloadingManager)
        super().__setattr__(name, value)

    def _lookup_complete_chunks(
        self, req_status: RequestOffloadState, max_num_new_tokens: int | None = None
    ) -> int | None:
        """Look up a request that vLLM knows; some tests pass one that was never added."""
        self._req_status.setdefault(req_status.req.request_id, req_status)
        return super()._lookup_complete_chunks(req_status, max_num_new_tokens)


class WorkerOverFakes(KvdConnectorWorker):
    """kvd's half in a rank, over vLLM's fakes."""

    def __setattr__(self, name: str, value: object) -> None:
        """Prepare a fake worker."""
        if name == "worker" and value is not None:
            add_what_only_kvd_has(value, kvd_worker(), OffloadingWorker)
        super().__setattr__(name, value)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register as vLLM does."""
        VllmWorker.register_kv_caches(self, kv_caches)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Collect the ended jobs in the form of vLLM's half."""
        del finished_req_ids
        results = self.get_transfer_results()
        assert not results.failed_recving  # the fakes' jobs succeed
        return set(), results.finished_recving


def bind_gpu_block_pool(connector: OffloadingConnector, gpu_block_pool: BlockPool) -> None:
    """Pass the pool on, as `KvdConnector` does."""
    if connector.connector_scheduler is not None:
        connector.connector_scheduler.bind_gpu_block_pool(gpu_block_pool)


OffloadingConnector.bind_gpu_block_pool = bind_gpu_block_pool
for module in (scheduler, offloading_connector):
    module.OffloadingConnectorScheduler = SchedulerOverFakes
for module in (worker, offloading_connector):
    module.OffloadingConnectorWorker = WorkerOverFakes
common.OffloadingWorkerMetadata = KvdWorkerMetadata


# ------------------------------------------------------- what is expected


class Expectations:
    """Which tests fail, and how many pass.

    Args:
        whole_suite: a run in which tests are missing fails.
    """

    def __init__(self, *, whole_suite: bool) -> None:
        self.whole_suite = whole_suite
        self.release = release()
        self.num_passed = 0
        self.problems: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Mark the tests that are expected to fail."""
        reasons = {
            name: expected["reason"]
            for expected in self.release["expected_failures"]
            for name in expected["tests"]
        }
        for item in items:
            reason = reasons.pop(f"{item.path.name}::{item.name}", None)
            if reason is not None:
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
        self.problems += [f"expected to fail, and not there: {name}" for name in reasons]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count."""
        self.num_passed += report.when == "call" and report.passed

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run of the whole suite in which tests are missing."""
        if not self.whole_suite:
            self.problems.clear()
        elif self.num_passed < self.release["min_passed"]:
            self.problems.append(
                f"{self.num_passed} tests passed, fewer than {self.release['min_passed']}"
            )
        if self.problems:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name what is missing."""
        for problem in self.problems:
            terminalreporter.write_line(problem, red=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--whole-suite`."""
    parser.addoption("--whole-suite", action="store_true", help="fail if tests are missing")


def pytest_configure(config: pytest.Config) -> None:
    """Expect what `releases.toml` says."""
    whole_suite = config.getoption("--whole-suite")
    config.pluginmanager.register(Expectations(whole_suite=whole_suite))
