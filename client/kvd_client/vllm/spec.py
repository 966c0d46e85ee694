"""What vLLM's offloading logic gets: a manager for the scheduler, a worker for a rank."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    OffloadingKVEventsConfig,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)
from vllm.v1.kv_offload.config import OffloadingConfig

from kvd_client import RankLayout, Scheduler, Worker
from kvd_client.adapters import OptionsError
from kvd_client.errors import get_logger, log_no_offload
from kvd_client.vllm import metrics
from kvd_client.vllm.identity import fingerprint
from kvd_client.vllm.layout import share_caches
from kvd_client.vllm.manager import KvdOffloadingManager
from kvd_client.vllm.options import read_options
from kvd_client.vllm.sleep import tell
from kvd_client.vllm.upstream import attention_backends
from kvd_client.vllm.wish import layout_line, wanted_layout
from kvd_client.vllm.worker import KvdOffloadingWorker
from kvd_proto.messages import HOST

log = get_logger("kvd_client.vllm")

_OWN_CONNECTOR = (
    "KvdOffloadingSpec works with kvd's connector only, for OffloadingConnector stops the engine"
    ' when a job fails; use kv_connector="KvdConnector"'
)


class KvdOffloadingSpec(OffloadingSpec):
    """kvd as an offloading medium of one engine. `KvdConnector` makes it.

    Args:
        config: vLLM's view of groups, chunks and ranks.
        vllm_config: the rest of the configuration, which tells engines apart.
        kv_cache_config: the KV cache as it was sized.

    Raises:
        OptionsError: invalid settings.
    """

    kv_events_config: OffloadingKVEventsConfig

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Return the connector's own metrics."""
        del extra_config
        return metrics.DEFINITIONS

    def __init__(
        self,
        config: OffloadingConfig,
        vllm_config: VllmConfig | None = None,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(config)
        if vllm_config is None or kv_cache_config is None:
            raise OptionsError(_OWN_CONNECTOR)
        self.options = read_options(self.extra_config)
        self.publishes = self.options.events and self.kv_events_config.enable_kv_cache_events
        # vLLM's own way to such events would keep all that it is told of, and not be asked for it.
        self.kv_events_config = replace(self.kv_events_config, self_describing_kv_events=False)
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config

    def get_manager(self) -> OffloadingManager:
        """Return the scheduler's side, with a session of its own."""
        scheduler = Scheduler(
            self.options.runtime_dir,
            self.config.engine_id,
            deadline=self.options.deadline,
            counts_tokens=True,
            steps=True,
            events=self.publishes,
        )
        if not scheduler.connected:
            log.warning(
                "the engine runs without offload until a daemon answers: %s",
                scheduler.wait_attached(0).why,
            )
        return KvdOffloadingManager(
            scheduler,
            pending_timeout=self.options.pending_timeout,
            seek_timeout=self.options.seek_timeout,
        )

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Not used: kvd's connector hands over the layers' views, see `serve`."""
        del kv_caches
        raise OptionsError(_OWN_CONNECTOR)

    def serve(self, views: Mapping[str, torch.Tensor]) -> KvdOffloadingWorker:
        """Return a rank's side. The KV cache's memory is shared with the daemon, in place.

        Args:
            views: of each layer's pages, as vLLM hands them to a connector.

        Raises:
            KvdClientError: with `required`, where the daemon is absent or cannot serve this memory.
            Exception: with `required`, what torch or the driver raised. Without `required` nothing
                is raised.
        """
        try:
            worker = self._register(views)
        except Exception as error:
            if self.options.required:
                raise
            log_no_offload(log, error)
            worker = None
        rank = KvdOffloadingWorker(
            worker,
            tuple(group.group_id for group in self.config.groups),
            self.config.cache.blocks_per_chunk,
            self.options,
            share=partial(self._share, views=views),
        )
        tell(rank, self._vllm_config.model_config)
        return rank

    def _register(self, views: Mapping[str, torch.Tensor]) -> Worker:
        parallel = self.config.parallel
        worker = Worker(
            self.options.runtime_dir,
            self.config.engine_id,
            parallel.rank,
            parallel.world_size,
            deadline=self.options.deadline,
            job_timeout=self.options.store_timeout,
        )
        try:
            self._share(worker, views, required=self.options.required)
        except BaseException:
            worker.close()
            raise
        return worker

    def _share(
        self, worker: Worker, views: Mapping[str, torch.Tensor], *, required: bool = False
    ) -> None:
        """Register the KV caches' memory as it is now."""
        parallel = self.config.parallel
        shared, layout = share_caches(views, self.config, self._kv_cache_config)
        try:
            self._log_layout(layout, shared.device)
            worker.register(
                shared.memory,
                layout,
                fingerprint(self.config, self._vllm_config, self.options.label),
                stage=parallel.rank // parallel.tp_size if parallel.pp_size > 1 else 0,
                required=required,
            )
        finally:
            shared.close()

    def _log_layout(self, layout: RankLayout, device: str) -> None:
        """Say how large copies are, once for the ranks that have the same layers."""
        if self.config.parallel.rank % self.config.parallel.tp_size:
            return
        wanted = wanted_layout(self._vllm_config, self.options)
        backends = attention_backends(self._vllm_config, without=wanted) if wanted else []
        taken = self._vllm_config.cache_config.get_resolved_kv_cache_layout().name
        log.info("%s", layout_line(layout, taken, wanted, backends, host=device == HOST))
