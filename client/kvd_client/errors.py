"""Errors of the client, and its loggers: an engine prints their lines among its own.

Only a caller's own mistakes and registration raise; on the serving path a
daemon that is absent, slow or broken shows as a miss, never as an exception.

::

    KvdClientError
    ├── UsageError (ValueError)
    ├── RegistrationError
    ├── Unavailable
    ├── UnsupportedMemory
    ├── UnsupportedVllm
    ├── CudaError
    └── DaemonLost              becomes a miss, never leaves the package
        ├── Refused
        └── AccessDenied
"""

import logging
from collections.abc import MutableMapping
from typing import Any

from kvd_proto.messages import ErrorCode


class KvdClientError(Exception):
    """Base of everything that the client raises."""


class UsageError(KvdClientError, ValueError):
    """An argument of the wrong type, size, dtype or device; a closed session."""


class RegistrationError(KvdClientError):
    """The daemon refused the registration.

    Args:
        code: the daemon's reason, for programs.
        text: the daemon's reason, for people.
    """

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(f"{text} [{code.value}]")
        self.code = code
        self.text = text


class Unavailable(KvdClientError):
    """No daemon within the deadline: registration with `required=True` only."""


class UnsupportedMemory(KvdClientError):
    """This memory cannot be shared with another process."""


class UnsupportedVllm(KvdClientError):
    """kvd's connector cannot work with this release of vLLM."""


class CudaError(KvdClientError):
    """A call of the CUDA driver failed.

    Args:
        code: the driver's number of the error; -1 where its bindings failed.
        name: the driver's name for it; the cause where the bindings failed.
        attempted: what was to be done.
    """

    def __init__(self, code: int, name: str, attempted: str) -> None:
        super().__init__(f"CUDA cannot {attempted}: {name} ({code})")
        self.code = code
        self.name = name
        self.attempted = attempted


class DaemonLost(KvdClientError):
    """The daemon's end is closed, or it sent something invalid, or nothing in time."""


class Refused(DaemonLost):
    """The daemon refuses this session; the text is its reason."""


class AccessDenied(DaemonLost):
    """This process may not connect to the daemon; the text has the reason and the remedy."""


def cause(error: BaseException) -> str:
    """What a log line says of an error: the first line of its text, after its type if not ours."""
    text = str(error).partition("\n")[0]
    return text if isinstance(error, KvdClientError) else f"{type(error).__name__}: {text}"


# ------------------------------------------------------------------------ logs


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
