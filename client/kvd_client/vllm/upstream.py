"""All that the connector touches of vLLM beyond its interfaces; nothing else in this package does.

vLLM's interfaces for a connector are `KVConnectorBase_V1`, `OffloadingSpec`, `OffloadingManager`
and `OffloadingWorker`. What follows is how it works inside, and may change with any release. Each
has a test in `tests/vllm/test_upstream.py` that fails when it has changed. `check` and `require`
refuse an engine's start in one sentence, so that no step fails over it later.

- `OffloadingConnector.__init__` is not called, and what it assigns is assigned here: it makes
  vLLM's own halves of the connector, in which a failed job stops the engine.
- `OffloadingConnectorWorker._load_jobs`: which request waits for a load that has failed.
- `OffloadingConnectorWorker._connector_worker_meta`, a record with `completed_jobs`,
  `transfer_stats` and `mark_completed`: what a rank reports, here with failures in it.
- `OffloadingConnectorScheduler._jobs`, records with `is_store` and `keys`: which chunks a failed
  store leaves out.
- `OffloadingConnectorScheduler._req_status`, records with `group_states`, and in each of these
  `next_stored_chunk_idx`: what a failed load did not bring is computed, and stored again.
- Of the same records `num_locally_computed_tokens` and `req`, and `offload_keys` and `block_ids`
  of their groups; `OffloadingConnectorScheduler.config` with its groups: which blocks of its
  chunks a request has, and needs. After a reset blocks that a window may have given up are taken
  out of `block_ids`.
- `OffloadingConnectorScheduler._lookup_complete_chunks`, the search for what can be loaded: it is
  repeated without chunks that lack blocks which its result needs.
- Methods of these classes that are overridden, or called with just these arguments: `METHODS`.
- `OffloadPromMetrics` reads `spec_name` and `spec_module_path` of the extra configuration: it asks
  that spec which metrics there are.
- `_ConnectorMetricName.ALLOCATION_FAILURE`: the name of a metric of vLLM's that a manager counts.
- `CompilationConfig.static_forward_context` and `get_attn_backend().get_name()` of its layers:
  which kernels the KV's bytes are for.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import _ConnectorMetricName
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    RequestGroupState,
    RequestOffloadState,
    TransferJobStatus,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.outputs import KVConnectorOutput

from kvd_client.vllm.versions import unsupported

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# By class: names, and the parameters after `self`.
METHODS: tuple[tuple[type, str, tuple[str, ...]], ...] = (
    (KVConnectorBase_V1, "__init__", ("vllm_config", "role", "kv_cache_config")),
    (OffloadingConnector, "get_transfer_results", ("finished_req_ids",)),
    (
        OffloadingConnector,
        "build_prom_metrics",
        ("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
    ),
    (OffloadingConnectorScheduler, "__init__", ("spec", "vllm_config", "kv_cache_config")),
    (
        OffloadingConnectorScheduler,
        "get_num_new_matched_tokens",
        ("request", "num_computed_tokens", "max_num_new_tokens"),
    ),
    (
        OffloadingConnectorScheduler,
        "update_state_after_alloc",
        ("request", "blocks", "num_external_tokens"),
    ),
    (
        OffloadingConnectorScheduler,
        "_lookup_complete_chunks",
        ("req_status", "max_num_new_tokens"),
    ),
    (OffloadingConnectorScheduler, "build_connector_meta", ("scheduler_output",)),
    (OffloadingConnectorScheduler, "request_finished", ("request",)),
    (OffloadingConnectorScheduler, "reset_cache", ()),
    (OffloadingConnectorScheduler, "update_connector_output", ("connector_output",)),
    (OffloadingConnectorWorker, "__init__", ("spec", "vllm_config", "kv_cache_config")),
    (OffloadingConnectorWorker, "build_connector_worker_meta", ()),
    (OffloadingWorkerMetadata, "mark_completed", ("job_id",)),
    (OffloadingWorkerMetadata, "aggregate", ("other",)),
)
# Fields that are read or written, of records that are dataclasses.
FIELDS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (TransferJobStatus, ("keys", "is_store")),
    (RequestOffloadState, ("group_states", "num_locally_computed_tokens", "req")),
    (RequestGroupState, ("block_ids", "next_stored_chunk_idx", "offload_keys")),
    (OffloadingWorkerMetadata, ("completed_jobs", "transfer_stats")),
    (KVConnectorOutput, ("kv_connector_worker_meta", "failed_recving")),
    (KVConnectorTransferResults, ("finished_recving", "failed_recving")),
)
# Of a group's configuration, and of the whole.
GROUP = (
    *("group_idx", "tokens_per_block", "tokens_per_chunk", "kv_cache_spec"),
    *("sliding_window_size_in_chunks", "requires_cow_source"),
)
CONFIG = ("kv_group_configs", "blocks_per_chunk")
ALLOCATION_FAILURE: str = getattr(_ConnectorMetricName, "ALLOCATION_FAILURE", "")


def check(*implementations: type) -> None:
    """Compare the installed vLLM with what is used of it, as far as its classes show it.

    Args:
        implementations: classes that must implement all that vLLM's interfaces ask for.

    Raises:
        UnsupportedVllm: naming the first thing that is another.
    """
    for owner, name, wanted in METHODS:
        require(owner, name)
        parameters = inspect.signature(getattr(owner, name)).parameters
        found = tuple(parameter for parameter in parameters if parameter != "self")
        if found != wanted:
            raise unsupported(
                vllm.__version__,
                f"{owner.__name__}.{name} takes ({', '.join(found)}), not ({', '.join(wanted)})",
            )
    for record, fields in FIELDS:
        missing = set(fields) - getattr(record, "__dataclass_fields__", {}).keys()
        require(record, *sorted(missing))
    require(_ConnectorMetricName, "ALLOCATION_FAILURE")
    for kind in implementations:
        if asked := sorted(getattr(kind, "__abstractmethods__", ())):
            raise unsupported(
                vllm.__version__, f"it asks {kind.__name__} for {', '.join(asked)} as well"
            )


def require(owner: object, *names: str) -> None:
    """Refuse to go on where a class or an object of vLLM's lacks an attribute.

    Raises:
        UnsupportedVllm: naming it.
    """
    for name in names:
        if not hasattr(owner, name):
            kind = owner if isinstance(owner, type) else type(owner)
            raise unsupported(vllm.__version__, f"its {kind.__name__} has no {name}")


class ConnectorSide(OffloadingConnector):
    """vLLM's offloading connector without the halves that it would make itself."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self.connector_scheduler: SchedulerSide | None = None
        self.connector_worker: RankSide | None = None


def name_spec(extra_config: dict[str, Any], spec: type, module: str) -> None:
    """Say where `OffloadPromMetrics` finds which metrics a spec has."""
    extra_config.setdefault("spec_name", spec.__name__)
    extra_config.setdefault("spec_module_path", module)


class SchedulerSide(OffloadingConnectorScheduler):
    """vLLM's half in the scheduler, and what kvd asks and changes in it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        require(self, "manager", "config", "_jobs", "_req_status")
        require(self.config, *CONFIG)
        for group in self.config.kv_group_configs:
            require(group, *GROUP)

    def store_keys(self, job_id: int) -> Collection[OffloadKey]:
        """Keys of the store that has this number; none of a load, or of a job that was dropped."""
        job = self._jobs.get(job_id)
        return job.keys if job is not None and job.is_store else ()

    @property
    def requests(self) -> Mapping[str, RequestOffloadState]:
        """The state of every request, by its id."""
        states: Mapping[str, RequestOffloadState] = self._req_status
        return states

    def search(self, req_id: str, find: Callable[[], int | None]) -> int | None:
        """How many tokens can be loaded for a request; `find` is vLLM's search."""
        del req_id
        return find()

    def _lookup_complete_chunks(
        self, req_status: RequestOffloadState, max_num_new_tokens: int | None = None
    ) -> int | None:
        find = super()._lookup_complete_chunks
        return self.search(req_status.req.request_id, lambda: find(req_status, max_num_new_tokens))

    def store_again(self, req_id: str) -> bool:
        """Have all chunks of a request offered for storing again; false where it is gone."""
        status = self._req_status.get(req_id)
        if status is None:
            return False
        for group in status.group_states:
            group.next_stored_chunk_idx = 0
        return True

    def reset_cache(self) -> None:
        """Drop every chunk; of running requests what is still theirs is offered again.

        vLLM offers all from their first chunk on. It watches whether a window's blocks have become
        another request's from the next chunk to store on only: what is before may be anyone's.
        """
        size = self.config.blocks_per_chunk
        for status in self._req_status.values():
            for config, group in zip(
                self.config.kv_group_configs, status.group_states, strict=True
            ):
                if config.sliding_window_size_in_chunks is not None:
                    passed = min(group.next_stored_chunk_idx * size, len(group.block_ids))
                    group.block_ids[:passed] = [0] * passed
        super().reset_cache()


class RankSide(OffloadingConnectorWorker):
    """vLLM's half in a rank, and what kvd asks and changes in it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        require(self, "worker", "_load_jobs", "_connector_worker_meta")

    def take_load(self, job_id: int) -> str | None:
        """The request whose load this job was, once; None of a store."""
        request: str | None = self._load_jobs.pop(job_id, None)
        return request

    @property
    def report(self) -> OffloadingWorkerMetadata:
        """What this rank has to tell; vLLM enters the stores that this rank does not write."""
        return self._connector_worker_meta

    @report.setter
    def report(self, report: OffloadingWorkerMetadata) -> None:
        self._connector_worker_meta = report


def attention_backends(vllm_config: "VllmConfig") -> list[str]:
    """Names of the attention kernels of this process's layers, sorted."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    return sorted(
        {
            layer.get_attn_backend().get_name()
            for layer in layers
            if hasattr(layer, "get_attn_backend")
        }
    )
