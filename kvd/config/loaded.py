"""Settings with their origins, and what becomes of them when others are read."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from kvd.config.settings import KNOWN, Settings
from kvd_proto.messages import ConfigChange

DEFAULT = "default"
_LONGEST_ORIGIN = 4096  # the longest text of a message


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings, and for each key where its value was found.

    Attributes:
        settings: valid ones.
        origins: by key: `default`, a file with its line, a variable or a flag.
        file: the file that was read, if any.
        warnings: what is not wrong but looks like a mistake.
        waiting: by key, value and origin of what a running daemon would take up only at a
            restart.
    """

    settings: Settings
    origins: Mapping[str, str] = field(default_factory=lambda: dict.fromkeys(KNOWN, DEFAULT))
    file: Path | None = None
    warnings: tuple[str, ...] = ()
    waiting: Mapping[str, tuple[Any, str]] = field(default_factory=dict)


def take_up(present: Loaded, read: Loaded) -> tuple[Loaded, list[ConfigChange]]:
    """Return what holds for a daemon with `present` after it read `read`, and the changes.

    Settings that cannot change live keep value and origin; they wait for a restart.
    """
    values, origins, waiting, changes = {}, dict(read.origins), {}, []
    for key, known in KNOWN.items():
        old, new = getattr(present.settings, key), getattr(read.settings, key)
        if old == new:
            continue
        live, origin = known.about.live, read.origins[key][:_LONGEST_ORIGIN]
        changes.append(ConfigChange(key=key, old=str(old), new=str(new), origin=origin, live=live))
        if live:
            values[key] = new
        else:
            waiting[key] = (new, origins[key])
            origins[key] = present.origins[key]
    settings = msgspec.structs.replace(present.settings, **values)
    return replace(read, settings=settings, origins=origins, waiting=waiting), changes
