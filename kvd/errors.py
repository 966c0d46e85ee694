"""Errors of the daemon.

::

    KvdError
    ├── ConfigError
    │   └── AddressUnavailable
    ├── AlreadyRunning
    ├── NotRunning
    │   └── SocketAccessDenied
    ├── PoolError
    │   └── MemoryShortage
    ├── LedgerDamaged
    ├── LaneError
    │   ├── ImportFailed
    │   │   └── HandleRefused
    │   ├── CudaMissing
    │   ├── CudaDriverError
    │   └── DeviceLost
    ├── TierError
    ├── Refusal
    ├── PlanError
    ├── TraceError
    └── IntegrityError
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # every command imports this module, and few need the messages
    from kvd_proto.messages import ErrorCode


class KvdError(Exception):
    """Base of all errors of the daemon; as text both attributes, joined.

    Attributes:
        text: the value and the cause.
        remedy: what helps; empty if `text` says it.
    """

    def __init__(self, text: str = "", remedy: str = "") -> None:
        super().__init__(f"{text}; {remedy}" if remedy else text)
        self.text, self.remedy = text, remedy


class ConfigError(KvdError):
    """A setting is invalid; names the key, the value and the remedy."""


class AddressUnavailable(ConfigError):
    """The address of `http_listen` is in use or not on this machine now; a retry may succeed."""


class AlreadyRunning(KvdError):
    """Another daemon holds the runtime directory; names its pid."""


class NotRunning(KvdError):
    """No daemon answers in the runtime directory."""


class SocketAccessDenied(NotRunning):
    """This process may not open the daemon's sockets; waiting does not help."""


class PoolError(KvdError):
    """The pool's memory cannot be allocated or mapped."""


class MemoryShortage(PoolError):
    """The pool does not fit the memory; names the sizes and the remedy."""


class LedgerDamaged(KvdError):
    """A file of the previous daemon is damaged; the daemon starts without its contents."""


class LaneError(KvdError):
    """A lane cannot carry out an order."""


class ImportFailed(LaneError):
    """A worker's memory cannot be mapped as its registration describes it."""


class HandleRefused(ImportFailed):
    """The driver does not open a handle of a worker's memory; the worker may be another user's."""


class CudaMissing(LaneError):
    """There is no CUDA driver, no binding to it, or no such device on this machine."""


class CudaDriverError(LaneError):
    """A function of the CUDA driver failed.

    Attributes:
        code: the driver's error number; -1 if the driver lacks the function.
        name: the driver's name of the error.
        attempted: the operation, in words.
    """

    def __init__(self, code: int, name: str, attempted: str) -> None:
        super().__init__(f"{attempted}: {name} ({code})")
        self.code = code
        self.name = name
        self.attempted = attempted


class DeviceLost(LaneError):
    """The context on a device is lost; only another process can use the device again."""


class TierError(KvdError):
    """A tier's medium cannot be used now, or failed a batch; names the remedy."""


class Refusal(KvdError):
    """A request that is not served; the reply is an ERROR with this code and text.

    Attributes:
        code: of the reply.
        limit: the setting or bound that was reached; empty if none is the reason.
    """

    def __init__(self, code: "ErrorCode", text: str, limit: str = "") -> None:
        super().__init__(text)
        self.code = code
        self.limit = limit


class PlanError(KvdError):
    """A model configuration lacks values that a plan needs."""


class TraceError(KvdError):
    """A trace cannot be replayed; names the file, the line, the reason and the remedy."""


class IntegrityError(KvdError):
    """An invariant of kvd does not hold: a bug in kvd."""
