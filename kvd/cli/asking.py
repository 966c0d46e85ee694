"""What commands share that ask a running daemon: its reply or a sentence."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from kvd.errors import NotRunning, Refused
from kvd.wire.tool import Control
from kvd_proto.durations import parse_duration
from kvd_proto.errors import DurationError


@contextmanager
def control(runtime_dir: Path, timeout: float = 5.0) -> Iterator[Control]:
    """A connection to the daemon, for a command.

    Raises:
        ClickException: no daemon answers, or it refuses; the sentence says why.
    """
    try:
        with Control(runtime_dir, timeout) as opened:
            yield opened
    except NotRunning as error:
        raise click.ClickException(str(error)) from error
    except Refused as error:
        raise click.ClickException(f"the daemon refuses: {error} [{error.code}]") from error


def duration(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """An option's callback: its value, such as 90s or 1h30m, as seconds."""
    try:
        return parse_duration(value)
    except DurationError as error:
        raise click.BadParameter(str(error), ctx, param) from error
