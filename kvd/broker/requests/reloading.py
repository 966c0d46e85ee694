"""The configuration of a running daemon: read again, taken up as far as that goes live, shown.

A tool asks, or SIGHUP does. The file is read at the edge, by a thread, because
a disk may take its time; whoever asks meanwhile is answered from the next
reading, which sees what was written before the question.
"""

from collections.abc import Iterable
from dataclasses import replace

import msgspec

from kvd.broker.effects import Effect, Event, ToLane
from kvd.broker.engines.sessions import Request
from kvd.broker.requests.operations import Handler, by, for_tools
from kvd.broker.state import BrokerState
from kvd.config.settings import SETTINGS
from kvd.config.sources import LoadedSettings
from kvd.errors import ConfigError
from kvd.wire.link import LaneLog
from kvd_proto.messages import (
    MAX_TEXT,
    ConfigChange,
    ConfigReloaded,
    ConfigShown,
    Error,
    ErrorCode,
    Message,
    ReloadConfig,
    ShowConfig,
)

Asked = tuple[str, Request[ReloadConfig] | None]
"""Who wants the configuration read, and the request; a signal has none."""


class Reloading:
    """Decisions about the configuration; `loaded` is what holds, with its origins."""

    def __init__(self, state: BrokerState, loaded: LoadedSettings) -> None:
        self._state = state
        self.loaded = loaded
        self._asked: list[Asked] = []
        self._served: list[Asked] = []  # by the reading that is under way

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which request."""
        return {ReloadConfig: for_tools(self._reload), ShowConfig: for_tools(self._show)}

    def sighup(self) -> None:
        """Have the configuration read again, as SIGHUP asks."""
        self._asked.append(("SIGHUP", None))

    @property
    def under_way(self) -> bool:
        """The configuration is being read."""
        return bool(self._served)

    def begin(self) -> bool:
        """Whether the configuration is to be read now; `read` must follow."""
        if self._served or not self._asked:
            return False
        self._served, self._asked = self._asked, []
        return True

    def read(self, outcome: LoadedSettings | ConfigError) -> list[Effect]:
        """The configuration as it is now, or why it cannot be used."""
        served, self._served = self._served, []
        who = ", ".join(who for who, _ in served)
        if isinstance(outcome, ConfigError):
            problems = "; ".join(str(outcome).splitlines())
            text = f"reload by {who} refused, the old settings hold: {problems}"
            answer: Message = Error.of(ErrorCode.BAD_CONFIG, str(outcome))
            effects: list[Effect] = [Event(text, "error")]
        else:
            effects, answer = self._take_up(outcome, who)
        effects += [request.reply(answer) for _, request in served if request is not None]
        return effects

    # --------------------------------------------------------------- helpers

    def _reload(self, request: Request[ReloadConfig]) -> list[Effect]:
        self._asked.append((by(request.session.peer), request))
        return []

    def _show(self, request: Request[ShowConfig]) -> list[Effect]:
        return [request.reply(ConfigShown(config=self.loaded.as_json()))]

    def _take_up(self, read: LoadedSettings, who: str) -> tuple[list[Effect], ConfigReloaded]:
        old, state = self.loaded.settings, self._state
        self.loaded, changes = take_up(self.loaded, read)
        settings = state.settings = self.loaded.settings
        state.registry.max_sessions = settings.max_sessions
        state.registry.max_sessions_per_user = settings.max_sessions_per_user
        if state.namespaces is not None:
            state.namespaces.apply_settings(settings)
        effects: list[Effect] = []
        if settings.log_level != old.log_level:
            level = LaneLog(level=settings.log_level)
            effects += [ToLane(device, level) for device in state.lanes]
        effects.append(Event(f"configuration reloaded by {who}: {_words(changes)}"))
        effects += [Event(text, "warning") for text in read.warnings]
        answer = ConfigReloaded(
            file=str(read.file or ""),
            changes=tuple(changes),
            warnings=read.warnings,
        )
        return effects, answer


def _words(changes: Iterable[ConfigChange]) -> str:
    parts = []
    for live, when in ((True, ""), (False, "at the next restart: ")):
        told = [f"{it.key} = {it.new} (was {it.old})" for it in changes if it.live is live]
        if told:
            parts.append(when + ", ".join(told))
    return "; ".join(parts) or "nothing changed"


def take_up(
    present: LoadedSettings, read: LoadedSettings
) -> tuple[LoadedSettings, list[ConfigChange]]:
    """Return what holds for a daemon with `present` after it read `read`, and the changes.

    Settings that cannot change live keep value and origin; they wait for a restart.
    """
    values, origins, waiting, changes = {}, dict(read.origins), {}, []
    for key, known in SETTINGS.items():
        old, new = getattr(present.settings, key), getattr(read.settings, key)
        if old == new:
            continue
        live, origin = known.live, read.origins[key][:MAX_TEXT]
        changes.append(ConfigChange(key=key, old=str(old), new=str(new), origin=origin, live=live))
        if live:
            values[key] = new
        else:
            waiting[key] = (new, origins[key])
            origins[key] = present.origins[key]
    settings = msgspec.structs.replace(present.settings, **values)
    return replace(read, settings=settings, origins=origins, waiting=waiting), changes
