"""The client's errors, the checks of arguments that raise `UsageError`, and its loggers.

Only invalid arguments and registration raise. On the serving path a daemon that is absent, slow or
broken is a miss, never an exception. Arguments are checked before anything is done: a refused call
has changed nothing, and no background thread meets a value that it cannot send.

::

    KvdClientError
    ├── UsageError (ValueError)
    ├── RegistrationError
    ├── Unavailable
    ├── UnsupportedMemory
    ├── UnsupportedVllm
    ├── CudaError
    ├── InternalError
    └── DaemonLost              becomes a miss, never leaves the package
        ├── Refused
        └── AccessDenied
"""

import logging
import reprlib
from collections.abc import Iterable, MutableMapping
from typing import Any

import numpy as np

from kvd_proto.messages import ErrorCode


class KvdClientError(Exception):
    """Base of everything that the client raises."""


class UsageError(KvdClientError, ValueError):
    """An argument of the wrong type, size, dtype or device; a closed session."""


class RegistrationError(KvdClientError):
    """The daemon refused the registration; `code` and `text` are its reason."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(f"{text} [{code.value}]")
        self.code = code
        self.text = text


class Unavailable(KvdClientError):
    """No daemon within the timeout: registration with `required=True` only."""


class UnsupportedMemory(KvdClientError):
    """This memory cannot be shared with another process."""


class UnsupportedVllm(KvdClientError):
    """kvd's connector cannot work with this release of vLLM."""


class CudaError(KvdClientError):
    """A call of the CUDA driver failed.

    `code` and `name` are the driver's; -1 and the reason if its Python bindings failed. `attempted`
    follows "CUDA cannot".
    """

    def __init__(self, code: int, name: str, attempted: str) -> None:
        super().__init__(f"CUDA cannot {attempted}: {name} ({code})")
        self.code = code
        self.name = name
        self.attempted = attempted


class InternalError(KvdClientError):
    """An invariant of the client does not hold: a bug in kvd. Only `check_integrity` raises it."""


class DaemonLost(KvdClientError):
    """The session cannot go on: the daemon has ended, refuses, is too slow, or sent invalid data.

    A call that meets it misses, and the session connects again; no caller of the package sees it.
    """


class Refused(DaemonLost):
    """The daemon refuses this session; the text is its reason."""


class AccessDenied(DaemonLost):
    """This process may not connect to the daemon; the text has the reason and the remedy."""


def cause(error: BaseException) -> str:
    """Return an error for a log line: the first line of its text, after its type if not ours."""
    text = str(error).partition("\n")[0]
    return text if isinstance(error, KvdClientError) else f"{type(error).__name__}: {text}"


# ------------------------------------------------------------------- arguments

MAX_SECONDS = 1e7  # more is a mistake, and above the largest timeout of a lock

shown = reprlib.repr  # short enough for a message


def check_seconds(
    name: str, value: object, highest: float = MAX_SECONDS, *, positive: bool = False
) -> float:
    """Check a duration."""
    if not isinstance(value, (int, float)) or not 0 <= value <= highest or (positive and not value):
        lowest = "above 0" if positive else "0"
        raise UsageError(f"{name}={shown(value)}: seconds are needed, {lowest} to {highest:g}")
    return float(value)


def check_int(name: str, value: object, low: int, high: int = 2**63 - 1) -> int:
    """Check an integer; a bool is none, as in the protocol."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise UsageError(f"{name}={shown(value)}: a whole number is needed, {low} to {high}")
    return value


def check_flag(name: str, value: object) -> bool:
    """Check a bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise UsageError(f"{name}={shown(value)}: True or False is needed")
    return bool(value)


def check_collection(name: str, value: object, of: str) -> tuple[Any, ...]:
    """Return the items of an iterable as a tuple; text and bytes are no collections."""
    if type(value) is tuple or type(value) is list:
        return tuple(value)
    if isinstance(value, (bytes, bytearray, memoryview, str)) or not isinstance(value, Iterable):
        raise UsageError(f"{name}={shown(value)}: a collection of {of} is needed, such as a list")
    try:
        return tuple(value)
    except TypeError as error:  # such as an array without dimensions
        raise UsageError(f"{name}={shown(value)}: a collection of {of} is needed") from error


# ------------------------------------------------------------------------ logs


class ClientLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose lines begin with "kvd: ", since an engine prints them among its own."""

    def process(
        self, msg: object, kwargs: MutableMapping[str, Any]
    ) -> tuple[object, MutableMapping[str, Any]]:
        """See `logging.LoggerAdapter`."""
        return f"kvd: {msg}", kwargs


def get_logger(name: str = "kvd_client") -> ClientLogger:
    """Return the logger of this name, `kvd_client` or one below it."""
    return ClientLogger(logging.getLogger(name))


def log_no_offload(log: ClientLogger, error: Exception) -> None:
    """Log why an engine runs without offload, with the traceback of an error that is not kvd's."""
    if isinstance(error, KvdClientError):
        log.error("%s; the engine runs without offload", cause(error))
    else:
        text = "the KV cache cannot be registered: %s; the engine runs without offload"
        log.error(text, cause(error), exc_info=error)
