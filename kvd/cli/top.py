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
    Name,
    header,
    hit_share_text,
    kv_event_text,
    lanes_table,
    more_text,
    plain_table,
    pool_use_text,
    problems,
    tier_state,
)
from kvd.errors import NotRunning, SocketAccessDenied
from kvd.metrics.counts import DIRECTIONS, STAGES
from kvd.metrics.reading import (
    NOTHING,
    History,
    Report,
    Span,
    latency,
    number,
    percent,
    rate,
    shorten,
    size,
)
from kvd.wire.tool import ToolConnection

_ANSWER_SECONDS = 2.0
_FILE_COLUMNS = 240
LINE_CELLS = 80
BAR_CELLS = 50
SPARK_CELLS = 48
MAX_ENGINES = 12
MAX_EVENTS = 8
SMALL_SCREEN_LINES = 24  # on smaller screens the forecast is omitted
_FIXED_LINES = 18  # header, verdict, five rules, bar, throughput, heads of tables, stages
_LINES_OF_TIERS = 2  # rule, head of the table
_LINES_PER_PROBLEM = 4  # a problem and its remedy
_COUNTED_STATES = {"ready", "pinned"}  # of a namespace's chunks; the bar shows the others
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


def _add_report(history: History, runtime_dir: Path) -> bool:
    """Add a report to the history; return whether the daemon was restarted since the last."""
    with ToolConnection(runtime_dir, _ANSWER_SECONDS) as daemon:
        return history.add(daemon.status())


def _once(runtime_dir: Path, interval: float, *, wide: bool) -> None:

    history = History()
    _add_report(history, runtime_dir)
    time.sleep(interval)
    _add_report(history, runtime_dir)
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
                restarts += _add_report(history, runtime_dir)
                view = picture(history, restarts, live.console.height, wide=wide)
            except SocketAccessDenied:  # waiting does not help
                raise
            except NotRunning as error:
                view = waiting(runtime_dir, str(error))
            live.update(view, refresh=True)
            if next_key(interval) == "q":
                return


@contextlib.contextmanager
def _keys(source: TextIO) -> Iterator[Callable[[float], str]]:
    """Yield a function that waits for a key press and returns the key, without Return.

    It returns an empty text after the given seconds; without a terminal it only waits.
    """
    terminal = source.isatty()

    def next_key(seconds: float) -> str:
        ready, _, _ = select.select([source] if terminal else [], [], [], seconds)
        return os.read(source.fileno(), 1).decode("latin-1").lower() if ready else ""

    attributes = termios.tcgetattr(source) if terminal else None
    try:
        if terminal:
            tty.setcbreak(source)
        yield next_key
    finally:
        if attributes is not None:
            with contextlib.suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(source, termios.TCSADRAIN, attributes)


def picture(
    history: History, restarts: int = 0, height: int | None = None, *, wide: bool = False
) -> RenderableType:
    """Return the whole view, for 80 or more columns.

    Args:
        history: at least one report.
        restarts: of the daemon, so far.
        height: lines of the screen. Lists are shortened, with a note, so that every section fits.
            None: lists have their maximal length.
        wide: do not shorten names.

    Raises:
        IndexError: the history is empty.
    """
    span = history.span()
    conditions = span.now["conditions"]
    tier_reports = span.now["tiers"]
    lists = [span.now["namespaces"], span.now["lanes"], tier_reports]
    bounded_lists = [(span.now["engines"], MAX_ENGINES), (span.now["events"], MAX_EVENTS)]
    num_lines = [*map(len, lists), *(min(len(items), limit) for items, limit in bounded_lists)]
    num_problems = len(conditions)
    if height is not None:
        free_lines = height - _FIXED_LINES - (_LINES_OF_TIERS if tier_reports else 0)
        num_problems = min(
            num_problems, max(1, (free_lines - sum(map(bool, num_lines))) // _LINES_PER_PROBLEM)
        )
        num_lines = share_lines(free_lines - _LINES_PER_PROBLEM * num_problems, num_lines)
    namespaces, shown_lanes, shown_tiers, engines, events = num_lines
    tiers_part: list[RenderableType] = []
    if tier_reports:
        tiers_part = [
            Rule("Tiers, the last minute", style="dim"),
            tiers(span, shown_tiers, wide=wide),
        ]
    return Group(
        header(span.now, restarts),
        problems(span.now, num_problems),
        Rule("Pool", style="dim"),
        _pool(span.now, namespaces, wide=wide),
        Rule("Throughput and hits", style="dim"),
        _throughput(
            history, span, with_memory=height is None or height > SMALL_SCREEN_LINES, wide=wide
        ),
        Rule("Lanes and their jobs", style="dim"),
        lanes_table(span.now["lanes"], shown_lanes, wide=wide),
        _stages(span),
        *tiers_part,
        Rule("Engines", style="dim"),
        _engines(span, engines, wide=wide),
        Rule("Events", style="dim"),
        _events(span.now["events"], events),
    )


def share_lines(num_lines: int, lengths: Sequence[int]) -> list[int]:
    """Distribute `num_lines` lines in turn to lists of these lengths.

    Every list that is not empty gets at least one line.
    """
    shares = [min(1, length) for length in lengths]
    while True:
        for index, length in enumerate(lengths):
            if sum(shares) >= num_lines or shares == list(lengths):
                return shares
            if shares[index] < length:
                shares[index] += 1


def waiting(runtime_dir: Path, problem: str) -> RenderableType:
    """Return the view while no daemon answers."""
    return Group(
        Text(f"Waiting for a daemon in {runtime_dir}.", "bold yellow"), Text(problem, "dim")
    )


def _pool(report: Report, rows: int, *, wide: bool) -> RenderableType:
    total = report["pool"]["cpu_bytes"]
    use_text = pool_use_text(report)
    bar_cells = min(BAR_CELLS, LINE_CELLS - 1 - len(use_text))
    bar, table = Text(), Table.grid(padding=(0, 1))
    for is_name in (False, True, False, False):
        table.add_column(no_wrap=not is_name)
    for index, namespace in enumerate(report["namespaces"]):
        colour = _COLOURS[index % len(_COLOURS)]
        for state, mark in POOL_STATES:
            cells = round(bar_cells * namespace[f"{state}_bytes"] / total) if total else 0
            # At least one cell for a state with bytes.
            bar.append(mark * (cells or bool(namespace[f"{state}_bytes"])), colour)
        chunks = ", ".join(
            f"{count:,} {state}"
            for state, count in namespace["chunks"].items()
            if count and state in _COUNTED_STATES
        )
        no_chunks = "none ready" if any(namespace["chunks"].values()) else "empty"
        chunk_text = f"{chunks or no_chunks}{more_text(report['namespaces'], rows, index)}"
        if index < rows:
            table.add_row(
                Text("█", colour),
                Name(namespace["model"], wide=wide),
                size(namespace["held_bytes"]),
                Text(chunk_text, "dim"),
            )
    bar.truncate(bar_cells)
    bar.append("·" * (bar_cells - len(bar)), "dim")
    bar.append(f" {use_text}")
    return Group(bar, table)


def _throughput(history: History, span: Span, *, with_memory: bool, wide: bool) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for name, counter in (("in", "store_bytes"), ("out", "load_bytes")):
        rates = history.rates("counters", counter)
        latest = rate(rates[-1] if rates else None)
        table.add_row(name, latest, Text(_spark(rates[-SPARK_CELLS:]), "cyan"))
    hits = [percent(span.share(f"hit_{unit}", f"lookup_{unit}")) for unit in ("tokens", "chunks")]
    text = f"of prompt tokens; {hits[1]} of keys looked up"
    table.add_row("hits", hits[0], Text(text, "dim"))
    if events := kv_event_text(span.now):
        event_rate = span.rate("counters", "kv_events")
        table.add_row("events", f"{number(event_rate)}/s", Text(events, "dim"))
    if with_memory and (sizes := _memory_sizes(span.now, wide=wide)):
        table.add_row("memory", *sizes)
    return table


def _memory_sizes(report: Report, *, wide: bool) -> tuple[str, Text] | None:
    """Return the busiest model's hits now and with more memory; None without a forecast."""
    forecasts = [namespace for namespace in report["namespaces"] if namespace["forecast"]]
    if not forecasts:
        return None
    busiest = max(forecasts, key=lambda namespace: int(namespace["forecast"]["requests"]))
    hits = {forecast["pool"]: forecast["hit_ratio"] for forecast in busiest["forecast"]["sizes"]}
    text = f"{percent(hits['+100%'])} at +100 %, at most {percent(hits['unlimited'])}"
    if len(forecasts) > 1:
        name = busiest["model"] if wide else shorten(busiest["model"])
        text += f" ({name})"
    return percent(hits["now"]), Text(text, "dim")


def _spark(values: Sequence[float]) -> str:
    peak = max(values, default=0.0)
    if not peak:
        return _SPARKS[0] * len(values)
    return "".join(_SPARKS[round((len(_SPARKS) - 1) * value / peak)] for value in values)


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
    """Return a table of the tiers, or the first `rows`, with their work in the span."""
    table = plain_table("tier", "state", "used", "in", "out", "hits", "get p50 / p99")
    for index, tier_span in enumerate(span.parts("tiers")[:rows]):
        tier = tier_span.now
        gets = tier_span.histogram("counters", "get_latency")
        low, high = (latency(gets.quantile(q)) for q in (0.5, 0.99))
        table.add_row(
            Name(tier["name"], wide=wide),
            tier_state(tier),
            _used(tier),
            *(rate(tier_span.rate("counters", f"{way}_bytes")) for way in ("put", "get")),
            number(tier_span.rise("counters", "gets", "ok")),
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
        pids = [
            str(session["pid"]) for session in engine["sessions"] if session["kind"] == "scheduler"
        ]
        table.add_row(
            Name(engine["name"], wide=wide),
            _attachment(engine),
            str(engine["world_size"]),
            hit_share_text(
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
    suffix = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return Text(f"waits for rank {missing[0]}{suffix}" if missing else "no rank yet", "yellow")


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
