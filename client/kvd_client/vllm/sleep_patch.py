"""Sleep mode with vLLM 0.32, which does not notify connectors of it: a patch.

Memory that the daemon has mapped is not freed when vLLM frees it, and the memory that vLLM
allocates at the same addresses when it wakes up is other memory. The memory is freed and allocated
by a backend, which a rank's process creates by name when it first needs one. In the factory, kvd
replaces that backend by a subclass that notifies the ranks of the process.

vLLM 0.33 calls `KvdConnector.unregister_kv_caches` and `restore_kv_caches` instead. Without vLLM
0.32, this module, its call in `spec.py` and its test can go.
"""

import weakref
from collections.abc import Callable

from vllm.config import ModelConfig
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeBackendFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from kvd_client.vllm.upstream import check_parameters, require
from kvd_client.vllm.worker import KvdOffloadingWorker

KV_CACHE_TAG = "kv_cache"  # vLLM's tag for the memory of KV caches
# What frees a KV cache and allocates it again; as `upstream.METHODS`.
_METHODS = (
    (SleepModeBackendFactory, "get_backend_class", "name"),
    (SleepModeBackend, "suspend", "level"),
    (SleepModeBackend, "resume", "tags"),
    (SleepModeBackend, "discard", "tags"),
)

_RANKS: weakref.WeakSet[KvdOffloadingWorker] = weakref.WeakSet()


class _NotifyingBackend(SleepModeBackend):
    """Notifies the ranks of this process; the next class in the MRO does the work."""

    def suspend(self, level: int = 1) -> None:
        """Free the memory of weights and KV caches."""
        for rank in tuple(_RANKS):
            rank.release_memory()
        super().suspend(level)

    def resume(self, tags: list[str] | None = None) -> None:
        """Allocate the memory with these tags again; None: all of it."""
        super().resume(tags)
        if tags is None or KV_CACHE_TAG in tags:
            for rank in tuple(_RANKS):
                rank.restore_memory()

    def discard(self, tags: tuple[str, ...]) -> None:
        """Free the memory with these tags."""
        if KV_CACHE_TAG in tags:
            for rank in tuple(_RANKS):
                rank.release_memory()
        super().discard(tags)


def notify_of_sleep(rank: KvdOffloadingWorker, model_config: ModelConfig) -> None:
    """Notify this rank from now on before its KV cache is freed and after it is allocated again.

    Does nothing if vLLM notifies the connector itself, or if the engine is not configured to free
    its KV cache.

    Raises:
        UnsupportedVllm: vLLM's backends have changed.
    """
    if hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
        return
    if not (model_config.enable_sleep_mode or model_config.enable_cumem_allocator):
        return
    check_parameters(_METHODS)
    require(SleepModeBackendFactory, "_registry")
    _RANKS.add(rank)
    name = model_config.sleep_mode_backend
    backend = SleepModeBackendFactory.get_backend_class(name)
    if not issubclass(backend, _NotifyingBackend):
        notifying = type(
            backend.__name__, (_NotifyingBackend, backend), {"__module__": backend.__module__}
        )
        backends: dict[str, Callable[[], type]] = SleepModeBackendFactory._registry  # noqa: SLF001  # what the factory looks up
        backends[name] = lambda: notifying
