"""`kvd top`: the daemon in a terminal, live."""

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import click

from kvd.cli.options import runtime_dir_option, wide_option
from kvd.cli.top_view import picture, waiting
from kvd.errors import AccessDenied, NotRunning
from kvd.metrics.reading import History
from kvd.wire.tool import Control

_ANSWER_SECONDS = 2.0
_FILE_COLUMNS = 240


@click.command()
@runtime_dir_option
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 60.0),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--once", is_flag=True, help="Measure for one interval, print, and leave.")
@wide_option
def top(*, runtime_dir: Path, interval: float, once: bool, wide: bool) -> None:
    """Watch the daemon: what is wrong, the pool, throughput, queues, engines, events.

    It asks over the broker's socket and survives the daemon's restarts. Leave with q or Ctrl-C.

    \b
    Examples:
      kvd top
      kvd top --interval 5
      kvd top --once > report.txt
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    if not once and not sys.stdout.isatty():
        raise click.ClickException(
            "kvd top draws on a terminal, and this is none; use kvd top --once, or kvd status"
            " --json for scripts"
        )
    if once:
        _once(runtime_dir, interval, wide=wide)
    else:
        _live(runtime_dir, interval, wide=wide)


def _look(history: History, runtime_dir: Path) -> bool:
    """Take one more report; whether it is the first of another daemon than before."""
    with Control(runtime_dir, _ANSWER_SECONDS) as daemon:
        return history.add(daemon.status())


def _once(runtime_dir: Path, interval: float, *, wide: bool) -> None:
    from rich.console import Console  # noqa: PLC0415  # the command's help needs no drawing

    history = History()
    _look(history, runtime_dir)
    time.sleep(interval)
    _look(history, runtime_dir)
    console = Console()
    if wide and not console.is_terminal:
        console.width = _FILE_COLUMNS
    console.print(picture(history, wide=wide))


def _live(runtime_dir: Path, interval: float, *, wide: bool) -> None:
    from rich.console import Console  # noqa: PLC0415  # the command's help needs no drawing
    from rich.live import Live  # noqa: PLC0415

    history, restarts = History(), 0
    with (
        contextlib.suppress(KeyboardInterrupt),
        _keys(sys.stdin) as next_key,
        Live(console=Console(), screen=True, auto_refresh=False) as live,
    ):
        while True:
            try:
                restarts += _look(history, runtime_dir)
                shown = picture(history, restarts, live.console.height, wide=wide)
            except AccessDenied:  # which does not pass
                raise
            except NotRunning as error:
                shown = waiting(runtime_dir, str(error))
            live.update(shown, refresh=True)
            if next_key(interval) == "q":
                return


@contextlib.contextmanager
def _keys(source: TextIO) -> Iterator[Callable[[float], str]]:
    """Read single keys, without Return, by a function that waits for the next one.

    It returns an empty text after so many seconds; without a terminal it only waits.
    """
    terminal = source.isatty()

    def next_key(seconds: float) -> str:
        ready, _, _ = select.select([source] if terminal else [], [], [], seconds)
        return os.read(source.fileno(), 1).decode("latin-1").lower() if ready else ""

    before = termios.tcgetattr(source) if terminal else None
    try:
        if terminal:
            tty.setcbreak(source)
        yield next_key
    finally:
        if before is not None:
            with contextlib.suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(source, termios.TCSADRAIN, before)
