"""vLLM's connectors that measure the step which computes what a hit has left, and disturb it.

They are loaded by name into an engine whose scheduler and worker are one process, with one thread
that computes. Before each step with tokens they do what the file KVD_BENCH_DISTURB holds, once;
of each such step they append a line of JSON to the file that KVD_BENCH_STEPS names.
`compute_step.py` reads them.
"""

import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvd_client.vllm import KvdConnector

STEPS_FILE, DISTURB_FILE = "KVD_BENCH_STEPS", "KVD_BENCH_DISTURB"
EVICT_BYTES = 2**28  # of memory that nothing else uses: several times a processor's caches
PAUSE_SECONDS, WORK_SECONDS = 0.05, 0.015
PAGE_BYTES = 4096


class _Process:
    """What both halves of the connector know of their process."""

    other = np.zeros(EVICT_BYTES, np.uint8)
    kv_caches: list[torch.Tensor] = []  # noqa: RUF012


class ProbedOffloading(OffloadingConnector):  # type: ignore[misc]  # types are checked without vLLM
    """vLLM's offloading connector."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Keep the tensors, to read them."""
        super().register_kv_caches(kv_caches)
        _Process.kv_caches[:] = kv_caches.values()

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Disturb the step that follows, if it has tokens."""
        meta = super().build_connector_meta(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            _disturb(Path(os.environ[DISTURB_FILE]))
        return meta

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """A step's beginning in the worker."""
        super().bind_connector_metadata(connector_metadata)
        self._begin = _reading()

    def start_load_kv(self, forward_context: Any, **keywords: Any) -> None:
        """Behind the model's computing of the step, if there is any."""
        if forward_context.attn_metadata is not None:
            end = _reading()
            step = {name: end[name] - begin for name, begin in self._begin.items()}
            with Path(os.environ[STEPS_FILE]).open("a") as steps:
                steps.write(json.dumps(step | {"at": time.perf_counter()}) + "\n")
        super().start_load_kv(forward_context, **keywords)


class ProbedKvd(ProbedOffloading, KvdConnector):
    """kvd's connector, in the same way."""


def _reading() -> dict[str, float]:
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return {
        "wall_ms": 1e3 * time.perf_counter(),
        "processor_ms": 1e3 * time.thread_time(),
        "faults": usage.ru_minflt,
        "preempted": usage.ru_nivcsw,
        "waited": usage.ru_nvcsw,
    }


def _disturb(file: Path) -> None:
    what = file.read_text() if file.exists() else ""
    file.unlink(missing_ok=True)
    if what == "evict":
        _Process.other += 1
    elif what == "touch":
        for cache in _Process.kv_caches:
            view = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage()).numpy()
            view[::PAGE_BYTES].sum()
    elif what == "read":
        for cache in _Process.kv_caches:
            view = torch.empty(0, dtype=torch.int64).set_(cache.untyped_storage()).numpy()
            view.sum()
    elif what == "work":
        end = time.perf_counter() + WORK_SECONDS
        while time.perf_counter() < end:
            pass
    elif what == "pause":
        time.sleep(PAUSE_SECONDS)
