"""What the connector needs of the installed vLLM, and the check that it is there.

vLLM's interfaces for a connector are `KVConnectorBase_V1`, `OffloadingSpec`, `OffloadingManager`
and `OffloadingWorker`: kvd's methods must take every call that these allow. The tables below list
what else the connector uses, which may change with any release. `check` and `require` end an
engine's start with one sentence, so that no step fails later. `tests/vllm/test_upstream.py` tests
that everything listed works as the connector expects.
"""

import inspect
from inspect import Parameter, Signature
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
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor, UniformTypeKVCacheSpecs
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput

from kvd_client.vllm.options import unsupported_error

# Called functions, and overridden methods of vLLM's private classes, with their parameters after
# `self`.
METHODS: tuple[tuple[type | ModuleType, str, str], ...] = (
    # called instead of OffloadingConnector's, which makes halves that kvd replaces
    (KVConnectorBase_V1, "__init__", "vllm_config role kv_cache_config"),
    (AttentionBackend, "supported_kv_cache_layouts", ""),
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
    (OffloadingConnectorWorker, "start_kv_transfers", "metadata"),
    (OffloadingConnectorWorker, "prepare_store_kv", "metadata"),
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
# What loads within a step use besides, where the engine has them.
STEP_LOAD_METHODS: tuple[tuple[type | ModuleType, str, str], ...] = (
    (
        OffloadingConnectorScheduler,
        "_reserve_sync_load",
        "req_status num_computed_tokens num_hit_tokens",
    ),
    (Scheduler, "_preempt_request", "request timestamp drop_stale_output"),
    (BlockPool, "touch", "blocks"),
    (BlockPool, "free_blocks", "ordered_blocks"),
    (BlockPool, "evict_blocks", "block_ids"),
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
_REST = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
# A metric of vLLM that managers count.
ALLOCATION_FAILURE: str = getattr(_ConnectorMetricName, "ALLOCATION_FAILURE", "")


def check(*implementations: type) -> None:
    """Check that the installed vLLM has what the connector needs of it.

    1. Functions and methods take the parameters in METHODS, records have the FIELDS.
    2. The implementations implement vLLM's interfaces completely, and take every call that the
       interfaces allow.

    Args:
        implementations: kvd's subclasses of vLLM's interfaces.

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
        _check_calls(implementation)


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


def _check_calls(implementation: type) -> None:
    """Check that a class takes every call that its base classes' public methods allow.

    A method that no base class has is not checked: this release does not call it.

    Raises:
        UnsupportedVllm: naming the first method, and the parameter.
    """
    names = [name for name in vars(implementation) if not name.startswith("_")]
    for base in implementation.__mro__[1:]:
        for name in sorted(vars(base).keys() & names):
            theirs, own = getattr(base, name), getattr(implementation, name)
            method, own_method = f"{base.__name__}.{name}", f"{implementation.__name__}.{name}"
            if callable(theirs) != callable(own):
                kind = "a method" if callable(theirs) else "a property"
                difference = f"{method} is {kind}, unlike {own_method}"
                raise unsupported_error(vllm.__version__, difference)
            if not callable(theirs):
                continue
            refused = refused_parameter(inspect.signature(theirs), inspect.signature(own))
            if refused is not None:
                raise unsupported_error(
                    vllm.__version__,
                    f"{method} allows calls that {own_method} does not take, because of the"
                    f" parameter {refused}",
                )


def refused_parameter(interface: Signature, own: Signature) -> str | None:
    """Return why a method does not take every call that an interface allows; None if it does.

    1. A parameter of the interface has the same name in the method, the same place if it can be
       passed by position, and a default if it has one in the interface. Or `*args` and `**kwargs`
       stand for it.
    2. The method's other parameters have defaults.

    Returns:
        The name of the first parameter that differs, the interface's or one of the method alone.
    """
    kinds = {parameter.kind for parameter in own.parameters.values()}
    places, own_places = _names_by_position(interface), _names_by_position(own)
    for name, parameter in interface.parameters.items():
        match = own.parameters.get(name)
        place = places.index(name) if name in places else None
        if parameter.kind in _REST:
            is_taken = parameter.kind in kinds
        elif match is None or match.kind in _REST:
            is_taken = Parameter.VAR_KEYWORD in kinds
            if place is not None and is_taken:
                is_taken = Parameter.VAR_POSITIONAL in kinds and place >= len(own_places)
        elif place is not None:
            is_taken = own_places[place : place + 1] == [name] and match.kind >= parameter.kind
        else:
            is_taken = (
                name not in own_places[: len(places)]
                and match.kind is not Parameter.POSITIONAL_ONLY
            )
        if is_taken and match is not None and parameter.default is not Parameter.empty:
            is_taken = not _is_required(match)
        if not is_taken:
            return name
    for name, parameter in own.parameters.items():
        if name not in interface.parameters and _is_required(parameter):
            return name
    return None


def _names_by_position(signature: Signature) -> list[str]:
    """Return the names of the parameters that can be passed by position."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, each in signature.parameters.items() if each.kind in kinds]


def _is_required(parameter: Parameter) -> bool:
    return parameter.default is Parameter.empty and parameter.kind not in _REST


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
