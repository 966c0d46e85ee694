"""Errors of the demos and the self-test.

::

    KvdClientError
    ├── DemoError
    │   ├── OutOfBlocks        more GPU blocks asked for than are free
    │   └── ProcessLost        the daemon or a rank ended, or did not start in time
    │       └── EngineDied     the vLLM engine; shows its log's end
    └── SelfTestError          the self-test cannot begin
        └── StepFailed         a step did not do, or could not prove, what it is for
"""

import importlib.util
import sys

from kvd_client.errors import KvdClientError


class DemoError(KvdClientError):
    """The demo cannot go on."""


def check_installed(module: str, command: str, remedy: str) -> None:
    """Find out before anything starts whether a command has what it needs.

    Raises:
        DemoError: this Python lacks the module.
    """
    if importlib.util.find_spec(module) is None:
        raise DemoError(f"{command} needs {module}, which {sys.prefix} does not have; {remedy}")


class OutOfBlocks(DemoError):
    """There are not that many free blocks."""


class ProcessLost(DemoError):
    """A process that the demo needs is not there."""


class EngineDied(ProcessLost):
    """The vLLM engine's process is not there."""


class SelfTestError(KvdClientError):
    """The self-test cannot begin."""


class StepFailed(SelfTestError):
    """A step did not do what it is for; the sentence says what was seen instead."""
