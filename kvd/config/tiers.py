"""How an operator writes a tier: ``NAME:TARGET,key=value,…``.

Such as ``disk:/var/lib/kvd,size=500GiB`` or ``mooncake:master=10.0.0.1:50051,protocol=rdma``.

The keys here are the same for every tier; the others are its backend's, which checks them.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from kvd.errors import ConfigError
from kvd_proto.errors import SizeError
from kvd_proto.sizes import parse_size

TIER_NEEDS = (
    "NAME:TARGET,key=value,… such as disk:/var/lib/kvd,size=500GiB or mooncake:master=HOST:50051"
)
TIERS_NEED = (
    f"a list of {TIER_NEEDS}; the flag may be given several times, the variable has ; between them"
)
MAX_TIERS = 4  # that of kvd_proto.messages, which a start imports later
Keep: TypeAlias = Literal["asked", "all", "never"]
_KEEPS: tuple[Keep, ...] = ("asked", "all", "never")
_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")
_BETWEEN = re.compile(r"\s*;\s*|\s+(?=[a-z][a-z0-9-]*:)")  # a target may have spaces


@dataclass(frozen=True, slots=True)
class TierSetting:
    """One tier, as it was written.

    Attributes:
        text: all of it.
        kind: the entry point's name.
        target: what follows the colon up to the first comma, where that is no ``key=value``.
        options: the other keys and values, for the backend; with `size`, which all may have.
        keep: which chunks go down: those that were asked for, all, or none.
        queue_bytes: of chunks that are on their way, in each direction.
        late_seconds: without any progress, after which the tier is set aside.
    """

    text: str
    kind: str
    target: str
    options: Mapping[str, str]
    keep: Keep = "asked"
    queue_bytes: int = 256 * 2**20
    late_seconds: float = 0.2

    @property
    def directory(self) -> Path | None:
        """Where it keeps its files; None where the target is no absolute path."""
        return _normal(self.target) if self.target.startswith("/") else None

    @property
    def size_bytes(self) -> int | None:
        """Its budget; None where none is given."""
        return parse_size(self.options["size"]) if "size" in self.options else None


def split_tiers(text: str) -> list[str]:
    """The tiers in one text, with semicolons or white space between."""
    return [part for part in _BETWEEN.split(text.strip()) if part]


def parse_tier(text: str) -> TierSetting:
    """Parse one tier.

    Raises:
        ConfigError: it is none; the text says what is.
    """
    kind, colon, rest = text.strip().partition(":")
    if not colon or not _NAME.fullmatch(kind):
        raise ConfigError(f"{text!r} is no tier; give {TIER_NEEDS}")
    parts = rest.split(",") if rest else []
    target = parts.pop(0) if parts and "=" not in parts[0] else ""
    options: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if not equals or not key or not value or key in options:
            raise ConfigError(f"{text!r}: {part!r} is not one key=value; give {TIER_NEEDS}")
        options[key] = value
    if "size" in options:
        _size(text, "size", options["size"])
    keep = options.pop("keep", "asked")
    if keep not in _KEEPS:
        raise ConfigError(f"{text!r}: keep={keep} is none of {', '.join(_KEEPS)}")
    return TierSetting(
        text=text.strip(),
        kind=kind,
        target=target,
        options=options,
        keep=keep,
        queue_bytes=_size(text, "queue", options.pop("queue", "256MiB")),
        late_seconds=_seconds(text, options.pop("late", "0.2")),
    )


def parse_tiers(texts: Sequence[str]) -> list[TierSetting]:
    """Parse all tiers, in the order in which they are asked.

    Raises:
        ConfigError: one is none, two have the same target, or they are too many.
    """
    tiers = [parse_tier(text) for text in texts]
    if len(tiers) > MAX_TIERS:
        raise ConfigError(f"{len(tiers)} tiers; at most {MAX_TIERS} can be stacked")
    places = [(tier.kind, tier.target, tier.options.get("master")) for tier in tiers]
    for tier, place in zip(tiers, places, strict=True):
        if places.count(place) > 1:
            raise ConfigError(f"{tier.text!r} is there twice; remove one")
    return tiers


def misplaced_tiers(tiers: Sequence[TierSetting], runtime_dir: str, pool_dir: str) -> Iterator[str]:
    """What is wrong with the tiers' directories, a line each.

    Paths are compared as they are written; of the daemon's own directories also what symbolic
    links lead to. A tier's directory is not looked at: its file system may hang.
    """
    earlier: list[Path] = []
    for tier in tiers:
        place = tier.directory
        if place is None:
            continue
        for own in _spellings(runtime_dir):
            if place.is_relative_to(own) or own.is_relative_to(place):
                yield _is_taken(
                    tier,
                    "is, contains or lies in the runtime directory",
                    f"runtime_dir = {runtime_dir}",
                )
                break
        for own in _spellings(pool_dir):
            if own.is_relative_to(place):
                yield _is_taken(
                    tier, "is or contains the pool's directory", f"pool_dir = {pool_dir}"
                )
                break
        for other in earlier:
            if place.is_relative_to(other) or other.is_relative_to(place):
                yield _is_taken(
                    tier, "is, contains or lies in another tier's directory", str(other)
                )
                break
        earlier.append(place)


def _is_taken(tier: TierSetting, how: str, which: str) -> str:
    return (
        f"{tier.text!r}: its directory {how} ({which}); give the tier a"
        f" directory of its own, such as {tier.kind}:/var/lib/kvd/tier"
    )


def _spellings(directory: str) -> set[Path]:
    """A directory as it is written, and as symbolic links lead to it."""
    return {_normal(str(Path(directory).absolute())), Path(directory).resolve()}


def _normal(path: str) -> Path:
    return Path(os.path.normpath(path))


def _size(text: str, key: str, value: str) -> int:
    try:
        return parse_size(value)
    except SizeError as error:
        raise ConfigError(f"{text!r}: {key}={value}: {error}") from error


def _seconds(text: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0.01 <= seconds <= 60:
        raise ConfigError(f"{text!r}: late={value} needs seconds from 0.01 to 60")
    return seconds
