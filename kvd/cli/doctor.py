"""`kvd doctor`: whether this machine suits kvd, before and after installing it."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click

from kvd.cli.options import json_option, settings_options, sources
from kvd.doctor import Level
from kvd.doctor.checks import examine
from kvd.doctor.facts import Facts

_COLOURS = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}


@click.command()
@settings_options
@json_option("Print the findings as JSON.")
def doctor(*, config: Path | None, as_json: bool, **options: str | None) -> None:
    """Check a machine for kvd: limits, memory, GPUs, directories, a running daemon.

    Changes nothing. The exit status is 1 if any line says fail.

    \b
    Examples:
      kvd doctor --cpu-bytes 64GiB
      kvd doctor --config /etc/kvd/kvd.toml
      kvd doctor --json | jq '.findings[] | select(.level != "ok")'
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    findings = examine(Facts(sources(config, options).load().settings))
    worst = max((finding.level for finding in findings), key=list(Level).index)
    if as_json:
        told = {"level": worst, "findings": [asdict(finding) for finding in findings]}
        click.echo(json.dumps(told, indent=2))
    else:
        for finding in findings:
            click.secho(f"{finding.level:4}  ", fg=_COLOURS[finding.level], bold=True, nl=False)
            click.echo(f"{finding.name}: {finding.text}")
            if finding.remedy:
                click.echo(f"      → {finding.remedy}")
    sys.exit(1 if worst == Level.FAIL else 0)
