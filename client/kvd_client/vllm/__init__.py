"""kvd_client.vllm: vLLM on a kvd daemon.

::

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvdConnector",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

vLLM's own scheduler logic decides what is looked up, stored and loaded. kvd implements vLLM's
offloading manager (in the scheduler) and worker (in every rank). `kvd_vllm_plugin.py` registers the
connector's name. `connector.py` is the connector, with `scheduler.py` as its scheduler half;
`spec.py` makes `manager.py` and `worker.py`; `layout.py` shares the KV cache; `options.py` has the
settings; `upstream.py` lists what is used of vLLM beyond its interfaces. See `docs/vllm.md`.

Raises:
    UnsupportedVllm: at import: this vLLM lacks something that the connector needs.
"""

import vllm

from kvd_client.vllm.options import unsupported_error

try:
    from kvd_client.adapters import OptionsError
    from kvd_client.vllm.connector import KvdConnector
    from kvd_client.vllm.manager import KvdOffloadingManager
    from kvd_client.vllm.options import VllmOptions
    from kvd_client.vllm.spec import KvdOffloadingSpec
    from kvd_client.vllm.worker import KvdOffloadingWorker
except ImportError as error:
    if (error.name or "").partition(".")[0] != "vllm":
        raise  # something else is missing
    raise unsupported_error(vllm.__version__, str(error)) from None

__all__ = [
    "KvdConnector",
    "KvdOffloadingManager",
    "KvdOffloadingSpec",
    "KvdOffloadingWorker",
    "OptionsError",
    "VllmOptions",
]
