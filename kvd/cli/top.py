"""`kvd top`: the daemon in a terminal, live."""

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from kvd.cli.options import runtime_dir_option, wide_option
from kvd.cli.tables import (
    POOL_STATES,
    found_share,
    header,
    kv_events,
    lanes_table,
    more_text,
    name_text,
    plain_table,
    pool_use,
    problems,
    tier_state,
)
from kvd.errors import NotRunning, SocketAccessDenied
from kvd.metrics.counts import DIRECTIONS, STAGES
from kvd.metrics.reading import NOTHING, History, Report, Span, latency, number, percent, rate, size
from kvd.wire.tool import ToolConnection

_ANSWER_SECONDS = 2.0
_FILE_COLUMNS = 240
LINE_CELLS = 80
BAR_CELLS = 50
SPARK_CELLS = 48
ENGINES = 12
EVENTS = 8
SMALL = 24  # a screen with no more lines has no room for the forecast
_FIXED_LINES = 18  # header, verdict, five rules, bar, throughput, heads of tables, stages
_LINES_OF_TIERS = 2  # rule, head of the table
_LINES_OF_ONE = 4  # a problem and its remedy
_COUNTED = {"ready", "pinned"}  # of a namespace's chunks; the bar shows the others
_SPARKS = "▁▂▃▄▅▆▇█"
_COLOURS = ("cyan", "magenta", "blue", "yellow", "green")


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
    with ToolConnection(runtime_dir, _ANSWER_SECONDS) as daemon:
        return history.add(daemon.status())


def _once(runtime_dir: Path, interval: float, *, wide: bool) -> None:

    history = History()
    _look(history, runtime_dir)
    time.sleep(interval)
    _look(history, runtime_dir)
    console = Console()
    if wide and not console.is_terminal:
        console.width = _FILE_COLUMNS
    console.print(picture(history, wide=wide))


def _live(runtime_dir: Path, interval: float, *, wide: bool) -> None:

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
            except SocketAccessDenied:  # which does not pass
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


def picture(
    history: History, restarts: int = 0, height: int | None = None, *, wide: bool = False
) -> RenderableType:
    """Everything that is known of the daemon, for 80 columns and more.

    Names are shortened, unless `wide`.

    On a screen of `height` lines lists are shortened, and say by how much, so that no
    section is cut off; without it, or where that does not help, all of it is drawn.

    Raises:
        IndexError: no report has come yet.
    """
    span = history.span()
    found = span.now["conditions"]
    below = span.now["tiers"]
    lists = [span.now["namespaces"], span.now["lanes"], below]
    most = [(span.now["engines"], ENGINES), (span.now["events"], EVENTS)]
    wanted = [*map(len, lists), *(min(len(each), bound) for each, bound in most)]
    told = len(found)
    if height is not None:
        room = height - _FIXED_LINES - (_LINES_OF_TIERS if below else 0)
        told = min(told, max(1, (room - sum(map(bool, wanted))) // _LINES_OF_ONE))
        wanted = shares(room - _LINES_OF_ONE * told, wanted)
    namespaces, shown_lanes, shown_tiers, engines, events = wanted
    tiers_part: list[RenderableType] = []
    if below:
        tiers_part = [
            Rule("Tiers, the last minute", style="dim"),
            tiers(span, shown_tiers, wide=wide),
        ]
    return Group(
        header(span.now, restarts),
        problems(span.now, told),
        Rule("Pool", style="dim"),
        _pool(span.now, namespaces, wide=wide),
        Rule("Throughput and hits", style="dim"),
        _throughput(history, span, whole=height is None or height > SMALL, wide=wide),
        Rule("Lanes and their jobs", style="dim"),
        lanes_table(span.now["lanes"], shown_lanes, wide=wide),
        _stages(span),
        *tiers_part,
        Rule("Engines", style="dim"),
        _engines(span, engines, wide=wide),
        Rule("Events", style="dim"),
        _events(span.now["events"], events),
    )


def shares(room: int, wanted: Sequence[int]) -> list[int]:
    """Lines for each list, dealt out in turn until all have enough or `room` is used up.

    Every list that has anything gets one line at least.
    """
    given = [min(1, want) for want in wanted]
    while True:
        for index, want in enumerate(wanted):
            if sum(given) >= room or given == list(wanted):
                return given
            if given[index] < want:
                given[index] += 1


def waiting(runtime_dir: Path, problem: str) -> RenderableType:
    """What is shown while no daemon answers."""
    return Group(
        Text(f"Waiting for a daemon in {runtime_dir}.", "bold yellow"), Text(problem, "dim")
    )


def _pool(report: Report, rows: int, *, wide: bool) -> RenderableType:
    total = report["pool"]["cpu_bytes"]
    use = pool_use(report)
    bar_cells = min(BAR_CELLS, LINE_CELLS - 1 - len(use))
    bar, table = Text(), Table.grid(padding=(0, 1))
    for index, namespace in enumerate(report["namespaces"]):
        colour = _COLOURS[index % len(_COLOURS)]
        for state, mark in POOL_STATES:
            cells = round(bar_cells * namespace[f"{state}_bytes"] / total) if total else 0
            # At least one for anything that is there.
            bar.append(mark * (cells or bool(namespace[f"{state}_bytes"])), colour)
        chunks = ", ".join(
            f"{count:,} {state}"
            for state, count in namespace["chunks"].items()
            if count and state in _COUNTED
        )
        nothing = "none ready" if any(namespace["chunks"].values()) else "empty"
        if index < rows:
            table.add_row(
                Text("█", colour),
                name_text(namespace["model"], wide=wide),
                size(namespace["held_bytes"]),
                Text(f"{chunks or nothing}{more_text(report['namespaces'], rows, index)}", "dim"),
            )
    bar.truncate(bar_cells)
    bar.append("·" * (bar_cells - len(bar)), "dim")
    bar.append(f" {use}")
    return Group(bar, table)


def _throughput(history: History, span: Span, *, whole: bool, wide: bool) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for name, counter in (("in", "store_bytes"), ("out", "load_bytes")):
        rates = history.rates("counters", counter)
        now = rate(rates[-1] if rates else None)
        table.add_row(name, now, Text(_spark(rates[-SPARK_CELLS:]), "cyan"))
    hits = [percent(span.share(f"hit_{unit}", f"lookup_{unit}")) for unit in ("tokens", "chunks")]
    text = f"of prompt tokens; {hits[1]} of keys looked up"
    table.add_row("hits", hits[0], Text(text, "dim"))
    if events := kv_events(span.now):
        told = span.rate("counters", "kv_events")
        table.add_row("events", f"{number(told)}/s", Text(events, "dim"))
    if whole and (sizes := _memory_sizes(span.now, wide=wide)):
        table.add_row("memory", *sizes)
    return table


def _memory_sizes(report: Report, *, wide: bool) -> tuple[str, Text] | None:
    """Hits of the busiest model now, and with more memory; None where nothing is known."""
    known = [space for space in report["namespaces"] if space["forecast"]]
    if not known:
        return None
    busiest = max(known, key=lambda space: int(space["forecast"]["requests"]))
    hits = {each["pool"]: each["hit_ratio"] for each in busiest["forecast"]["sizes"]}
    text = f"{percent(hits['+100%'])} at +100 %, at most {percent(hits['unlimited'])}"
    if len(known) > 1:
        text += f" ({name_text(busiest['model'], wide=wide)})"
    return percent(hits["now"]), Text(text, "dim")


def _spark(values: Sequence[float]) -> str:
    top = max(values, default=0.0)
    if not top:
        return _SPARKS[0] * len(values)
    return "".join(_SPARKS[round((len(_SPARKS) - 1) * value / top)] for value in values)


def _stages(span: Span) -> Table:
    table = plain_table("p50 / p99", *STAGES)
    for direction in DIRECTIONS:
        cells = []
        for stage in STAGES:
            histogram = span.histogram("counters", "stages", f"{direction}_{stage}")
            low, high = (latency(histogram.quantile(q)) for q in (0.5, 0.99))
            cells.append(f"{low} / {high}")
        table.add_row(direction, *cells)
    return table


def tiers(span: Span, rows: int | None = None, *, wide: bool = False) -> Table:
    """A line for each tier, or the first `rows` of them, with what it did meanwhile."""
    table = plain_table("tier", "state", "used", "in", "out", "hits", "get p50 / p99")
    for index, part in enumerate(span.parts("tiers")[:rows]):
        tier = part.now
        gets = part.histogram("counters", "get_latency")
        low, high = (latency(gets.quantile(q)) for q in (0.5, 0.99))
        table.add_row(
            name_text(tier["name"], wide=wide),
            tier_state(tier),
            _used(tier),
            *(rate(part.rate("counters", f"{way}_bytes")) for way in ("put", "get")),
            number(part.rise("counters", "gets", "ok")),
            f"{low} / {high}{more_text(span.now['tiers'], rows, index)}",
        )
    return table


def _used(tier: Report) -> str:
    used, total = tier["used_bytes"], tier["total_bytes"]
    return percent(used / total) if total else size(used)


def _engines(span: Span, rows: int, *, wide: bool) -> RenderableType:
    engines = span.now["engines"]
    if not engines:
        return Text("No engine is attached.", "dim")
    table = plain_table("engine", "state", "ranks", "tokens found", "scheduler's pid")
    for index, part in enumerate(span.parts("engines")[:rows]):
        engine = part.now
        pids = [str(one["pid"]) for one in engine["sessions"] if one["kind"] == "scheduler"]
        table.add_row(
            name_text(engine["name"], wide=wide),
            _attachment(engine),
            str(engine["world_size"]),
            found_share(
                part.share("hit_tokens", "lookup_tokens"),
                part.share("hit_chunks", "lookup_chunks"),
            ),
            Text(f"{' '.join(pids) or NOTHING}{more_text(engines, rows, index)}", "dim"),
        )
    return table


def _attachment(engine: Report) -> Text:
    if engine["attached"]:
        return Text("attached", "green")
    missing = engine["missing_ranks"]
    others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return Text(f"waits for rank {missing[0]}{others}" if missing else "no rank yet", "yellow")


def _events(events: Sequence[dict[str, Any]], rows: int) -> RenderableType:
    if not events:
        return Text("None yet.", "dim")
    styles = {"error": "red", "warning": "yellow"}
    lines = []
    for event in sorted(events, key=lambda event: event["number"], reverse=True)[:rows]:
        clock = datetime.fromtimestamp(event["time"]).astimezone().strftime("%H:%M:%S")
        lines.append(
            Text.assemble((clock, "dim"), "  ", (event["text"], styles.get(event["level"], "")))
        )
    return Group(*lines)
