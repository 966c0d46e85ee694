"""Settings with a syntax of their own: addresses, lists of users and groups, quotas, tiers.

A tier is ``NAME:TARGET,key=value,…``, such as ``disk:/var/lib/kvd,size=500GiB`` or
``mooncake:master=10.0.0.1:50051,protocol=rdma``. Keys that all tiers have are parsed here; the
backend checks the others.
"""

import grp
import ipaddress
import math
import os
import pwd
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
        """Whether the address covers every interface of the machine."""
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
        "not an address",
        "give HOST:PORT such as 127.0.0.1:9330 or [::1]:9330 (port 0 lets the kernel choose, 65535"
        " is the highest), or off",
    )


def parse_names(text: str) -> list[str]:
    """Return the items of a comma-separated list of names or numbers; empty for an empty text.

    The daemon checks at its start that the names exist.

    Raises:
        ConfigError: an item is empty, or a number out of range.
    """
    if not text.strip():
        return []
    items = [item.strip() for item in text.split(",")]
    for item in items:
        if not item or (item.isdecimal() and int(item) > _MAX_ID):
            raise ConfigError(
                f"a number is above {_MAX_ID}" if item else "a name is empty",
                "give names or numbers separated by commas, or nothing",
            )
    return items


def user_ids(names: str) -> frozenset[int]:
    """Return the ids in the setting `allow_users`; numbers pass unchecked.

    Raises:
        ConfigError: this machine has no user of a name.
    """
    return _ids("allow_users", "user", names, lambda name: pwd.getpwnam(name).pw_uid)


def group_ids(names: str) -> frozenset[int]:
    """Return the ids in the setting `allow_groups`; see `user_ids`."""
    return _ids("allow_groups", "group", names, lambda name: grp.getgrnam(name).gr_gid)


def _ids(setting: str, kind: str, names: str, id_of: Callable[[str], int]) -> frozenset[int]:
    ids = set()
    for name in parse_names(names):
        try:
            ids.add(int(name) if name.isdecimal() else id_of(name))
        except KeyError:
            raise ConfigError(
                f"{setting}: this machine has no {kind} {name!r}",
                "create it, or give its number",
            ) from None
    return frozenset(ids)


QuotaTable = dict[str, dict[str, str | int]]
"""By model: `floor` and `cap`, each a size or a percentage of the pool."""

QUOTA_NEEDS = (
    "a table in TOML, not JSON or text, with floor, cap or both for each model, a size or a"
    ' percentage of the pool, such as {llama = {floor = "8GiB", cap = "50%"}}; in the file also as'
    " a section [quota.llama]"
)


@dataclass(frozen=True, slots=True)
class Quota:
    """A model's floor and cap in bytes of the pool; None: no cap."""

    floor_bytes: int = 0
    cap_bytes: int | None = None


def parse_quotas(text: str) -> Any:
    """Parse the quotas of a variable or a flag: a TOML table in one line.

    Raises:
        ConfigError: `text` is no TOML.
    """
    import tomllib  # noqa: PLC0415  # a tier's process does not need it

    try:
        return tomllib.loads(f"quota = {text}\n")["quota"]
    except tomllib.TOMLDecodeError as error:
        reason = str(error).partition(" (at ")[0]  # it counts from "quota = " on
        raise ConfigError(f"no TOML in one line ({reason})", f"needs {QUOTA_NEEDS}") from error


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
                f"{model}: {unknown or 'nothing'} is neither floor nor cap",
                f'give {model} a floor, a cap or both, such as {{floor = "8GiB", cap = "50%"}}',
            )
        nbytes = {key: _quota_bytes(model, key, amount, cpu_bytes) for key, amount in entry.items()}
        quotas[model] = Quota(nbytes.get("floor", 0), nbytes.get("cap"))
    return quotas


def quota_contradictions(quotas: Mapping[str, Quota], cpu_bytes: int) -> Iterator[str]:
    """Yield contradictions of the quotas in a pool of `cpu_bytes`, as text."""
    for model, quota in quotas.items():
        if quota.cap_bytes is not None and quota.cap_bytes < quota.floor_bytes:
            yield (
                f"the cap of {model}, {format_size(quota.cap_bytes)}, is below its floor,"
                f" {format_size(quota.floor_bytes)}; raise the cap or lower the floor"
            )
    floors = sum(quota.floor_bytes for quota in quotas.values())
    if floors > cpu_bytes:
        yield (
            f"the floors of {', '.join(quotas)} add up to {format_size(floors)}, the pool has"
            f" {format_size(cpu_bytes)}; lower them or raise cpu_bytes"
        )


def _quota_bytes(model: str, bound: str, amount: str | int, cpu_bytes: int) -> int:
    """Return the bytes of a bound (floor, cap); `amount`: a size, or a percentage of the pool."""
    text = str(amount).strip()
    hint = ""
    try:
        if not text.endswith("%"):
            return parse_size(amount)
        percent = float(text.removesuffix("%"))
        if 0 <= percent <= 100:
            return int(cpu_bytes * percent / 100)
    except SizeError as error:
        hint = f"; did you mean {error.suggestion}?" if error.suggestion else ""
    except ValueError:
        pass
    raise ConfigError(
        f"{model}: {bound} = {amount!r}: needs a size such as 8GiB, or 0% to 100% of the pool{hint}"
    )


TIER_NEEDS = (
    "NAME:TARGET,key=value,… such as disk:/var/lib/kvd,size=500GiB or mooncake:master=HOST:50051"
)
TIER_LIST_NEEDS = f"a list of {TIER_NEEDS}; repeat the flag, or separate them by ; in the variable"
MAX_TIERS = 4  # that of kvd_proto.messages, which a start imports later
KeepMode: TypeAlias = Literal["asked", "all", "never"]
_KEEP_MODES: tuple[KeepMode, ...] = ("asked", "all", "never")
_MIN_QUEUE_BYTES = 4096  # a smaller number lacks its unit
_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")
_SEPARATOR = re.compile(r"\s*;\s*|\s+(?=[a-z][a-z0-9-]*:)")  # a target may contain spaces


@dataclass(frozen=True, slots=True)
class TierSetting:
    """The setting of one tier.

    Attributes:
        text: the whole setting.
        kind: name of the backend's entry point.
        target: text between the colon and the first comma, unless it is a ``key=value``.
        options: keys and values for the backend, with `size`, which all tiers have.
        keep: which chunks are demoted: those that were requested, all, or none.
        queue_bytes: limit of chunks in flight, for each direction.
        late_seconds: time without progress after which the tier is set aside.
    """

    text: str
    kind: str
    target: str
    options: Mapping[str, str]
    keep: KeepMode = "asked"
    queue_bytes: int = 256 * 2**20
    late_seconds: float = 0.2

    @property
    def name(self) -> str:
        """Kind and target, for errors."""
        return f"{self.kind}:{self.target}" if self.target else self.kind

    @property
    def directory(self) -> Path | None:
        """The tier's directory; None if the target is no absolute path."""
        return _normalized(self.target) if self.target.startswith("/") else None

    @property
    def size_bytes(self) -> int | None:
        """The tier's budget in bytes; None if not given."""
        return parse_size(self.options["size"]) if "size" in self.options else None


def split_tiers(text: str) -> list[str]:
    """Split a text into tiers, separated by semicolons or white space."""
    return [item for item in _SEPARATOR.split(text.strip()) if item]


def parse_tier(text: str) -> TierSetting:
    """Parse the setting of one tier.

    Raises:
        ConfigError: `text` is no tier; the error names the syntax.
    """
    kind, colon, body = text.strip().partition(":")
    if not colon or not _NAME.fullmatch(kind):
        raise ConfigError(f"{text!r} is no tier", f"give {TIER_NEEDS}")
    items = body.split(",") if body else []
    target = items.pop(0) if items and "=" not in items[0] else ""
    options: dict[str, str] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key or not value or key in options:
            reason = "is given twice" if key in options else "is not one key=value"
            raise ConfigError(f"{kind}:{target}: {item!r} {reason}", f"give {TIER_NEEDS}")
        options[key] = value
    keep, queue = options.pop("keep", "asked"), options.pop("queue", "256MiB")
    late = options.pop("late", "0.2")
    tier = TierSetting(text=text.strip(), kind=kind, target=target, options=options)
    if "size" in options:
        size_option(tier.name, "size", options["size"])
    if keep not in _KEEP_MODES:
        raise ConfigError(
            f"{tier.name}: keep={keep} is unknown", f"use one of {', '.join(_KEEP_MODES)}"
        )
    queue_bytes = size_option(tier.name, "queue", queue)
    if queue_bytes < _MIN_QUEUE_BYTES:
        raise ConfigError(
            f"{tier.name}: queue={queue} is smaller than any chunk",
            "give the bytes that may be on their way, such as queue=256MiB, the default",
        )
    return replace(tier, keep=keep, queue_bytes=queue_bytes, late_seconds=_seconds(tier.name, late))


def parse_tiers(texts: Sequence[str]) -> list[TierSetting]:
    """Parse the tiers, in the order of lookups.

    Raises:
        ConfigError: a text is no tier, two have the same target, or there are too many.
    """
    tiers = [parse_tier(text) for text in texts]
    if len(tiers) > MAX_TIERS:
        raise ConfigError(f"{len(tiers)} tiers", f"at most {MAX_TIERS} are possible")
    identities = [(tier.kind, tier.target, tier.options.get("master")) for tier in tiers]
    for tier, identity in zip(tiers, identities, strict=True):
        if identities.count(identity) > 1:
            raise ConfigError(f"{tier.name} is given twice", "remove one")
    return tiers


def tier_directory_conflicts(
    tiers: Sequence[TierSetting], runtime_dir: str, pool_dir: str
) -> Iterator[str]:
    """Yield conflicts of the tiers' directories with each other and the daemon's, as text.

    Paths are compared as written, the daemon's directories also with symbolic links resolved. The
    tiers' directories are not accessed: their file systems may hang.
    """
    earlier: list[Path] = []
    for tier in tiers:
        directory = tier.directory
        if directory is None:
            continue
        for daemon_path in _path_variants(runtime_dir):
            if directory.is_relative_to(daemon_path) or daemon_path.is_relative_to(directory):
                yield _directory_conflict(
                    tier,
                    "is, contains or lies in the runtime directory",
                    f"runtime_dir = {runtime_dir}",
                )
                break
        for daemon_path in _path_variants(pool_dir):
            if daemon_path.is_relative_to(directory):
                yield _directory_conflict(
                    tier, "is or contains the pool's directory", f"pool_dir = {pool_dir}"
                )
                break
        for other in earlier:
            if directory.is_relative_to(other) or other.is_relative_to(directory):
                yield _directory_conflict(
                    tier, "is, contains or lies in another tier's directory", str(other)
                )
                break
        earlier.append(directory)


def _directory_conflict(tier: TierSetting, relation: str, other: str) -> str:
    return (
        f"{tier.name}: its directory {relation} ({other}); give the tier a"
        f" directory of its own, such as {tier.kind}:/var/lib/kvd/tier"
    )


def _path_variants(directory: str) -> set[Path]:
    """Return a directory's path as written, and with symbolic links resolved."""
    return {_normalized(str(Path(directory).absolute())), Path(directory).resolve()}


def _normalized(path: str) -> Path:
    return Path(os.path.normpath(path))


def size_option(tier: str, key: str, value: str) -> int:
    """Return the bytes of an option; raise ConfigError, which names `tier`, if it is no size."""
    try:
        return parse_size(value)
    except SizeError as error:
        remedy = (
            f"did you mean {error.suggestion}?"
            if error.suggestion
            else "give bytes or a number with a unit, such as 64GiB"
        )
        raise ConfigError(f"{tier}: {key}={value} is no size", remedy) from error


def _seconds(tier: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0.01 <= seconds <= 60:
        raise ConfigError(f"{tier}: late={value} is out of range", "give seconds from 0.01 to 60")
    return seconds
