"""`kvd config`: show, check and reload settings; `kvd doctor`: check the machine."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click
import msgspec

from kvd.cli import tools_missing
from kvd.cli.options import json_option, runtime_dir_option, settings_options, sources
from kvd.config.sources import DEFAULT, Sources
from kvd.config.values import parse_tiers
from kvd.errors import ConfigError
from kvd.wire.tool import ToolConnection
from kvd_proto.messages import ConfigChange, ConfigReloaded, ConfigShown, ReloadConfig, ShowConfig


@click.group()
def config() -> None:
    """Show, check and reload the settings.

    \b
    Examples:
      kvd config show
      kvd config check /etc/kvd/kvd.toml
      kvd config reload
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped


@config.command()
@settings_options
@click.option("--running", is_flag=True, help="Ask the running daemon what it runs with.")
@json_option("Print them as JSON.")
@click.option("--toml", "as_toml_file", is_flag=True, help="Print a file that can be used.")
def show(
    *,
    config: Path | None,
    running: bool,
    as_json: bool,
    as_toml_file: bool,
    **options: str | None,
) -> None:
    """Show the settings that `kvd serve` would run with, and where each value came from.

    Takes the options of `kvd serve`: put yours here to see what they do. With --running the
    daemon itself is asked, also for what waits for a restart.

    \b
    Examples:
      kvd config show
      kvd config show --config /etc/kvd/kvd.toml --cpu-bytes 64GiB
      kvd config show --json | jq .settings.cpu_bytes
      kvd config show --toml > kvd.toml
      kvd config show --running --runtime-dir /run/kvd
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    setting_sources = sources(config, options)
    if running:
        with ToolConnection(Path(setting_sources.runtime_dir())) as daemon:
            values = daemon.ask(ShowConfig(), ConfigShown).config
    else:
        loaded = setting_sources.load()
        values = loaded.as_json()
        for warning in loaded.warnings:
            click.echo(f"Warning: {warning}", err=True)
    if as_json:
        print(json.dumps(values, indent=2))
    elif as_toml_file:
        print(as_toml(values["settings"]), end="")
    else:
        from kvd.cli.tables import print_settings  # noqa: PLC0415  # --json does not need it

        print_settings(values["settings"])


@config.command()
@runtime_dir_option
@json_option("Print the answer as JSON.")
def reload(*, runtime_dir: Path, as_json: bool) -> None:
    """Have the running daemon read its configuration again, as SIGHUP does.

    What can change live holds at once; the rest is named and waits for a restart. A file that
    cannot be used is refused with all that is wrong in it, and the old settings hold. Flags and
    environment of the daemon come before the file as they did at its start.

    \b
    Examples:
      kvd config reload
      kvd config check /etc/kvd/kvd.toml && kvd config reload
      kvd config reload --json | jq '.changes[] | select(.live | not)'
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    with ToolConnection(runtime_dir) as daemon:
        reply = daemon.ask(ReloadConfig(), ConfigReloaded)
    if as_json:
        print(json.dumps(msgspec.to_builtins(reply), indent=2))
        return
    for warning in reply.warnings:
        click.echo(f"Warning: {warning}", err=True)
    source = reply.file or "environment and flags; there is no file"
    print(f"reloaded: {source}" + ("" if reply.changes else "; nothing changed"))
    for title, live in (("changed:", True), ("waits for a restart of the daemon:", False)):
        lines = [_change_line(change) for change in reply.changes if change.live is live]
        if lines:
            print("\n".join([title, *lines]))


@config.command()
@click.argument("file", type=click.Path(path_type=Path))
def check(*, file: Path) -> None:
    """Check FILE without starting anything; exit status 1 where it cannot be used.

    Everything that is wrong is told at once. Only the file is read: neither the environment
    nor flags count.

    \b
    Examples:
      kvd config check /etc/kvd/kvd.toml
      kvd config check new.toml && sudo install -m 644 new.toml /etc/kvd/kvd.toml
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    loaded = Sources(config=file, environment={}).load()
    if loaded.settings.tier:
        from kvd.tier.contract import tier_problems  # noqa: PLC0415  # few daemons have tiers

        problems = tier_problems(parse_tiers(loaded.settings.tier))
        if problems:
            origin = loaded.origins["tier"]
            raise ConfigError("\n".join(f"{origin}: tier: {problem}" for problem in problems))
    count = sum(origin != DEFAULT for origin in loaded.origins.values())
    print(f"{file}: ok, {count} {'setting' if count == 1 else 'settings'}")


def _change_line(change: ConfigChange) -> str:
    return f"  {change.key}: {change.old} -> {change.new}  ({change.origin})"


def toml_value(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, str):
        # TOML's basic strings equal JSON's, except that DEL must be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        parts = [f"{toml_value(key)} = {toml_value(item)}" for key, item in value.items()]
        return f"{{{', '.join(parts)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    return json.dumps(value)


def as_toml(settings: dict[str, dict[str, Any]]) -> str:
    """Return settings of `LoadedSettings.as_json` as a TOML file, with origins in comments."""
    lines = []
    for key, entry in settings.items():
        origin = entry["from"].encode("unicode_escape").decode()  # a comment is one line
        lines.append(f"{key} = {toml_value(entry['value'])}  # {origin}")
    return "\n".join(lines) + "\n"


@click.command()
@settings_options
@click.option(
    "--engine",
    is_flag=True,
    help="Examine this environment as an engine's: accelerator, way to the daemon, daemon.",
)
@json_option("Print the findings as JSON.")
def doctor(*, config: Path | None, engine: bool, as_json: bool, **options: str | None) -> None:
    """Check a machine for kvd: limits, memory, GPUs, directories, a running daemon.

    Changes nothing, and makes every check that `kvd serve` makes at its start. The exit status is
    1 if any line says fail.

    With --engine, run it with the engine's Python where the engine runs, such as in its container.
    It registers a small tensor of each device for a moment, and says whether the daemon maps the
    engine's memory (export) or the client copies it (staging), and why.

    \b
    Examples:
      kvd doctor --cpu-bytes 64GiB
      kvd doctor --config /etc/kvd/kvd.toml
      kvd doctor --json | jq '.findings[] | select(.level != "ok")'
      kvd doctor --engine --runtime-dir /run/kvd
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    from kvd.doctor import Finding, Level  # noqa: PLC0415  # kvd config does not need it

    setting_sources = sources(config, options)
    if engine:
        found = _load_engine_doctor()(Path(setting_sources.runtime_dir()))
        findings = [Finding(f.name, Level(f.level), f.text, f.remedy) for f in found]
    else:
        from kvd.doctor.checks import examine  # noqa: PLC0415  # an engine does not need it
        from kvd.doctor.facts import Facts  # noqa: PLC0415

        loaded = setting_sources.load()
        findings = examine(Facts(loaded.settings, loaded.warnings))
    colours = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}
    worst = max((finding.level for finding in findings), key=list(Level).index)
    if as_json:
        report = {"level": worst, "findings": [asdict(finding) for finding in findings]}
        click.echo(json.dumps(report, indent=2))
    else:
        for finding in findings:
            click.secho(f"{finding.level:4}  ", fg=colours[finding.level], bold=True, nl=False)
            click.echo(f"{finding.name}: {finding.text}")
            if finding.remedy:
                click.echo(f"      → {finding.remedy}")
    sys.exit(1 if worst == Level.FAIL else 0)


def _load_engine_doctor() -> Callable[[Path], list[Any]]:
    """Return the tools' function that examines an engine's environment.

    Its findings have the fields of `Finding`, with the level as text.
    """
    entries = list(entry_points(group="kvd.doctor", name="engine"))
    if not entries:
        raise tools_missing("doctor --engine")
    function: Callable[[Path], list[Any]] = entries[0].load()
    return function
