"""kvd_client.vllm: vLLM on a kvd daemon.

::

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvdConnector",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

vLLM's own scheduler logic decides what is looked up, stored and loaded; kvd
implements its manager (in the scheduler) and its worker (in every rank) by
their own method names. `kvd_vllm_plugin.py` makes vLLM know the name,
`options.py` has the settings, `upstream.py` what is used of vLLM beyond its
interfaces, `versions.py` which releases are tested, `docs/vllm.md` the rest.

Raises:
    UnsupportedVllm: when it is imported, where vLLM is another than the connector needs.
"""

import vllm

from kvd_client.vllm.options import unsupported

try:
    from kvd_client.engine_options import OptionsError
    from kvd_client.vllm.connector import KvdConnector
    from kvd_client.vllm.manager import KvdOffloadingManager
    from kvd_client.vllm.options import Options
    from kvd_client.vllm.spec import KvdOffloadingSpec
    from kvd_client.vllm.worker import KvdOffloadingWorker
except ImportError as error:
    if (error.name or "").partition(".")[0] != "vllm":
        raise  # something else is missing here, and vLLM may be as it should
    raise unsupported(vllm.__version__, str(error)) from None

__all__ = [
    "KvdConnector",
    "KvdOffloadingManager",
    "KvdOffloadingSpec",
    "KvdOffloadingWorker",
    "Options",
    "OptionsError",
]
