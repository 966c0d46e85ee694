"""Errors of the demos and the self-test.

::

    KvdClientError
    ├── DemoError
    │   └── RequestAborted
    └── StepFailed
"""

import importlib.util
import sys

from kvd_client.errors import KvdClientError


class DemoError(KvdClientError):
    """The demo cannot go on."""


class RequestAborted(DemoError):
    """The engine has given up a request, and serves others as before."""


def check_installed(module: str, command: str, remedy: str) -> None:
    """Find out before anything starts whether a command has what it needs.

    Raises:
        DemoError: this Python lacks the module.
    """
    if importlib.util.find_spec(module) is None:
        raise DemoError(f"{command} needs {module}, which {sys.prefix} does not have; {remedy}")


class StepFailed(KvdClientError):
    """A step of the self-test failed; the sentence says what was seen."""
