"""An honest engine that stores and loads all the while, and looks at every byte."""

import threading
from pathlib import Path
from typing import Self

from tests.daemon.engines import Engine, keys_of

KEYS = 48
BATCH = 6
PAUSE_SECONDS = 0.005
PATIENCE_SECONDS = 60.0


class Neighbour:
    """Runs in a thread of its own. What others do may cost it hits, never a wrong byte."""

    def __init__(self, runtime_dir: Path) -> None:
        self.verified_bytes = 0
        self.wrong = 0
        self.error = ""
        self._engine = Engine(runtime_dir, name="neighbour", world_size=1, model="neighbour")
        self._may_run = threading.Event()
        self._rests = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="neighbour")

    def __enter__(self) -> Self:
        self._engine.wait_attached()
        self._may_run.set()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._may_run.set()
        self._thread.join(PATIENCE_SECONDS)
        self._engine.close()

    def pause(self) -> None:
        """Return when it holds nothing in the daemon: no lease, no job."""
        self._may_run.clear()
        if not self._rests.wait(PATIENCE_SECONDS) and not self.error:
            self.error = f"a turn took longer than {PATIENCE_SECONDS} s"

    def go_on(self) -> None:
        """After `pause`."""
        self._rests.clear()
        self._may_run.set()

    def _run(self) -> None:
        turn = 0
        try:
            while not self._stop.is_set():
                if not self._may_run.is_set():
                    self._rests.set()
                    self._may_run.wait()
                    continue
                first = (turn * BATCH) % KEYS
                self._turn(keys_of("neighbour", KEYS)[first : first + BATCH])
                turn += 1
                self._stop.wait(PAUSE_SECONDS)
        except Exception as error:  # noqa: BLE001  # told by whoever looks
            self.error = repr(error)
        finally:
            self._rests.set()

    def _turn(self, keys: list[bytes]) -> None:
        self._engine.store(keys, must=False)
        found, wrong = self._engine.load(keys)
        self.wrong += wrong
        self.verified_bytes += found * 2 * 2 * 4096
