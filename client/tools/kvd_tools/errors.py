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
    """The demo, its daemon or its engine failed."""


class RequestAborted(DemoError):
    """The engine aborted a request. It still serves others."""


def check_installed(module: str, command: str, remedy: str) -> None:
    """Check that a command's engine is installed.

    Raises:
        DemoError: this Python environment lacks the module.
    """
    if importlib.util.find_spec(module) is None:
        raise DemoError(f"{command} needs {module}, which {sys.prefix} does not have; {remedy}")


class StepFailed(KvdClientError):
    """A step of the self-test failed. The message says what it saw."""
