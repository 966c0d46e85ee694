"""What the connector uses of vLLM beyond its interfaces, and the check that it still exists.

vLLM's interfaces for a connector are `KVConnectorBase_V1`, `OffloadingSpec`, `OffloadingManager`
and `OffloadingWorker`. The tables below list the rest, which may change with any release. `check`
and `require` end an engine's start with one sentence, so that no step fails later.
`tests/vllm/test_upstream.py` tests that everything listed works as the connector expects.
"""

import inspect
from types import ModuleType

import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_events import EventPublisher
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
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
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor, UniformTypeKVCacheSpecs
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput

from kvd_client.vllm.options import unsupported_error

# Overridden methods and called functions, with their parameters after `self`.
METHODS: tuple[tuple[type | ModuleType, str, str], ...] = (
    # called instead of OffloadingConnector's, which makes halves that kvd replaces
    (KVConnectorBase_V1, "__init__", "vllm_config role kv_cache_config"),
    (OffloadingConnector, "get_transfer_results", "finished_req_ids"),
    (OffloadingConnector, "get_required_kvcache_layout", "vllm_config"),
    (AttentionBackend, "supported_kv_cache_layouts", ""),
    # reads spec_name and spec_module_path of the extra configuration
    (
        OffloadingConnector,
        "build_prom_metrics",
        "vllm_config metric_types labelnames per_engine_labelvalues",
    ),
    (OffloadingConnectorScheduler, "__init__", "spec vllm_config kv_cache_config"),
    (
        OffloadingConnectorScheduler,
        "get_num_new_matched_tokens",
        "request num_computed_tokens max_num_new_tokens",
    ),
    (
        OffloadingConnectorScheduler,
        "update_state_after_alloc",
        "request blocks num_external_tokens",
    ),
    # the search for what can be loaded; repeated to see what tiers would save, and with chunks
    # hidden that lack needed blocks
    (OffloadingConnectorScheduler, "_lookup", "req_status max_num_new_tokens"),
    (OffloadingConnectorScheduler, "_lookup_complete_chunks", "req_status max_num_new_tokens"),
    (OffloadingConnectorScheduler, "build_connector_meta", "scheduler_output"),
    # where refused chunks are offered again: what it stores is up to `next_stored_chunk_idx`
    (OffloadingConnectorScheduler, "_build_store_jobs", "scheduler_output"),
    (OffloadingConnectorScheduler, "request_finished", "request"),
    (OffloadingConnectorScheduler, "reset_cache", ""),
    (OffloadingConnectorScheduler, "shutdown", ""),
    # called while the engine has no requests; kvd publishes events in it
    (OffloadingConnectorScheduler, "has_pending_push_work", ""),
    (KVCacheManager, "take_events", ""),
    (EventPublisher, "publish", "events"),
    (OffloadingConnectorScheduler, "update_connector_output", "connector_output"),
    (OffloadingConnectorWorker, "__init__", "spec vllm_config kv_cache_config"),
    (OffloadingConnectorWorker, "build_connector_worker_meta", ""),
    (OffloadingConnectorWorker, "register_kv_caches", "kv_caches"),
    (OffloadingWorkerMetadata, "mark_completed", "job_id"),
    (OffloadingWorkerMetadata, "aggregate", "other"),
    # handles WAKEUP from the input queue: an idle engine calls has_pending_push_work
    (EngineCoreProc, "_handle_client_request", "request_type request"),
    # what a block's hash covers besides tokens, and its form in KV events
    (
        kv_cache_utils,
        "generate_block_hash_extra_keys",
        "request start_token_idx end_token_idx start_mm_idx",
    ),
    (kv_cache_utils, "to_event_extra_keys", "extra_keys"),
)
# Fields of dataclasses that are read or written.
FIELDS: tuple[tuple[type, str], ...] = (
    (TransferJobStatus, "keys is_store"),  # the chunks of a failed store
    (RequestOffloadState, "group_states num_locally_computed_tokens req req_context transfer_jobs"),
    # which blocks of its chunks a request has, and which chunk it stores next
    (RequestGroupState, "block_ids next_stored_chunk_idx offload_keys"),
    (OffloadingWorkerMetadata, "completed_jobs transfer_stats"),
    (SchedulerOutput, "finished_req_ids"),
    # how many tokens of prompts a step computes
    (SchedulerOutput, "num_scheduled_tokens scheduled_new_reqs scheduled_cached_reqs"),
    (SchedulerOutput, "total_num_scheduled_tokens"),
    (NewRequestData, "req_id"),
    (CachedRequestData, "req_ids num_output_tokens"),
    (KVConnectorOutput, "kv_connector_worker_meta failed_recving"),
    (KVConnectorTransferResults, "finished_recving failed_recving"),
    # where each layer's pages lie
    (KVCacheConfig, "num_blocks kv_cache_tensors kv_cache_groups"),
    (KVCacheTensor, "layers offset layer_stride block_stride host_resident"),
    (UniformTypeKVCacheSpecs, "kv_cache_specs"),
)
# Fields of the offloading configuration of a group, and of the whole one.
GROUP_FIELDS = (
    *("group_idx", "tokens_per_block", "tokens_per_chunk", "kv_cache_spec"),
    *("sliding_window_size_in_chunks", "requires_cow_source", "kv_event_group_spec"),
)
CONFIG_FIELDS = ("kv_group_configs", "blocks_per_chunk", "tokens_per_hash")
# A metric of vLLM that managers count.
ALLOCATION_FAILURE: str = getattr(_ConnectorMetricName, "ALLOCATION_FAILURE", "")


def check(*implementations: type) -> None:
    """Compare the installed vLLM with METHODS and FIELDS, and with two single names.

    Args:
        implementations: classes that must implement vLLM's interfaces completely.

    Raises:
        UnsupportedVllm: naming the first difference.
    """
    check_parameters(METHODS)
    for record, fields in FIELDS:
        missing = set(fields.split()) - getattr(record, "__dataclass_fields__", {}).keys()
        require(record, *sorted(missing))  # what is no dataclass field may be an attribute
    require(_ConnectorMetricName, "ALLOCATION_FAILURE")
    require(EngineCoreRequestType, "WAKEUP")
    for implementation in implementations:
        if abstract := sorted(getattr(implementation, "__abstractmethods__", ())):
            raise unsupported_error(
                vllm.__version__,
                f"it asks {implementation.__name__} for {', '.join(abstract)} as well",
            )


def check_parameters(methods: tuple[tuple[type | ModuleType, str, str], ...]) -> None:
    """Check that functions and methods take exactly these parameters.

    Args:
        methods: owners, names, parameters after `self`, separated by spaces.

    Raises:
        UnsupportedVllm: naming the first difference.
    """
    for owner, name, parameters in methods:
        require(owner, name)
        signature = inspect.signature(getattr(owner, name))
        actual = [parameter for parameter in signature.parameters if parameter != "self"]
        if actual != parameters.split():
            raise unsupported_error(
                vllm.__version__,
                f"{owner.__name__}.{name} takes ({', '.join(actual)}),"
                f" not ({', '.join(parameters.split())})",
            )


def require(owner: object, *names: str) -> None:
    """Check that a class or an object of vLLM has these attributes.

    Raises:
        UnsupportedVllm: naming the missing one.
    """
    for name in names:
        if not hasattr(owner, name):
            named = owner if isinstance(owner, type | ModuleType) else type(owner)
            raise unsupported_error(vllm.__version__, f"its {named.__name__} has no {name}")


def attention_backends(vllm_config: VllmConfig, *, without: str | None = None) -> list[str]:
    """Return the names of the attention backends of this process's layers, sorted.

    Args:
        vllm_config: of the engine.
        without: name of a layout; only backends that do not support it.
    """
    layers = vllm_config.compilation_config.static_forward_context.values()
    backends = [layer.get_attn_backend() for layer in layers if hasattr(layer, "get_attn_backend")]
    return sorted(
        {
            backend.get_name()
            for backend in backends
            if without is None or without not in _layouts(backend)
        }
    )


def _layouts(backend: type[AttentionBackend]) -> list[str]:
    supported = backend.supported_kv_cache_layouts()  # None: all of them
    return [layout.name for layout in (KVCacheLayout if supported is None else supported)]
