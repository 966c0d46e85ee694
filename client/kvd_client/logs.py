"""The client's loggers. An engine prints their lines among its own, so each begins with "kvd: "."""

import logging
from collections.abc import MutableMapping
from typing import Any

from kvd_client.errors import KvdClientError, cause


class ClientLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose lines begin with "kvd: "."""

    def process(
        self, msg: object, kwargs: MutableMapping[str, Any]
    ) -> tuple[object, MutableMapping[str, Any]]:
        """See `logging.LoggerAdapter`."""
        return f"kvd: {msg}", kwargs


def get_logger(name: str = "kvd_client") -> ClientLogger:
    """Return the logger of this name, `kvd_client` or one below it."""
    return ClientLogger(logging.getLogger(name))


def log_no_offload(log: ClientLogger, error: Exception) -> None:
    """Log why an engine runs without offload, with the stack of an error that is not kvd's."""
    if isinstance(error, KvdClientError):
        log.error("%s; the engine runs without offload", cause(error))
    else:
        text = "the KV cache cannot be registered: %s; the engine runs without offload"
        log.error(text, cause(error), exc_info=error)
