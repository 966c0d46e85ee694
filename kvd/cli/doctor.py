"""`kvd doctor`: whether this machine suits kvd, before and after installing it."""

import json
import sys
from pathlib import Path

import click

from kvd.cli.options import settings_options, sources
from kvd.doctor.checks import examine
from kvd.doctor.facts import gather
from kvd.doctor.findings import Level, summary

_COLOURS = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}


@click.command()
@settings_options
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(*, config: Path | None, as_json: bool, **options: str | None) -> None:
    """Check a machine for kvd: limits, memory, GPUs, directories, a running daemon.

    Changes nothing. The exit status is 1 if any line says fail.

    \b
    Examples:
      kvd doctor --cpu-bytes 64GiB
      kvd doctor --config /etc/kvd/kvd.toml
      kvd doctor --json | jq '.findings[] | select(.level != "ok")'
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    findings = examine(gather(sources(config, options).load().settings))
    result = summary(findings)
    if as_json:
        click.echo(json.dumps(result, indent=2))
    else:
        for finding in findings:
            click.secho(f"{finding.level:4}  ", fg=_COLOURS[finding.level], bold=True, nl=False)
            click.echo(f"{finding.name}: {finding.text}")
            if finding.remedy:
                click.echo(f"      → {finding.remedy}")
    sys.exit(1 if result["level"] == Level.FAIL else 0)
