"""How an operator writes an address, a list of users or groups, and models' quotas of the pool."""

import ipaddress
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvd.errors import ConfigError
from kvd_proto.errors import SizeError
from kvd_proto.sizes import format_size, parse_size

_MAX_ID = 2**32 - 2


@dataclass(frozen=True, slots=True)
class Listen:
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


def parse_listen(text: str) -> Listen | None:
    """Parse ``HOST:PORT`` or ``[IPv6]:PORT``; return None for ``off``.

    Raises:
        ConfigError: anything else.
    """
    if text == "off":
        return None
    try:
        parts = urlsplit(f"//{text}")
        if parts.netloc == text and parts.hostname and parts.port is not None and "@" not in text:
            return Listen(parts.hostname, parts.port)
    except ValueError:  # brackets around no address, or no port
        pass
    raise ConfigError(
        "not an address; give HOST:PORT such as 127.0.0.1:9330 or [::1]:9330 (port 0 lets the"
        " kernel choose, 65535 is the highest), or off"
    )


def names_in(text: str) -> list[str]:
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
        meant = f"; did you mean {error.meant}?" if error.meant else ""
    except ValueError:
        pass
    raise ConfigError(
        f"{model}: {key} = {amount!r}: needs a size such as 8GiB, or 0% to 100% of the pool{meant}"
    )
