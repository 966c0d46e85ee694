"""How an operator writes an address, a list of users or groups, models' quotas, and tiers.

A tier is ``NAME:TARGET,key=value,…``, such as ``disk:/var/lib/kvd,size=500GiB`` or
``mooncake:master=10.0.0.1:50051,protocol=rdma``. The keys here are the same for every tier; the
others are its backend's, which checks them.
"""

import ipaddress
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from kvd.errors import ConfigError
from kvd_proto.errors import SizeError
from kvd_proto.text import format_size, parse_size

_MAX_ID = 2**32 - 2


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """A host and a TCP port; port 0 lets the kernel choose."""

    host: str
    port: int

    @property
    def everywhere(self) -> bool:
        """Whether the host stands for every interface of the machine."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:  # a name
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_listen(text: str) -> ListenAddress | None:
    """Parse ``HOST:PORT`` or ``[IPv6]:PORT``; return None for ``off``.

    Raises:
        ConfigError: anything else.
    """
    if text == "off":
        return None
    try:
        parts = urlsplit(f"//{text}")
        if parts.netloc == text and parts.hostname and parts.port is not None and "@" not in text:
            return ListenAddress(parts.hostname, parts.port)
    except ValueError:  # brackets around no address, or no port
        pass
    raise ConfigError(
        "not an address; give HOST:PORT such as 127.0.0.1:9330 or [::1]:9330 (port 0 lets the"
        " kernel choose, 65535 is the highest), or off"
    )


def parse_names(text: str) -> list[str]:
    """Return the items of a list of names or numbers with commas between; none for no text.

    Whether the names exist is asked where the daemon runs.

    Raises:
        ConfigError: an item is empty, or a number out of range.
    """
    if not text.strip():
        return []
    items = [item.strip() for item in text.split(",")]
    for item in items:
        if not item or (item.isdecimal() and int(item) > _MAX_ID):
            raise ConfigError(
                f"{item!r} is neither a name nor a number; give names or numbers with commas"
                " between, or nothing"
            )
    return items


QuotaTable = dict[str, dict[str, str | int]]
"""By model: `floor` and `cap`, each a size or a percentage of the pool."""

QUOTA_NEEDS = (
    "for each model floor, cap or both, a size or a percentage of the pool, such as"
    ' {llama = {floor = "8GiB", cap = "50%"}}; in the file also as a section [quota.llama]'
)


@dataclass(frozen=True, slots=True)
class Quota:
    """A model's part of the pool in bytes; a cap of None is none."""

    floor_bytes: int = 0
    cap_bytes: int | None = None


def parse_quotas(text: str) -> Any:
    """Parse the table of a variable or a flag: TOML in one line.

    Raises:
        ConfigError: it is none.
    """
    import tomllib  # noqa: PLC0415  # a tier's process must not pay for it

    try:
        return tomllib.loads(f"quota = {text}\n")["quota"]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not TOML in one line: {error}; needs {QUOTA_NEEDS}") from error


def quotas_of(table: QuotaTable, cpu_bytes: int) -> dict[str, Quota]:
    """Return the quotas by model, in bytes of a pool of `cpu_bytes`.

    Raises:
        ConfigError: an entry is invalid; it names model, key and value.
    """
    quotas = {}
    for model, entry in table.items():
        unknown = ", ".join(entry.keys() - {"floor", "cap"})
        if unknown or not entry:
            raise ConfigError(
                f"{model}: {unknown or 'nothing'} is neither floor nor cap; needs {QUOTA_NEEDS}"
            )
        part = {key: _bytes(model, key, amount, cpu_bytes) for key, amount in entry.items()}
        quotas[model] = Quota(part.get("floor", 0), part.get("cap"))
    return quotas


def quota_contradictions(quotas: Mapping[str, Quota], cpu_bytes: int) -> Iterator[str]:
    """Yield what is impossible in a pool of `cpu_bytes`."""
    for model, quota in quotas.items():
        if quota.cap_bytes is not None and quota.cap_bytes < quota.floor_bytes:
            yield (
                f"the cap of {model}, {format_size(quota.cap_bytes)}, is below its floor,"
                f" {format_size(quota.floor_bytes)}"
            )
    floors = sum(quota.floor_bytes for quota in quotas.values())
    if floors > cpu_bytes:
        yield (
            f"the floors of {', '.join(quotas)} are {format_size(floors)} together, the pool has"
            f" {format_size(cpu_bytes)}; lower them or raise cpu_bytes"
        )


def _bytes(model: str, key: str, amount: str | int, cpu_bytes: int) -> int:
    text, meant = str(amount).strip(), ""
    try:
        if not text.endswith("%"):
            return parse_size(amount)
        percent = float(text.removesuffix("%"))
        if 0 <= percent <= 100:
            return int(cpu_bytes * percent / 100)
    except SizeError as error:
        meant = f"; did you mean {error.suggestion}?" if error.suggestion else ""
    except ValueError:
        pass
    raise ConfigError(
        f"{model}: {key} = {amount!r}: needs a size such as 8GiB, or 0% to 100% of the pool{meant}"
    )


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


def tier_directory_conflicts(
    tiers: Sequence[TierSetting], runtime_dir: str, pool_dir: str
) -> Iterator[str]:
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
