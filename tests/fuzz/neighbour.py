"""An honest engine that stores and loads all the while, and looks at every byte."""

import threading
from itertools import count
from pathlib import Path
from typing import Self

from tests.daemon.engines import Engine, keys_of

KEYS = 48
BATCH = 6
PAUSE_SECONDS = 0.005
PATIENCE_SECONDS = 60.0


class Neighbour:
    """Runs in a thread of its own. What others do may cost it hits, never a wrong byte.

    While somebody has `turn` it holds nothing in the daemon: no lease, no job.
    """

    def __init__(self, runtime_dir: Path) -> None:
        self.verified_bytes = 0
        self.wrong = 0
        self.error = ""
        self.turn = threading.Lock()
        self._engine = Engine(runtime_dir, name="neighbour", world_size=1, model="neighbour")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="neighbour")

    def __enter__(self) -> Self:
        self._engine.wait_attached()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_SECONDS)
        self._engine.close()

    def _run(self) -> None:
        keys = keys_of("neighbour", KEYS)
        try:
            for first in count(0, BATCH):
                if self._stop.wait(PAUSE_SECONDS):
                    return
                batch = keys[first % KEYS :][:BATCH]
                with self.turn:
                    self._engine.store(batch, must=False)
                    found, wrong = self._engine.load(batch)
                self.wrong += wrong
                self.verified_bytes += found * 2 * 2 * 4096
        except Exception as error:  # noqa: BLE001  # told by whoever looks
            self.error = repr(error)
