"""The plug-in by which vLLM knows `"kv_connector": "KvdConnector"`: `vllm.general_plugins`.

Every process of every vLLM in this environment runs `register`, with kvd or without. So this is a
module of its own that does not import kvd's client; vLLM's factory of connectors is imported by
its engine, its workers and its models anyway. Nothing here raises.
"""

import importlib
import logging

FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
NAME, MODULE = "KvdConnector", "kvd_client.vllm"

log = logging.getLogger("vllm.kvd")  # below vLLM's own, whose handlers print it


def register() -> None:
    """Make `KvdConnector` a name that vLLM knows. May be called again."""
    try:
        factory = importlib.import_module(FACTORY).KVConnectorFactory
        factory.register_connector(NAME, MODULE, NAME)
    except ValueError:
        log.debug("%s is registered already", NAME)
    except Exception:  # whatever vLLM's factory has become, an engine without kvd must start
        log.exception(
            "this vLLM does not take kvd's connector by its name alone; add"
            ' "kv_connector_module_path": "%s" to --kv-transfer-config',
            MODULE,
        )
