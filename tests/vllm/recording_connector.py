"""KvdConnector that also writes what its scheduler reports of requests to a file.

`RECORD` in the environment names the file: a line for each request that has ended, and for each
lookup that has missed.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvd_client.vllm import KvdConnector


class RecordingConnector(KvdConnector):
    """The connector of a real engine; see above."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.connector_scheduler is not None:
            scheduler: Any = self.connector_scheduler.manager.scheduler
            for name in ("request_finished", "report_missed"):
                setattr(scheduler, name, _recorded(name, getattr(scheduler, name)))


def _recorded(name: str, call: Callable[..., None]) -> Callable[..., None]:
    path = Path(os.environ["RECORD"])

    def record(keys: list[bytes], **details: int) -> None:
        line = {"call": name, "keys": [key.hex() for key in keys]} | details
        with path.open("a") as lines:
            lines.write(json.dumps(line) + "\n")
        call(keys, **details)

    return record
