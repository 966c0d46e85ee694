"""Write the table of docs/layouts.md from docs/models.json: a block of each model in memory.

Run `make docs` after a change there. A test compares the file with what this module would write.
"""

import json
from pathlib import Path
from typing import Any

from kvd.plan.figures import SMALL_BYTES, Plan, PlanInputs, describe, make_plan
from kvd.plan.model import read_model
from kvd_proto.text import format_size

PAGE = Path(__file__).with_name("layouts.md")
MODELS = Path(__file__).with_name("models.json")
BEGIN = "<!-- generated from here by docs/generate_models.py -->\n"
END = "<!-- to here -->\n"
HEAD = (
    "| model | TP | tokens a block | bytes a token, all ranks | page |"
    " fragments of a block, `LBHNC` | `BLHNC` |\n|---|--:|--:|--:|--:|--:|--:|\n"
)


def table() -> str:
    """Return a line for each model and tensor-parallel size, and where the values come from."""
    models = json.loads(MODELS.read_text(encoding="utf-8"))
    lines = [_line(model, ranks) for model in models for ranks in model["tensor_parallel"]]
    sources: dict[str, list[str]] = {}
    for model in models:
        sources.setdefault(model["source"], []).append(model["name"])
    told = "; ".join(f"{', '.join(names)}: {source}" for source, names in sources.items())
    return f"{HEAD}{''.join(lines)}\nValues of the models' configurations from {told}.\n"


def planned(model: dict[str, Any], ranks: int) -> Plan:
    """Return the plan of a model of docs/models.json; the pool's size does not count."""
    inputs = PlanInputs(
        tensor_parallel=ranks,
        block_size=model["block_size"],
        dtype="auto",
        cpu_bytes=2**40,
        blocks_per_chunk=1,
    )
    return make_plan(read_model(model["config"]), inputs)


def _line(model: dict[str, Any], ranks: int) -> str:
    plan = planned(model, ranks)
    cells = (
        model["name"],
        str(ranks),
        str(plan.block_size),
        f"{plan.bytes_per_token:,}",
        format_size(plan.groups[0].page_bytes),
        _fragments(plan, "LBHNC"),
        _fragments(plan, "BLHNC"),
    )
    return f"| {' | '.join(cells)} |\n"


def _fragments(plan: Plan, layout: str) -> str:
    """Return how many of which size; in bold where they are small."""
    found = [group.fragments[layout] for group in plan.groups]
    shown = " of ".join(describe(found))
    return f"**{shown}**" if any(item.nbytes < SMALL_BYTES for item in found) else shown


def page(old: str) -> str:
    """Return the page with its table renewed."""
    head, _, rest = old.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
