"""Errors of the daemon.

::

    KvdError
    ├── ConfigError
    │   └── AddressUnavailable
    ├── AlreadyRunning
    ├── NotRunning
    │   └── SocketAccessDenied
    ├── PoolError
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
    """Base of everything that the daemon raises."""


class ConfigError(KvdError):
    """A setting that cannot work; names the key, the value and the remedy."""


class AddressUnavailable(ConfigError):
    """The address of `http_listen` is in use or not on this machine, which may pass."""


class AlreadyRunning(KvdError):
    """Another daemon holds the runtime directory; names its pid."""


class NotRunning(KvdError):
    """No daemon answers in the runtime directory."""


class SocketAccessDenied(NotRunning):
    """This process may not reach the daemon's sockets; to wait for one is of no use."""


class PoolError(KvdError):
    """The pool's memory cannot be had."""


class LedgerDamaged(KvdError):
    """What was kept for this daemon cannot be believed: it begins without."""


class LaneError(KvdError):
    """A lane cannot do what was asked of it."""


class ImportFailed(LaneError):
    """A worker's memory cannot be mapped as its registration describes it."""


class HandleRefused(ImportFailed):
    """The driver does not open a handle of a worker's memory, whose user may be another one."""


class CudaMissing(LaneError):
    """There is no CUDA driver, no binding to it, or no such device on this machine."""


class CudaDriverError(LaneError):
    """A function of the CUDA driver failed.

    Attributes:
        code: the driver's number of the error; -1 where the driver lacks the function.
        name: the driver's name of it.
        attempted: what was being done, in words.
    """

    def __init__(self, code: int, name: str, attempted: str) -> None:
        super().__init__(f"{attempted}: {name} ({code})")
        self.code = code
        self.name = name
        self.attempted = attempted


class DeviceLost(LaneError):
    """The context on a device is lost for good: only another process can use it again."""


class TierError(KvdError):
    """A tier's medium cannot be used now, or has failed a batch; names the remedy."""


class Refusal(KvdError):
    """A request that cannot be served; answered with an ERROR that carries this code.

    `limit` is the setting or bound that was reached, where that is why.
    """

    def __init__(self, code: "ErrorCode", text: str, limit: str = "") -> None:
        super().__init__(text)
        self.code = code
        self.limit = limit


class PlanError(KvdError):
    """A model configuration that says too little to plan with."""


class TraceError(KvdError):
    """A trace that cannot be played; names the file, the line, what is wrong and the remedy."""


class IntegrityError(KvdError):
    """An invariant does not hold: a bug in kvd."""
