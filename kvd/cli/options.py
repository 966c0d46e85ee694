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
    """--runtime-dir and --config of a command that talks to a daemon.

    The function gets `runtime_dir: Path`.
    """
    function = click.option("--runtime-dir", **RUNTIME_DIR)(function)
    return click.option(
        "--config",
        type=click.Path(path_type=Path, dir_okay=False),
        callback=_keep_config,
        is_eager=True,  # read before --runtime-dir, which needs it
        expose_value=False,
        help=f"The daemon's settings file, for its runtime_dir. [default: {FILE_VARIABLE}, else"
        f" {DEFAULT_FILE} where it exists]",
    )(function)


def _keep_config(context: click.Context, parameter: click.Parameter, value: Path | None) -> None:
    del parameter
    context.meta[_CONFIG] = value


def json_option(text: str) -> Callable[[F], F]:
    """--json of a command; the function gets `as_json: bool`. Errors are printed as JSON, too."""
    return click.option(
        "--json",
        "as_json",
        is_flag=True,
        is_eager=True,  # an error in another option is JSON, too
        callback=keep_json,
        help=text,
    )


def keep_json(context: click.Context, parameter: click.Parameter, value: bool) -> bool:
    """Remember whether errors are to be JSON; a callback of --json."""
    del parameter
    context.meta[AS_JSON] = value
    return value


def wide_option(function: F) -> F:
    """--wide of a command that shows names; the function gets `wide: bool`."""
    return click.option("--wide", is_flag=True, help="Show names whole, however long.")(function)


def _find_runtime_dir(context: click.Context, parameter: click.Parameter, value: Any) -> Path:
    del parameter
    if context.resilient_parsing:  # completion: nothing may fail, nothing is used
        return Path()
    flags = {"runtime_dir": value} if value else {}
    return Path(Sources(context.meta.get(_CONFIG), flags).runtime_dir())


def find_reachable_dir(context: click.Context, parameter: click.Parameter, value: Any) -> Path:
    """Return the runtime directory, for a command that does not use `ToolConnection`; a callback.

    Raises:
        SocketAccessDenied: this process may not reach the sockets there.
    """
    path = _find_runtime_dir(context, parameter, value)
    if not context.resilient_parsing and (denied := explain_denied(path / "broker.sock")):
        raise SocketAccessDenied(denied)
    return path


RUNTIME_DIR: dict[str, Any] = {
    "type": click.Path(file_okay=False, readable=False),  # `SocketAccessDenied` says more
    "callback": _find_runtime_dir,
    "help": f"The daemon's runtime directory. [default: {SETTINGS['runtime_dir'].variable}, else"
    f" runtime_dir of the configuration file, else {SETTINGS['runtime_dir'].default}]",
}
"""Without it the same rules hold as for the daemon: KVD_RUNTIME_DIR, the file, /run/kvd."""


def duration(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """Convert an option's value, such as 90s or 1h30m, to seconds; a callback."""
    try:
        return parse_duration(value)
    except SizeError as error:
        raise click.BadParameter(str(error), ctx, param) from error


def settings_options(function: F) -> F:
    """--config and one option for each setting.

    The function gets `config: Path | None`, and the others as text or None, by key.
    """
    for known in reversed(SETTINGS.values()):
        function = _option(known)(function)
    return click.option(
        "--config",
        type=click.Path(path_type=Path, dir_okay=False),
        help=f"TOML file with settings. [default: {FILE_VARIABLE}, else {DEFAULT_FILE} where it"
        " exists]",
    )(function)


def _joined(_context: click.Context, _option: click.Parameter, texts: tuple[str, ...]) -> Any:
    return ";".join(texts) or None


def _option(known: Setting) -> Callable[[F], F]:
    live = " Changes live." if known.live else ""
    return click.option(
        known.flag,
        known.key,
        # Text: values are checked where those of the file are, so that messages agree.
        metavar="|".join(known.choices) or known.metavar,
        help=f"{known.help}{live} [default: {known.default}]",
        multiple=known.repeatable,
        callback=_joined if known.repeatable else None,
        shell_complete=lambda _context, _option, begin: [
            word for word in known.choices if word.startswith(begin)
        ],
    )


def sources(config: Path | None, options: dict[str, str | None]) -> Sources:
    """What `settings_options` gave, as places to load from."""
    flags = {key: value for key, value in options.items() if value is not None}
    return Sources(config=config, flags=flags)
