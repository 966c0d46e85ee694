"""What `kvd top` draws: from reports to renderables, without a terminal."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from kvd.metrics.counts import DIRECTIONS, STAGES
from kvd.metrics.reading import (
    NOTHING,
    History,
    Report,
    Span,
    duration,
    latency,
    number,
    percent,
    rate,
    several,
    shorten,
    size,
)

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
_STATES = (("ready", "█"), ("writing", "▓"), ("draining", "▒"))
_COLOURS = ("cyan", "magenta", "blue", "yellow", "green")
_MARKS = {"error": ("✖", "bold red"), "warning": ("▲", "yellow"), "hint": ("●", "blue")}


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
        lanes(span.now["lanes"], shown_lanes, wide=wide),
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


def header(report: Report, restarts: int = 0) -> Text:
    """Which daemon it is, and whether it is ready."""
    state, style = ("ready", "bold green") if report["ready"] else ("not ready", "bold red")
    text = Text.assemble(
        (report["version"], "bold"),
        "  ",
        (state, style),
        f"  up {duration(report['time'] - report['started'])}  pid {report['pid']}",
        f"  {report['host']}:{report['runtime_dir']}",
    )
    if restarts:
        text.append(f"  restarted {several(restarts, 'time')}", "yellow")
    return text


def problems(report: Report, told: int | None = None) -> RenderableType:
    """What is wrong, with remedies; no more than `told` of them, and how many more there are."""
    found = report["conditions"]
    if not found:
        if not any(engine["attached"] for engine in report["engines"]):
            return Text("● Nothing is wrong, but no engine is attached.", "blue")
        return Text("✔ All is well.", "green")
    table = Table.grid(padding=(0, 1))
    for condition in found[:told]:
        mark, style = _MARKS[condition["level"]]
        table.add_row(Text(mark, style), Text(condition["text"], style))
        table.add_row("", Text(condition["remedy"]))
    if told is not None and told < len(found):
        table.add_row("", Text(f"and {len(found) - told} more: kvd top --once shows all", "dim"))
    return table


def pool_use(report: Report) -> str:
    """`40 GiB ready, 24 GiB free of 64 GiB`.

    Free is what no chunk takes, also where a namespace holds it.
    """
    total = report["pool"]["cpu_bytes"]
    if not total:
        return "sized when the first engine comes"
    taken = {
        state: sum(namespace[f"{state}_bytes"] for namespace in report["namespaces"])
        for state, _ in _STATES
    }
    free = total - sum(taken.values())
    return f"{size(taken['ready'])} ready, {size(free)} free of {size(total)}"


def _pool(report: Report, rows: int, *, wide: bool) -> RenderableType:
    total = report["pool"]["cpu_bytes"]
    use = pool_use(report)
    bar_cells = min(BAR_CELLS, LINE_CELLS - 1 - len(use))
    bar, table = Text(), Table.grid(padding=(0, 1))
    for index, namespace in enumerate(report["namespaces"]):
        colour = _COLOURS[index % len(_COLOURS)]
        for state, mark in _STATES:
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
                _name(namespace["model"], wide=wide),
                size(namespace["held_bytes"]),
                Text(f"{chunks or nothing}{_more(report['namespaces'], rows, index)}", "dim"),
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
        text += f" ({_name(busiest['model'], wide=wide)})"
    return percent(hits["now"]), Text(text, "dim")


def kv_events(report: Report) -> str:
    """How late KV events were in the last minute, and who was overrun; empty where none are."""
    counters = report["counters"]
    if not counters["kv_events"]:
        return ""
    lags = [engine["published"]["lag_max_seconds"] for engine in report["engines"]]
    late = max(lags, default=0.0)
    snapshots, overruns = counters["kv_event_snapshots"], counters["kv_event_overruns"]
    return (
        f"{latency(late)} late at most; {several(snapshots, 'snapshot')},"
        f" {several(overruns, 'overrun')}"
    )


def _spark(values: Sequence[float]) -> str:
    top = max(values, default=0.0)
    if not top:
        return _SPARKS[0] * len(values)
    return "".join(_SPARKS[round((len(_SPARKS) - 1) * value / top)] for value in values)


def lanes(found: Sequence[Report], rows: int | None = None, *, wide: bool = False) -> Table:
    """A line for each lane, or the first `rows` of them."""
    table = _table("lane", "state", "queue", "oldest", "usable", "restarts")
    for index, lane in enumerate(found[:rows]):
        style = {"up": "green", "ending": "yellow"}.get(lane["state"], "red")
        table.add_row(
            device_name(lane["device"], wide=wide),
            Text(lane["state"], style),
            number(lane["queued_jobs"]),
            latency(lane["oldest_job_seconds"]),
            f"{size(lane['usable_bytes'])} of {size(lane['pool_bytes'])}",
            f"{lane['counters']['restarts']}{_more(found, rows, index)}",
        )
    return table


def _table(*columns: str) -> Table:
    """One without lines, in which no figure is cut or split."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _more(items: Sequence[Any], rows: int | None, index: int) -> str:
    """What the last of `rows` lines says of the items that are not shown."""
    if rows is None:
        return ""
    left = len(items) - rows
    return f" and {left} more" if left > 0 and index == rows - 1 else ""


def _name(name: str, *, wide: bool) -> Text:
    """A name in a column of its own, which must leave room for the figures beside it."""
    return Text(name if wide else shorten(name))


def device_name(device: str, *, wide: bool) -> str:
    """A GPU's name has 32 digits of a UUID; eight tell it from others."""
    return device if wide else device[: len("cuda:") + 8]


def _stages(span: Span) -> Table:
    table = _table("p50 / p99", *STAGES)
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
    table = _table("tier", "state", "used", "in", "out", "hits", "get p50 / p99")
    for index, part in enumerate(span.parts("tiers")[:rows]):
        tier = part.now
        gets = part.histogram("counters", "get_latency")
        low, high = (latency(gets.quantile(q)) for q in (0.5, 0.99))
        table.add_row(
            _name(tier["name"], wide=wide),
            tier_state(tier),
            _used(tier),
            *(rate(part.rate("counters", f"{way}_bytes")) for way in ("put", "get")),
            number(part.rise("counters", "gets", "ok")),
            f"{low} / {high}{_more(span.now['tiers'], rows, index)}",
        )
    return table


def _used(tier: Report) -> str:
    used, total = tier["used_bytes"], tier["total_bytes"]
    return percent(used / total) if total else size(used)


def tier_state(tier: Report) -> Text:
    """The state of its process, breaker or room, and for how long it has been up or away."""
    time = duration(tier["state_seconds"], units=1)
    if tier["state"] != "up":
        return Text(f"{tier['state']} {time}", "red" if tier["state"] == "down" else "yellow")
    if tier["breaker"] != "closed":
        word = "set aside" if tier["breaker"] == "open" else "probing"
        return Text(f"{word} {time}", "red")
    return Text("full", "yellow") if tier["full"] else Text(f"up {time}", "green")


def _engines(span: Span, rows: int, *, wide: bool) -> RenderableType:
    engines = span.now["engines"]
    if not engines:
        return Text("No engine is attached.", "dim")
    table = _table("engine", "state", "ranks", "tokens found", "scheduler's pid")
    for index, part in enumerate(span.parts("engines")[:rows]):
        engine = part.now
        pids = [str(one["pid"]) for one in engine["sessions"] if one["kind"] == "scheduler"]
        table.add_row(
            _name(engine["name"], wide=wide),
            _attachment(engine),
            str(engine["world_size"]),
            found_share(
                part.share("hit_tokens", "lookup_tokens"),
                part.share("hit_chunks", "lookup_chunks"),
            ),
            Text(f"{' '.join(pids) or NOTHING}{_more(engines, rows, index)}", "dim"),
        )
    return table


def found_share(tokens: float | None, keys: float | None) -> str:
    """The share of prompt tokens; of keys looked up, and named so, where none are counted."""
    if tokens is None and keys is not None:
        return f"{percent(keys)} of keys"
    return percent(tokens)


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
