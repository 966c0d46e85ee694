"""KvdConnector: vLLM's offloading connector, made to survive its cache.

vLLM's own worker asserts that every job succeeds. Here a failed store is given
up, and a failed load is reported for its request, which vLLM then computes.
"""

import logging
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config

from kvd_client.vllm.identity import random_hash_seed
from kvd_client.vllm.manager import KvdOffloadingManager
from kvd_client.vllm.options import OptionsError
from kvd_client.vllm.rank import KvdConnectorWorker
from kvd_client.vllm.scheduling import KvdConnectorScheduler
from kvd_client.vllm.spec import KvdOffloadingSpec
from kvd_client.vllm.upstream import ConnectorSide, check, name_spec
from kvd_client.vllm.versions import untested
from kvd_client.vllm.worker import KvdOffloadingWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logging.getLogger("kvd_client.vllm")


class KvdConnector(ConnectorSide):
    """The connector of one process: of the scheduler's, or of one rank's.

    Raises:
        OptionsError: a configuration that cannot be meant.
        UnsupportedVllm: this vLLM works in another way than the connector needs.
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        check(type(self), KvdOffloadingSpec, KvdOffloadingManager, KvdOffloadingWorker)
        super().__init__(vllm_config, role, kv_cache_config)
        _log_as_vllm_does()
        _check_failure_policy(vllm_config)
        config = build_offloading_config(vllm_config, kv_cache_config)
        spec = KvdOffloadingSpec(config, vllm_config, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            for warning in (untested(vllm.__version__), random_hash_seed(vllm_config)):
                if warning:
                    log.warning(warning)
            self.connector_scheduler = KvdConnectorScheduler(spec, vllm_config, kv_cache_config)
        else:
            self.connector_worker = KvdConnectorWorker(spec, vllm_config, kv_cache_config)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that have ended since the last step, with those that failed."""
        del finished_req_ids
        assert self.connector_worker is not None  # noqa: S101  # a rank's connector has one
        return self.connector_worker.get_transfer_results()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Build vLLM's metrics of offloading, with this spec's."""
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        name_spec(extra, KvdOffloadingSpec, "kvd_client.vllm")
        return super().build_prom_metrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues
        )


def _check_failure_policy(vllm_config: "VllmConfig") -> None:
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    if policy != "recompute":
        raise OptionsError(
            f'kv_load_failure_policy="{policy}" fails a request when its chunks cannot be loaded;'
            ' set kv_load_failure_policy="recompute" in --kv-transfer-config'
        )


def _log_as_vllm_does() -> None:
    """Let kvd's lines appear where vLLM's do, in its format."""
    ours, theirs = logging.getLogger("kvd_client"), logging.getLogger("vllm")
    if not ours.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.level)
        ours.propagate = False
