"""Errors of the client.

Only a caller's own mistakes and registration raise; on the serving path a
daemon that is absent, slow or broken shows as a miss, never as an exception.

::

    KvdClientError
    ├── UsageError           an argument of the wrong type, size, dtype or device; a closed session
    ├── RegistrationError    the daemon refused the registration; carries its code and sentence
    ├── Unavailable          no daemon within the deadline (registration with `required=True` only)
    └── UnsupportedMemory    tensors whose memory cannot be shared with another process
"""


class KvdClientError(Exception):
    """Base of everything that the client raises."""


class UsageError(KvdClientError):
    """The caller passed something that cannot be meant."""


class RegistrationError(KvdClientError):
    """The daemon refused the registration."""


class Unavailable(KvdClientError):
    """No daemon answered within the deadline."""


class UnsupportedMemory(KvdClientError):
    """This memory cannot be shared with another process."""
