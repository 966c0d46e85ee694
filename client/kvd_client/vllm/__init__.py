"""kvd_client.vllm: vLLM on a kvd daemon.

::

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvdConnector",
        "kv_connector_module_path": "kvd_client.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"runtime_dir": "/run/kvd", "blocks_per_chunk": 4}}'

vLLM's own scheduler logic decides what is looked up, stored and loaded; kvd
implements its manager (in the scheduler) and its worker (in every rank) by
their own method names. `options.py` has the settings, `docs/vllm.md` the rest.
"""

from kvd_client.vllm.connector import KvdConnector
from kvd_client.vllm.manager import KvdOffloadingManager
from kvd_client.vllm.options import Options, OptionsError
from kvd_client.vllm.spec import KvdOffloadingSpec
from kvd_client.vllm.worker import KvdOffloadingWorker

__all__ = [
    "KvdConnector",
    "KvdOffloadingManager",
    "KvdOffloadingSpec",
    "KvdOffloadingWorker",
    "Options",
    "OptionsError",
]
