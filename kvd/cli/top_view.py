"""What `kvd top` draws: from reports to renderables, without a terminal."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from kvd.watch import words
from kvd.watch.advice import Problem, problems
from kvd.watch.history import History, Report, Span, merged, quantile

BAR_CELLS = 50
SPARK_CELLS = 48
ENGINES = 12
EVENTS = 8
_SPARKS = "▁▂▃▄▅▆▇█"
_STATES = (("ready", "█"), ("writing", "▓"), ("draining", "▒"))
_COLOURS = ("cyan", "magenta", "blue", "yellow", "green")
_MARKS = {"error": ("✖", "bold red"), "warning": ("▲", "yellow"), "hint": ("●", "blue")}
_STAGES = ("queued", "ordered", "copied", "reported")


def picture(history: History, restarts: int = 0) -> RenderableType:
    """Everything that is known of the daemon, for 80 columns and more.

    Raises:
        IndexError: no report has come yet.
    """
    span = history.span()
    return Group(
        _header(span.now, restarts),
        _advice(problems(span)),
        Rule("Pool", style="dim"),
        _pool(span.now),
        Rule("Throughput and hits", style="dim"),
        _throughput(history, span),
        Rule("Lanes and their jobs", style="dim"),
        _lanes(span.now),
        _stages(span),
        Rule("Engines", style="dim"),
        _engines(span),
        Rule("Events", style="dim"),
        _events(span.now["events"]),
    )


def waiting(runtime_dir: Path, problem: str) -> RenderableType:
    """What is shown while no daemon answers."""
    return Group(
        Text(f"Waiting for a daemon in {runtime_dir}.", "bold yellow"), Text(problem, "dim")
    )


def _header(report: Report, restarts: int) -> Text:
    state, style = ("ready", "bold green") if report["ready"] else ("not ready", "bold red")
    text = Text.assemble(
        (report["version"], "bold"),
        "  ",
        (state, style),
        f"  up {words.duration(report['time'] - report['started'])}  pid {report['pid']}",
        f"  {report['runtime_dir']}",
    )
    if restarts:
        text.append(f"  restarted {words.several(restarts, 'time')}", "yellow")
    return text


def _advice(found: Sequence[Problem]) -> RenderableType:
    if not found:
        return Text("✔ All is well.", "green")
    table = Table.grid(padding=(0, 1))
    for problem in found:
        mark, style = _MARKS[problem.level]
        table.add_row(Text(mark, style), Text(problem.what, style))
        table.add_row("", Text(problem.remedy))
    return table


def _pool(report: Report) -> RenderableType:
    pool = report["pool"]
    total = pool["cpu_bytes"]
    bar, table = Text(), Table.grid(padding=(0, 2))
    for index, namespace in enumerate(report["namespaces"]):
        colour = _COLOURS[index % len(_COLOURS)]
        space = pool["namespaces"].get(namespace["id"], {})
        for state, mark in _STATES:
            bar.append(mark * _cells(space.get(f"{state}_bytes", 0), total), colour)
        chunks = ", ".join(
            f"{count:,} {state}" for state, count in namespace["chunks"].items() if count
        )
        table.add_row(
            Text("█", colour),
            Text(namespace["model"]),
            words.size(space.get("held_bytes")),
            Text(chunks or "empty", "dim"),
        )
    bar.truncate(BAR_CELLS)
    bar.append("·" * (BAR_CELLS - len(bar)), "dim")
    bar.append(f" {words.size(pool.get('free_bytes'))} free of {words.size(total)}")
    return Group(bar, table)


def _cells(nbytes: int, total: int) -> int:
    """At least one for anything that is there."""
    return max(1, round(BAR_CELLS * nbytes / total)) if nbytes and total else 0


def _throughput(history: History, span: Span) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for name, counter in (("in", "store_bytes"), ("out", "load_bytes")):
        rates = history.rates("counters", counter)
        now = words.rate(rates[-1] if rates else None)
        table.add_row(name, now, Text(_spark(rates[-SPARK_CELLS:]), "cyan"))
    hits = [
        words.percent(span.share(f"hit_{unit}", f"lookup_{unit}")) for unit in ("tokens", "chunks")
    ]
    table.add_row("hits", hits[0], Text(f"of tokens; {hits[1]} of chunks", "dim"))
    return table


def _spark(values: Sequence[float]) -> str:
    top = max(values, default=0.0)
    if not top:
        return _SPARKS[0] * len(values)
    return "".join(_SPARKS[round((len(_SPARKS) - 1) * value / top)] for value in values)


def _lanes(report: Report) -> Table:
    table = Table("lane", "state", "heard", "queue", "oldest", "usable", "restarts", box=None)
    for lane in report["lanes"]:
        style = "green" if lane["state"] == "up" else "red"
        heard = lane["seconds_since_heard"]
        table.add_row(
            _short(lane["device"]),
            Text(lane["state"], style),
            words.NOTHING if heard is None else f"{words.latency(heard)} ago",
            words.number(lane["queued_jobs"]),
            words.latency(lane["oldest_job_seconds"]),
            f"{words.size(lane['usable_bytes'])} of {words.size(lane['pool_bytes'])}",
            str(lane["restarts"]),
        )
    return table


def _short(device: str) -> str:
    """A GPU's name has 32 digits of a UUID; eight tell it from others."""
    return device[: len("cuda:") + 8]


def _stages(span: Span) -> Table:
    table = Table("p50 / p99", *_STAGES, box=None)
    lanes = [span.lane(lane["device"]) for lane in span.now["lanes"]]
    for direction in ("store", "load"):
        cells = []
        for stage in _STAGES:
            histogram = merged(lane.histogram("stages", direction, stage) for lane in lanes)
            low, high = (words.latency(quantile(histogram, q)) for q in (0.5, 0.99))
            cells.append(f"{low} / {high}")
        table.add_row(direction, *cells)
    return table


def _engines(span: Span) -> RenderableType:
    engines = span.now["engines"]
    if not engines:
        return Text("No engine is attached.", "dim")
    table = Table("engine", "state", "ranks", "hit tokens", "pids", box=None)
    for engine in engines[:ENGINES]:
        part = span.engine(engine["name"])
        tokens = part.rise("lookups", "tokens")
        hits = part.rise("lookups", "hit_tokens") / tokens if tokens else None
        table.add_row(
            engine["name"],
            _attachment(engine),
            str(engine["world_size"]),
            words.percent(hits),
            Text(" ".join(str(session["pid"]) for session in engine["sessions"]), "dim"),
        )
    if len(engines) > ENGINES:
        table.add_row(f"and {len(engines) - ENGINES} more", "", "", "", "")
    return table


def _attachment(engine: dict[str, Any]) -> Text:
    if engine["attached"]:
        return Text("attached", "green")
    missing = ", ".join(str(rank) for rank in engine["missing_ranks"])
    return Text(f"waits for rank {missing}" if missing else "no rank yet", "yellow")


def _events(events: Sequence[dict[str, Any]]) -> RenderableType:
    if not events:
        return Text("None yet.", "dim")
    styles = {"error": "red", "warning": "yellow"}
    lines = []
    for event in sorted(events, key=lambda event: event["number"], reverse=True)[:EVENTS]:
        clock = datetime.fromtimestamp(event["time"]).astimezone().strftime("%H:%M:%S")
        lines.append(
            Text.assemble((clock, "dim"), "  ", (event["text"], styles.get(event["level"], "")))
        )
    return Group(*lines)
