"""Where settings come from: the defaults, one TOML file, the environment, the flags.

The later wins, key by key; of what a running daemon reads again some waits for a restart. A
source that cannot be used is reported with all that is wrong in it at once, each line naming
place, key, value and remedy.
"""

import contextlib
import difflib
import errno
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvd.config.settings import ENVIRONMENT_PREFIX, SETTINGS, Settings
from kvd.config.values import parse_tiers, quota_contradictions, tier_directory_conflicts
from kvd.errors import ConfigError
from kvd_proto.text import explain_denied

DEFAULT_FILE = Path("/etc/kvd/kvd.toml")
FILE_VARIABLE = "KVD_CONFIG"
DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class LoadedSettings:
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
    origins: Mapping[str, str] = field(default_factory=lambda: dict.fromkeys(SETTINGS, DEFAULT))
    file: Path | None = None
    warnings: tuple[str, ...] = ()
    waiting: Mapping[str, tuple[Any, str]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the effective settings by key, with what waits for a restart."""
        settings: dict[str, dict[str, Any]] = {
            key: {
                "value": getattr(self.settings, key),
                "from": origin,
                "changes_live": SETTINGS[key].live,
            }
            for key, origin in self.origins.items()
        }
        for key, (value, origin) in self.waiting.items():
            settings[key]["after_restart"] = {"value": value, "from": origin}
        return {"file": str(self.file) if self.file else None, "settings": settings}


@dataclass(frozen=True, slots=True)
class Sources:
    """The places to look at; a daemon keeps them, to look again on reload.

    Attributes:
        config: the file named by --config.
        flags: text by key, as given on the command line.
        environment: usually the process's own.
    """

    config: Path | None = None
    flags: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def file(self) -> Path | None:
        """The file to read: --config, else KVD_CONFIG, else the default one where it exists."""
        named = self.config or self.environment.get(FILE_VARIABLE)
        if named:
            return Path(named)
        try:
            return DEFAULT_FILE if DEFAULT_FILE.exists() else None
        except PermissionError:  # to read it says why
            return DEFAULT_FILE

    def load(self) -> LoadedSettings:
        """Read every source.

        Raises:
            ConfigError: all that is wrong, a line each.
        """
        file = self.file
        problems: list[str] = []
        values: dict[str, Any] = {}
        origins = dict.fromkeys(SETTINGS, DEFAULT)
        for source in (self._from_file(file, problems), self._from_environment(), self._given()):
            for key, value, origin, typed in source:
                try:
                    values[key] = SETTINGS[key].convert(value, typed=typed)
                except ConfigError as error:
                    problems.append(f"{origin}: {key} = {value!r}: {error}")
                origins[key] = origin
        _refuse(problems)
        settings = Settings(**values)
        size = settings.pool_bytes
        if size is not None:
            wrong = quota_contradictions(settings.quotas(size), size)
            _refuse([f"{origins['quota']}: quota: {text}" for text in wrong])
        misplaced = tier_directory_conflicts(
            parse_tiers(settings.tier), settings.runtime_dir, settings.pool_dir
        )
        _refuse([f"{origins['tier']}: tier: {text}" for text in misplaced])
        return LoadedSettings(settings, origins, file, tuple(self._suspicious()))

    def runtime_dir(self) -> str:
        """Return the one setting that a tool needs; other mistakes are ignored.

        Raises:
            ConfigError: the file cannot be read, or its runtime_dir is no text.
        """
        known = SETTINGS["runtime_dir"]
        found = self.flags.get(known.key) or self.environment.get(known.variable)
        if found:
            return found
        file = self.file
        value = read_toml(file)[0].get(known.key, known.default) if file else known.default
        try:
            return str(known.convert(value, typed=True))
        except ConfigError:
            raise ConfigError(
                f"{file}: {known.key} = {value!r}: needs {known.needs}; or give --runtime-dir"
            ) from None

    def log_format(self) -> str:
        """Return the format for the errors of other settings; the default where it is wrong too."""
        known = SETTINGS["log_format"]
        value = self.flags.get(known.key) or self.environment.get(known.variable)
        if not value and (file := self.file):
            with contextlib.suppress(ConfigError):
                value = read_toml(file)[0].get(known.key)
        return value if value in known.choices else str(known.default)

    # -------------------------------------------------------------- sources

    def _from_file(
        self, file: Path | None, problems: list[str]
    ) -> Iterator[tuple[str, Any, str, bool]]:
        if file is None:
            return
        try:
            values, text = read_toml(file)
        except ConfigError as error:
            problems.append(str(error))
            return
        for key, value in values.items():
            place = f"{file}{_line(text, key)}"
            if key in SETTINGS:
                yield key, value, place, True
            else:
                problems.append(f"{place}: {key} = {value!r}: no such setting; {_nearest(key)}")

    def _from_environment(self) -> Iterator[tuple[str, Any, str, bool]]:
        for key, known in SETTINGS.items():
            value = self.environment.get(known.variable)
            if value:  # empty is not set: how compose files write "no value"
                yield key, value, known.variable, False

    def _given(self) -> Iterator[tuple[str, Any, str, bool]]:
        for key, value in self.flags.items():
            yield key, value, SETTINGS[key].flag, False

    def _suspicious(self) -> Iterator[str]:
        # Not refused: an orchestrator may put KVD_PORT and the like into every container.
        ours = {FILE_VARIABLE, *(known.variable for known in SETTINGS.values())}
        for name in sorted(self.environment):
            if name.startswith(ENVIRONMENT_PREFIX) and name not in ours:
                close = difflib.get_close_matches(name, ours, n=1, cutoff=0.85)
                if close:
                    yield f"{name} is no setting; did you mean {close[0]}?"


def read_toml(file: Path) -> tuple[dict[str, Any], str]:
    """Return a file's values, and its text.

    Raises:
        ConfigError: it cannot be read, or is not TOML.
    """
    try:
        if file.exists() and not (
            file.is_file() or file.is_char_device()
        ):  # /dev/null is "no file"
            raise OSError(errno.EINVAL, "it is no regular file")  # a pipe would hold the daemon up
        text = file.read_text(encoding="utf-8")
        return tomllib.loads(text), text
    except PermissionError as error:
        why = explain_denied(file) or error.strerror
        raise ConfigError(f"{file}: cannot be read: {why}") from error
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be read ({error.strerror}); name another with --config or"
            f" {FILE_VARIABLE}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file}: not TOML: {error}; a setting is a line such as cpu_bytes = '64GiB'"
        ) from error


def _line(text: str, key: str) -> str:
    """`:7` where the key stands at the beginning of line 7."""
    found = re.search(rf"^[ \t]*\[?[\"']?{re.escape(key)}\b", text, re.MULTILINE)
    if found is None:
        return ""
    number = text.count("\n", 0, found.start()) + 1
    return f":{number}"


def _nearest(key: str) -> str:
    close = difflib.get_close_matches(key.lower().replace("-", "_"), SETTINGS, n=1)
    return f"did you mean {close[0]}?" if close else f"known are: {', '.join(SETTINGS)}"


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError("\n".join(problems))
