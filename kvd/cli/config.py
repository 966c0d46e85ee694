"""`kvd config`: what the daemon is told, where from, and whether a file is right."""

import json
from pathlib import Path

import click

from kvd.cli.options import settings_options, sources
from kvd.config.render import as_json, as_toml, changed
from kvd.config.sources import DEFAULT, Loaded, Sources
from kvd.errors import ConfigError


@click.group()
def config() -> None:
    """Show, check and reload the settings.

    \b
    Examples:
      kvd config show
      kvd config check /etc/kvd/kvd.toml
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped


@config.command()
@settings_options
@click.option("--json", "form", flag_value="json", help="Print them as JSON.")
@click.option("--toml", "form", flag_value="toml", help="Print a file that can be used.")
def show(*, config: Path | None, form: str | None, **options: str | None) -> None:
    """Show the settings that `kvd serve` would run with, and where each value came from.

    Takes the options of `kvd serve`: put yours here to see what they do.

    \b
    Examples:
      kvd config show
      kvd config show --config /etc/kvd/kvd.toml --cpu-bytes 64GiB
      kvd config show --json | jq .settings.cpu_bytes
      kvd config show --toml > kvd.toml
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    try:
        loaded = sources(config, options).load()
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    for warning in loaded.warnings:
        click.echo(f"Warning: {warning}", err=True)
    if form == "json":
        print(json.dumps(as_json(loaded), indent=2))
    elif form == "toml":
        print(as_toml(loaded), end="")
    else:
        _print_table(loaded)


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
    try:
        loaded = Sources(config=file, environment={}).load()
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    count = changed(loaded)
    print(f"{file}: ok, {count} {'setting' if count == 1 else 'settings'}")


def _print_table(loaded: Loaded) -> None:
    rows = [(key, str(getattr(loaded.settings, key)), at) for key, at in loaded.origins.items()]
    rows.insert(0, ("SETTING", "VALUE", "FROM"))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for key, value, origin in rows:
        line = f"{key:{widths[0]}}  {value:{widths[1]}}  {origin}"
        click.echo(click.style(line, dim=origin == DEFAULT))
