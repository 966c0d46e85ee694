"""Errors of the demos.

::

    KvdClientError
    └── DemoError
        ├── OutOfBlocks    more GPU blocks asked for than are free; carries the figures
        └── ProcessLost    the daemon or a rank ended, or did not start in time
            └── EngineDied the vLLM engine ended, or did not start in time; shows its log's end
"""

from kvd_client.errors import KvdClientError


class DemoError(KvdClientError):
    """The demo cannot go on."""


class OutOfBlocks(DemoError):
    """There are not that many free blocks."""


class ProcessLost(DemoError):
    """A process that the demo needs is not there."""


class EngineDied(ProcessLost):
    """The vLLM engine's process is not there."""
