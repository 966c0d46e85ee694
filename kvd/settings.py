"""The daemon's settings: one TOML file, then the command line.

Sizes are text such as ``64GiB``; durations are seconds.
"""

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvd.errors import ConfigError
from kvd_proto.errors import SizeError
from kvd_proto.sizes import parse_size

Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a daemon can be told. Every field has a default but the runtime directory."""

    runtime_dir: str
    cpu_bytes: str | int = "auto"
    pool_dir: str = "/dev/shm"  # the node's tmpfs is where a pool belongs
    host_ratio: Annotated[float, Meta(gt=0, le=1000)] = 2.0
    reserve: str | int = "2GiB"
    policy: Literal["lru", "arc"] = "lru"
    reuse_threshold: Annotated[int, Meta(ge=1, le=1000)] = 1
    lease_seconds: Seconds = 60.0
    ticket_seconds: Seconds = 60.0
    lane_timeout_seconds: Seconds = 5.0
    drain_seconds: Seconds = 10.0
    http_listen: str = "127.0.0.1:9330"
    max_sessions: Annotated[int, Meta(ge=1, le=65536)] = 1024

    @property
    def pool_bytes(self) -> int | None:
        """The pool's size, or None where the workers' reports decide it (``auto``)."""
        return None if self.cpu_bytes == "auto" else _size("cpu_bytes", self.cpu_bytes)

    @property
    def reserve_bytes(self) -> int:
        """Memory that ``auto`` leaves to everybody else."""
        return _size("reserve", self.reserve)


def _size(key: str, value: str | int) -> int:
    try:
        size = parse_size(value)
    except SizeError as error:
        raise ConfigError(f"{key} = {value!r}: {error}") from error
    if size < 0:
        raise ConfigError(f"{key} = {value!r}: a size below zero; give bytes or text like 64GiB")
    return size


def load_settings(file: Path | None, overrides: dict[str, Any]) -> Settings:
    """Settings from `file` (TOML) and `overrides` (not None), the latter first.

    Raises:
        ConfigError: names file, key, value and remedy.
    """
    values: dict[str, Any] = {}
    if file is not None:
        try:
            values = tomllib.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read ({error.strerror})") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: not TOML: {error}") from error
    values |= {key: value for key, value in overrides.items() if value is not None}
    if "runtime_dir" not in values:
        raise ConfigError("runtime_dir is not set; give --runtime-dir DIR, such as /run/kvd")
    where = str(file) if file is not None else "command line"
    try:
        settings = msgspec.convert(values, Settings, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{where}: {error}; known keys: {', '.join(Settings.__struct_fields__)}"
        ) from error
    if settings.cpu_bytes != "auto" and settings.pool_bytes == 0:
        raise ConfigError("cpu_bytes = 0: a pool needs room; give a size such as 64GiB, or auto")
    _ = settings.reserve_bytes
    return settings
