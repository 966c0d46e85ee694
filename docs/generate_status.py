"""Write docs/status.md from kvd/metrics: every field of the report and its metric.

Run `make docs` after a change there. A test compares the file with what this module would write.
"""

from pathlib import Path

from kvd.metrics.declare import ItemLabels, ReportField
from kvd.metrics.schema import REPORT_FIELDS

PAGE = Path(__file__).with_name("status.md")
INTRODUCTION = """\
# `kvd status --json`: fields and metrics

For scripts and dashboards: every field of the report that `kvd status --json`, `/status` and the
status page show, and the [metric](http.md#metrics) with the same figure. Names and units are
stable; fields may be added.

- Times are seconds, `time` and `started` since 1970; sizes are bytes.
- `[]` stands for each item of a list, `*` for each key of a map.
- A histogram is `{"bounds": […], "counts": […], "sum": …}`: `counts[i]` values lie above the bound
  before and at most at `bounds[i]`, the last count above all bounds.
- `counters` has the sums of `namespaces[].counters`, `engines[].counters` and `lanes[].counters`
  since the daemon's start, those that are gone included. Its metrics are those of namespaces and
  engines, without `namespace_` or `engine_` in their names.

<!-- generated from here by docs/generate_status.py -->

"""
END = "\n<!-- to here -->\n"
SECTIONS = {
    "conditions": "What is wrong",
    "pool": "The pool",
    "namespaces": "Namespaces",
    "engines": "Engines",
    "lanes": "Lanes",
    "tiers": "Tiers",
    "broker": "The broker",
    "events": "Events",
}
HEAD = "| field | meaning | metric |\n|---|---|---|\n"


def tables() -> str:
    """Return every table under its heading; the sums are described in the introduction."""
    sections: dict[str, list[ReportField]] = {}
    for row in REPORT_FIELDS:
        first = row.path[0]
        if first != "counters":
            sections.setdefault(SECTIONS.get(str(first), "The daemon"), []).append(row)
    return "\n".join(
        f"## {title}\n\n{HEAD}{''.join(map(_line, rows))}" for title, rows in sections.items()
    )


def _line(row: ReportField) -> str:
    items = {name for step in row.path if isinstance(step, ItemLabels) for name in step.names}
    fixed = dict(row.declaration.labels)
    labels = [
        f'{name}="{fixed[name]}"' if name in fixed else name
        for name in row.label_names
        if name not in items
    ]
    metric = f"`{row.metric}{{{', '.join(labels)}}}`" if labels else f"`{row.metric}`"
    steps = "".join(f".{step}" if isinstance(step, str) else "[]" for step in row.path)
    name = steps.removeprefix(".") + (".*" if row.declaration.keys else "")
    return f"| `{name}` | {row.declaration.text} | {metric if row.metric else ''} |\n"


def page() -> str:
    """Return the whole page."""
    return INTRODUCTION + tables() + END


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
