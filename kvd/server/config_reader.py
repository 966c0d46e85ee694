"""Reads the configuration beside the loop: a disk may take its time, the loop may not."""

import threading
from types import FrameType

from kvd.broker.effects import Effect
from kvd.broker.requests.reloading import Reloading
from kvd.config.sources import Loaded, Sources
from kvd.errors import ConfigError
from kvd.logs import set_level


class ConfigReader:
    """Passes SIGHUP and what was read on to the broker's decisions."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._hung_up = False
        self._outcome: Loaded | ConfigError | None = None

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """SIGHUP's handler."""
        del number, frame
        self._hung_up = True

    def turn(self, core: Reloading) -> list[Effect]:
        """One turn of the loop: pass on what was read, begin to read where that is wanted."""
        effects: list[Effect] = []
        outcome, self._outcome = self._outcome, None
        if outcome is not None:
            effects += core.read(outcome)
            set_level(core.loaded.settings.log_level)
        if self._hung_up:
            self._hung_up = False
            core.sighup()
        if core.begin():
            threading.Thread(target=self._read, name="kvd-config", daemon=True).start()
        return effects

    def _read(self) -> None:
        try:
            self._outcome = self._sources.load()
        except ConfigError as error:
            self._outcome = error
        except Exception as error:  # noqa: BLE001  # whoever waits gets an answer
            self._outcome = ConfigError(f"the configuration cannot be read: {error!r}")
