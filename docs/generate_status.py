"""Write the tables of docs/status.md from kvd/metrics: every field of the report and its metric.

Run `make docs` after a change there. A test compares the file with what this module would write.
"""

from pathlib import Path

from kvd.metrics.declare import ItemLabels, ReportField
from kvd.metrics.schema import REPORT_FIELDS

PAGE = Path(__file__).with_name("status.md")
BEGIN = "<!-- generated from here by docs/generate_status.py -->\n"
END = "<!-- to here -->\n"
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
    """Return every table under its heading; sums are told in words."""
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


def page(old: str) -> str:
    """Return the page with its tables renewed."""
    head, _, rest = old.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{tables()}\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
