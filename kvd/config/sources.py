"""Where settings come from: the defaults, one TOML file, the environment, the flags.

The later wins, key by key. On a reload some changes wait for a restart. An invalid source is
reported with all its errors at once; each line names place, key, value and remedy.
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
    """Valid settings, and where each value came from.

    Attributes:
        settings: the values.
        origins: by key: `default`, a file with its line, a variable or a flag.
        file: the file that was read, if any.
        warnings: probable mistakes.
        pending_restart: by key: new value and origin that apply only after a restart.
    """

    settings: Settings
    origins: Mapping[str, str] = field(default_factory=lambda: dict.fromkeys(SETTINGS, DEFAULT))
    file: Path | None = None
    warnings: tuple[str, ...] = ()
    pending_restart: Mapping[str, tuple[Any, str]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the effective settings by key, with the values that need a restart."""
        settings: dict[str, dict[str, Any]] = {
            key: {
                "value": getattr(self.settings, key),
                "from": origin,
                "changes_live": SETTINGS[key].live,
            }
            for key, origin in self.origins.items()
        }
        for key, (value, origin) in self.pending_restart.items():
            settings[key]["after_restart"] = {"value": value, "from": origin}
        return {"file": str(self.file) if self.file else None, "settings": settings}


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of settings; a daemon retains them for reloads.

    Attributes:
        config: the file of --config.
        flags: text by key, from the command line.
        environment: usually that of the process.
    """

    config: Path | None = None
    flags: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def file(self) -> Path | None:
        """The file to read: --config, else KVD_CONFIG, else the default one if it exists."""
        named = self.config or self.environment.get(FILE_VARIABLE)
        if named:
            return Path(named)
        try:
            return DEFAULT_FILE if DEFAULT_FILE.exists() else None
        except PermissionError:  # reading it reports the reason
            return DEFAULT_FILE

    def load(self) -> LoadedSettings:
        """Read all sources.

        Raises:
            ConfigError: all errors, one a line.
        """
        file = self.file
        problems: list[str] = []
        values: dict[str, Any] = {}
        origins = dict.fromkeys(SETTINGS, DEFAULT)
        for source in (
            self._from_file(file, problems),
            self._from_environment(),
            self._from_flags(),
        ):
            for key, value, origin, typed in source:
                try:
                    values[key] = SETTINGS[key].convert(value, typed=typed)
                except ConfigError as error:
                    problems.append(f"{origin}: {error}")
                origins[key] = origin
        _raise_all(problems)
        settings = Settings(**values)
        cpu_bytes = settings.pool_bytes
        if cpu_bytes is not None:
            contradictions = quota_contradictions(settings.quotas(cpu_bytes), cpu_bytes)
            _raise_all([f"{origins['quota']}: quota: {text}" for text in contradictions])
        conflicts = tier_directory_conflicts(
            parse_tiers(settings.tier), settings.runtime_dir, settings.pool_dir
        )
        _raise_all([f"{origins['tier']}: tier: {text}" for text in conflicts])
        return LoadedSettings(settings, origins, file, tuple(self._suspicious_variables()))

    def runtime_dir(self) -> str:
        """Return `runtime_dir`, which tools need; errors in other settings are ignored.

        Raises:
            ConfigError: the file cannot be read, or its runtime_dir is no text.
        """
        setting = SETTINGS["runtime_dir"]
        text = self.flags.get(setting.key) or self.environment.get(setting.variable)
        if text:
            return text
        file = self.file
        value = read_toml(file)[0].get(setting.key, setting.default) if file else setting.default
        try:
            return str(setting.convert(value, typed=True))
        except ConfigError:
            raise ConfigError(
                f"{file}: {setting.key} = {value!r}: needs {setting.requirement}; or give"
                " --runtime-dir"
            ) from None

    def log_format(self) -> str:
        """Return `log_format`, for errors in other settings; the default if it is invalid."""
        setting = SETTINGS["log_format"]
        value = self.flags.get(setting.key) or self.environment.get(setting.variable)
        if not value and (file := self.file):
            with contextlib.suppress(ConfigError):
                value = read_toml(file)[0].get(setting.key)
        return value if value in setting.choices else str(setting.default)

    # -------------------------------------------------------------- sources

    def _from_file(
        self, file: Path | None, problems: list[str]
    ) -> Iterator[tuple[str, Any, str, bool]]:
        """Yield the file's settings: key, value, origin, and that the value is typed."""
        if file is None:
            return
        try:
            values, text = read_toml(file)
        except ConfigError as error:
            problems.append(str(error))
            return
        for key, value in values.items():
            origin = f"{file}{_line_of_key(text, key)}"
            if key in SETTINGS:
                yield key, value, origin, True
            else:
                problems.append(
                    f"{origin}: {key} = {value!r}: no such setting; {_spelling_hint(key)}"
                )

    def _from_environment(self) -> Iterator[tuple[str, Any, str, bool]]:
        for key, setting in SETTINGS.items():
            value = self.environment.get(setting.variable)
            if value:  # empty means unset, as in compose files
                yield key, value, setting.variable, False

    def _from_flags(self) -> Iterator[tuple[str, Any, str, bool]]:
        for key, value in self.flags.items():
            yield key, value, SETTINGS[key].flag, False

    def _suspicious_variables(self) -> Iterator[str]:
        # Only a warning: orchestrators put variables such as KVD_PORT into every container.
        known_variables = {FILE_VARIABLE, *(setting.variable for setting in SETTINGS.values())}
        for name in sorted(self.environment):
            if name.startswith(ENVIRONMENT_PREFIX) and name not in known_variables:
                matches = difflib.get_close_matches(name, known_variables, n=1, cutoff=0.85)
                if matches:
                    yield f"{name} is no setting; did you mean {matches[0]}?"


def read_toml(file: Path) -> tuple[dict[str, Any], str]:
    """Return a file's values and its text.

    Raises:
        ConfigError: the file cannot be read or is not TOML.
    """
    try:
        # A character device is allowed: /dev/null stands for no file.
        if file.exists() and not (file.is_file() or file.is_char_device()):
            raise OSError(errno.EINVAL, "it is no regular file")  # reading a pipe could block
        text = file.read_text(encoding="utf-8")
        return tomllib.loads(text), text
    except PermissionError as error:
        reason = explain_denied(file) or error.strerror
        raise ConfigError(f"{file}: cannot be read: {reason}") from error
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be read ({error.strerror}); name another with --config or"
            f" {FILE_VARIABLE}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file}: not TOML: {error}; a setting is a line such as cpu_bytes = '64GiB'"
        ) from error


def _line_of_key(text: str, key: str) -> str:
    """Return `:7` if line 7 starts with the key; empty if no line does."""
    match = re.search(rf"^[ \t]*\[?[\"']?{re.escape(key)}\b", text, re.MULTILINE)
    if match is None:
        return ""
    number = text.count("\n", 0, match.start()) + 1
    return f":{number}"


def _spelling_hint(key: str) -> str:
    matches = difflib.get_close_matches(key.lower().replace("-", "_"), SETTINGS, n=1)
    return f"did you mean {matches[0]}?" if matches else f"known are: {', '.join(SETTINGS)}"


def _raise_all(problems: list[str]) -> None:
    if problems:
        raise ConfigError("\n".join(problems))
