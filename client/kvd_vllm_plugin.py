"""The plug-in of `vllm.general_plugins` that registers `"kv_connector": "KvdConnector"` with vLLM.

Every process of every vLLM in this environment runs `register`, with or without kvd. So this module
does not import kvd's client, and nothing here raises. vLLM's factory of connectors, which it does
import, is imported by vLLM's engine, workers and models anyway.
"""

import importlib
import logging

FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
NAME, MODULE = "KvdConnector", "kvd_client.vllm"

log = logging.getLogger("vllm.kvd")  # a child of vLLM's logger, so its handlers print the lines


def register() -> None:
    """Register the name `KvdConnector` with vLLM. May be called again."""
    try:
        factory = importlib.import_module(FACTORY).KVConnectorFactory
        factory.register_connector(NAME, MODULE, NAME)
    except ValueError:
        log.debug("%s is registered already", NAME)
    except Exception:  # an engine without kvd must start with any vLLM
        log.exception(
            "this vLLM does not take kvd's connector by its name alone; add"
            ' "kv_connector_module_path": "%s" to --kv-transfer-config',
            MODULE,
        )
