"""Errors of the self-test.

::

    KvdClientError
    └── SelfTestError
        ├── StepFailed    a step did not do, or could not prove, what it is for
        └── NoDaemon      no daemon answers, so that there is nothing to test
"""

from kvd_client.errors import KvdClientError


class SelfTestError(KvdClientError):
    """The self-test cannot go on."""


class StepFailed(SelfTestError):
    """A step did not do what it is for; the sentence says what was seen instead."""


class NoDaemon(SelfTestError):
    """No daemon answers in the runtime directory."""
