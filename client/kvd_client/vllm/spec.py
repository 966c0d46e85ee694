"""The offloading spec: makes the manager of a scheduler and the worker of a rank.

It also makes the engine's fingerprint, which decides with which engines it shares chunks.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import vllm
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

from kvd_client import Fingerprint, RankLayout, Scheduler, Worker
from kvd_client.adapters import OptionsError, digest, hub_commits, weight_files
from kvd_client.errors import get_logger, log_no_offload
from kvd_client.vllm import metrics
from kvd_client.vllm.layout import describe_caches, layout_line, requested_layout
from kvd_client.vllm.manager import KvdOffloadingManager
from kvd_client.vllm.options import read_options, release
from kvd_client.vllm.sleep_patch import notify_of_sleep
from kvd_client.vllm.upstream import attention_backends
from kvd_client.vllm.worker import KvdOffloadingWorker

log = get_logger("kvd_client.vllm")

_OWN_CONNECTOR = (
    "KvdOffloadingSpec works with kvd's connector only, for OffloadingConnector stops the engine"
    ' when a job fails; use kv_connector="KvdConnector"'
)


class KvdOffloadingSpec(OffloadingSpec):
    """kvd as the offloading medium of one engine. `KvdConnector` makes it.

    Args:
        config: vLLM's view of groups, chunks and ranks.
        vllm_config: vLLM's whole configuration.
        kv_cache_config: sizes and planned places of the KV cache.

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

    @classmethod
    def config_info_keys(cls, extra_config: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the labels that the manager's `config_info` fills."""
        del extra_config
        return metrics.CONFIG_LABELS

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
        # With self-describing events vLLM would collect descriptions that kvd never takes.
        self.kv_events_config = replace(self.kv_events_config, self_describing_kv_events=False)
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config

    def get_manager(self) -> OffloadingManager:
        """Return the scheduler's side, with its own session."""
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
            config_info=metrics.config_info(
                self.config.engine_id, self.config.cache.blocks_per_chunk, self.options
            ),
        )

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Raise: kvd's connector passes the layers' views to `make_worker` instead."""
        del kv_caches
        raise OptionsError(_OWN_CONNECTOR)

    def make_worker(self, views: Mapping[str, torch.Tensor]) -> KvdOffloadingWorker:
        """Return a rank's side, with the KV cache's memory registered at the daemon.

        Args:
            views: of each layer's pages, as vLLM hands them to a connector.

        Raises:
            KvdClientError: with `required`: the daemon is absent or cannot serve this memory.
            Exception: with `required`: what torch or the driver raised. Without `required` nothing
                is raised, and the rank runs without offload.
        """
        try:
            worker = self._connect_and_register(views)
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
            register=partial(self._register, views=views),
        )
        notify_of_sleep(rank, self._vllm_config.model_config)
        return rank

    def _connect_and_register(self, views: Mapping[str, torch.Tensor]) -> Worker:
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
            self._register(worker, views, required=self.options.required)
        except BaseException:
            worker.close()
            raise
        return worker

    def _register(
        self, worker: Worker, views: Mapping[str, torch.Tensor], *, required: bool = False
    ) -> None:
        """Register the KV cache's present memory."""
        parallel = self.config.parallel
        caches, layout = describe_caches(views, self.config, self._kv_cache_config)
        self._log_layout(layout, is_host=caches.is_host)
        worker.register(
            caches,
            layout,
            fingerprint(self.config, self._vllm_config, self.options.label),
            stage=parallel.rank // parallel.tp_size if parallel.pp_size > 1 else 0,
            required=required,
            transfer=self.options.transfer,
            staging_bytes=self.options.staging_bytes,
        )

    def _log_layout(self, layout: RankLayout, *, is_host: bool) -> None:
        """Log the layout, once for all ranks with the same layers."""
        if self.config.parallel.rank % self.config.parallel.tp_size:
            return
        requested = requested_layout(self._vllm_config, self.options)
        backends = attention_backends(self._vllm_config, without=requested) if requested else []
        actual = self._vllm_config.cache_config.get_resolved_kv_cache_layout().name
        log.info("%s", layout_line(layout, actual, requested, backends, host=is_host))


def fingerprint(config: OffloadingConfig, vllm_config: VllmConfig, label: str) -> Fingerprint:
    """Return what KV bytes depend on beyond block hashes and the registered layout.

    vLLM's block hashes cover prompt tokens, LoRA, images and cache salts; the layout covers layers,
    pages and ranks. A needless part costs misses; a missing one costs wrong tokens.

    The daemon refuses a rank whose fingerprint is not that of the engine's other ranks.
    """
    model, cache, load = vllm_config.model_config, vllm_config.cache_config, vllm_config.load_config
    speculative = vllm_config.speculative_config
    parallel = config.parallel
    return Fingerprint(
        model=str(model.model),
        revision=digest(
            model.revision,
            weight_files(model.model),
            hub_commits(model.model, model.revision, load.download_dir),
            model.hf_config.to_dict(),
            model.quantization,
            [load.load_format, model.seed if load.load_format == "dummy" else None],
            speculative and [speculative.model, speculative.revision, speculative.method],
        ),
        dtype=(
            f"{model.dtype} weights, {config.model.dtype} cache,"
            f" {cache.mamba_cache_dtype} and {cache.mamba_ssm_cache_dtype} states"
        ).replace("torch.", ""),
        kv_layout=(
            f"{config.kv_cache_layout}, {cache.prefix_caching_hash_algo},"
            f" vllm {release(vllm.__version__)}"
        ),
        attention_backend=", ".join(attention_backends(vllm_config)),
        parallelism=(
            f"tp {parallel.tp_size} pp {parallel.pp_size} pcp {parallel.pcp_size}"
            f" dcp {parallel.dcp_size}"
            f" interleave {vllm_config.parallel_config.cp_kv_cache_interleave_size}"
            f" {os.environ.get('VLLM_PP_LAYER_PARTITION', '')}".strip()
        ),
        label=label,
    )


def hash_seed_warning(vllm_config: VllmConfig) -> str:
    """Return a warning if block hashes differ from process to process, else ""."""
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if not algorithm.startswith("xxhash") or os.environ.get("PYTHONHASHSEED") is not None:
        return ""
    return (
        f"prefix_caching_hash_algo={algorithm} is seeded anew in every process, so that no other"
        " and no restarted engine finds this engine's chunks; use sha256 (vLLM's default), or set"
        " PYTHONHASHSEED to the same value for all engines"
    )
