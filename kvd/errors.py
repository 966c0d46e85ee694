"""Errors of the daemon.

::

    KvdError
    ├── ConfigError          a setting that cannot work: names the key, the value and the remedy
    ├── AlreadyRunning       another daemon holds the runtime directory: names its pid
    ├── NotRunning           no daemon answers in the runtime directory
    ├── PoolError            the pool's memory cannot be had
    ├── ChannelFull          the peer of a channel does not read
    ├── BadDatagram          a datagram that cannot be sent or was cut off
    ├── LaneError            a lane cannot do what was asked
    │   └── ImportFailed     a worker's memory cannot be mapped as described
    ├── Refused              a request that is answered with an ERROR; carries its code
    ├── PlanError            a model's config.json that says too little
    └── IntegrityError       an invariant does not hold: a bug in kvd
"""

from kvd_proto.messages import ErrorCode


class KvdError(Exception):
    """Base of everything that the daemon raises."""


class ConfigError(KvdError):
    """A setting that cannot work."""


class AlreadyRunning(KvdError):
    """Another daemon holds the runtime directory."""


class NotRunning(KvdError):
    """No daemon answers in the runtime directory."""


class PoolError(KvdError):
    """The pool's memory cannot be had."""


class ChannelFull(KvdError):
    """What waits to be sent is above its bound: the peer does not read."""


class BadDatagram(KvdError):
    """A datagram above a channel's limits."""


class LaneError(KvdError):
    """A lane cannot do what was asked of it."""


class ImportFailed(LaneError):
    """A worker's memory cannot be mapped as its registration describes it."""


class Refused(KvdError):
    """A request that cannot be served; answered with an ERROR that carries this code."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class PlanError(KvdError):
    """A model configuration that says too little to plan with."""


class IntegrityError(KvdError):
    """An invariant does not hold."""
