"""Options that several commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvd.cli import AS_JSON
from kvd.config.settings import SETTINGS, Setting
from kvd.config.sources import DEFAULT_FILE, FILE_VARIABLE, Sources
from kvd.errors import SocketAccessDenied
from kvd_proto.errors import SizeError
from kvd_proto.text import explain_denied, parse_duration

F = TypeVar("F", bound=Callable[..., Any])
_CONFIG = "kvd.cli.config"


def runtime_dir_option(function: F) -> F:
    """Add --runtime-dir and --config to a command that connects to a daemon.

    The function gets `runtime_dir: Path`.
    """
    function = click.option("--runtime-dir", **RUNTIME_DIR)(function)
    return click.option(
        "--config",
        type=click.Path(path_type=Path, dir_okay=False),
        callback=_store_config,
        is_eager=True,  # read before --runtime-dir, which needs it
        expose_value=False,
        help=f"The daemon's settings file, for its runtime_dir. [default: {FILE_VARIABLE}, else"
        f" {DEFAULT_FILE} where it exists]",
    )(function)


def _store_config(context: click.Context, parameter: click.Parameter, value: Path | None) -> None:
    del parameter
    context.meta[_CONFIG] = value


def json_option(text: str) -> Callable[[F], F]:
    """Add --json to a command; the function gets `as_json: bool`. Errors are JSON too."""
    return click.option(
        "--json",
        "as_json",
        is_flag=True,
        is_eager=True,  # an error in another option is JSON, too
        callback=store_json,
        help=text,
    )


def store_json(context: click.Context, parameter: click.Parameter, value: bool) -> bool:
    """Store in the context whether errors are JSON; the callback of --json."""
    del parameter
    context.meta[AS_JSON] = value
    return value


def wide_option(function: F) -> F:
    """Add --wide to a command that shows names; the function gets `wide: bool`."""
    return click.option("--wide", is_flag=True, help="Show names whole, however long.")(function)


def _find_runtime_dir(context: click.Context, parameter: click.Parameter, value: Any) -> Path:
    del parameter
    if context.resilient_parsing:  # completion: must not fail, and does not use the value
        return Path()
    flags = {"runtime_dir": value} if value else {}
    return Path(Sources(context.meta.get(_CONFIG), flags).runtime_dir())


def find_reachable_dir(context: click.Context, parameter: click.Parameter, value: Any) -> Path:
    """Return the runtime directory; a callback for commands that do not use `ToolConnection`.

    Raises:
        SocketAccessDenied: this process may not open the sockets there.
    """
    path = _find_runtime_dir(context, parameter, value)
    if not context.resilient_parsing and (reason := explain_denied(path / "broker.sock")):
        raise SocketAccessDenied(reason)
    return path


RUNTIME_DIR: dict[str, Any] = {
    "type": click.Path(file_okay=False, readable=False),  # `SocketAccessDenied` says more
    "callback": _find_runtime_dir,
    "help": f"The daemon's runtime directory. [default: {SETTINGS['runtime_dir'].variable}, else"
    f" runtime_dir of the configuration file, else {SETTINGS['runtime_dir'].default}]",
}
"""Options of --runtime-dir; its default follows the daemon's rules."""


def duration(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Convert an option's value, such as 90s or 1h30m, to seconds; a callback."""
    try:
        return parse_duration(value)
    except SizeError as error:
        raise click.BadParameter(str(error), ctx, param) from error


def settings_options(function: F) -> F:
    """Add --config and one option for each setting.

    The function gets `config: Path | None`, and the others as text or None, by key.
    """
    for setting in reversed(SETTINGS.values()):
        function = _option(setting)(function)
    return click.option(
        "--config",
        type=click.Path(path_type=Path, dir_okay=False),
        help=f"TOML file with settings. [default: {FILE_VARIABLE}, else {DEFAULT_FILE} where it"
        " exists]",
    )(function)


def _join(_context: click.Context, _option: click.Parameter, texts: tuple[str, ...]) -> Any:
    return ";".join(texts) or None


def _option(setting: Setting) -> Callable[[F], F]:
    live = " Changes live." if setting.live else ""
    return click.option(
        setting.flag,
        setting.key,
        # No click type: values are checked with those of the file, with the same messages.
        metavar="|".join(setting.choices) or setting.metavar,
        help=f"{setting.help}{live} [default: {setting.default}]",
        multiple=setting.repeatable,
        callback=_join if setting.repeatable else None,
        shell_complete=lambda _context, _option, begin: [
            word for word in setting.choices if word.startswith(begin)
        ],
    )


def sources(config: Path | None, options: dict[str, str | None]) -> Sources:
    """Return the sources that the options of `settings_options` define."""
    flags = {key: value for key, value in options.items() if value is not None}
    return Sources(config=config, flags=flags)
