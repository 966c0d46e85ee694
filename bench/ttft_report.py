"""Figures and tables of `vllm_ttft.py`, over the starts of each variant."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from first_token import LANE, PROMPT_TOKENS, Measured
from harness import median
from moments import JOB, PASSED, REST, Stages
from rich.console import Console
from rich.table import Table
from variants import KV_BYTES_PER_TOKEN, Variant, Way

Spread = dict[str, float]
WARM_COLUMNS = ("MB", "tokens left", "first token", "to the floor", "full hits", "same answers")
COLD_COLUMNS = {
    "first token": ("first_ms", 0),
    "to the engine without a cache": ("first_ratio", 2),
    "8 tokens": ("answer_ms", 0),
    "the same ratio": ("answer_ratio", 2),
}


class Report:
    """What was measured.

    Args:
        measured: of every variant its starts, in order. The GPU cache's are the floor: what
            another variant took in a start is compared with what it took in the same one.
    """

    def __init__(self, measured: Mapping[Variant, Sequence[Measured]]) -> None:
        self._measured = measured
        (self._floor,) = (runs for variant, runs in measured.items() if variant.way is Way.GPU)

    def figures(self) -> dict[str, Any]:
        """All of it, for the file."""
        measured = self._measured
        return {
            "warm": {
                f"{variant}"
                if len(runs[0].warm) == 1
                else f"{variant}, {found:,} found": self._row(runs, found)
                for variant, runs in measured.items()
                for found in runs[0].warm
            },
            "cold": {str(variant): self._cold(runs) for variant, runs in measured.items()},
            "stages": {
                str(variant): _stages(runs) for variant, runs in measured.items() if variant.stamped
            },
        }

    def show(self, console: Console, machine: str) -> None:
        """Print the tables."""
        figures = self.figures()
        title = f"first token of {PROMPT_TOKENS:,} tokens in ms, median (lowest-highest start)"
        table = _table(f"{title}; {machine}", "KV found in", *WARM_COLUMNS)
        for name, row in figures["warm"].items():
            table.add_row(
                name,
                f"{row['found_bytes'] / 1e6:,.0f}",
                f"{row['tokens_left']}",
                _text(row["warm_ms"], 0),
                _text(row["ratio_to_floor"], 2),
                f"{row['complete']} of {row['asked']}",
                f"{row['same_answers']}",
            )
        console.print(table)
        table = _table("new prompts, ms", "KV kept in", *COLD_COLUMNS)
        for name, row in figures["cold"].items():
            table.add_row(name, *(_text(row[key], digits) for key, digits in COLD_COLUMNS.values()))
        console.print(table)
        columns = figures["stages"]
        table = _table("where the time of warm prompts goes, ms, median of all", "stage", *columns)
        for stage in dict.fromkeys(stage for column in columns.values() for stage in column):
            table.add_row(stage, *(_number(column.get(stage)) for column in columns.values()))
        console.print(table)

    def _row(self, runs: Sequence[Measured], found: int) -> dict[str, Any]:
        pairs = [(run, floor) for run, floor in zip(runs, self._floor, strict=True)]
        answers = [
            (run.answers[key], floor.answers[key])
            for run, floor in pairs
            for key in run.answers
            if key[0] == found
        ]
        return {
            "warm_ms": _spread(1e3 * median(run.warm[found]) for run in runs),
            "ratio_to_floor": _spread(
                median(run.warm[found]) / median(floor.warm[found]) for run, floor in pairs
            ),
            "all_warm_ms": [[1e3 * seconds for seconds in run.warm[found]] for run in runs],
            "complete": sum(len(run.warm[found]) for run in runs),
            "asked": len(answers),
            "same_answers": sum(
                (a.tokens, a.logprobs) == (b.tokens, b.logprobs) for a, b in answers
            ),
            "found_bytes": found * KV_BYTES_PER_TOKEN,
            "tokens_left": PROMPT_TOKENS - found,
        }

    def _cold(self, runs: Sequence[Measured]) -> dict[str, Spread]:
        return {
            "first_ms": _spread(1e3 * median(run.cold) for run in runs),
            "first_ratio": _spread(
                median(run.cold) / median(floor.cold)
                for run, floor in zip(runs, self._floor, strict=True)
            ),
            "answer_ms": _spread(1e3 * median(run.cold_answer) for run in runs),
            "answer_ratio": _spread(
                median(run.cold_answer) / median(floor.cold_answer)
                for run, floor in zip(runs, self._floor, strict=True)
            ),
        }


def _stages(runs: Sequence[Measured]) -> Stages:
    """Medians by stage. The lane's are parts of the job's, and so is the time between the two."""
    stages = [each for run in runs for each in run.stages]
    medians = {name: median(each[name] for each in stages) for name in (*PASSED.values(), REST)}
    if LANE[0] in stages[0]:
        medians |= {f"  {name}": median(each[name] for each in stages) for name in LANE}
        medians["  message to the lane and back, next look"] = median(
            each[JOB] - sum(each[name] for name in LANE) for each in stages
        )
    medians["looks of the worker at the job"] = median(polls for run in runs for polls in run.polls)
    return medians


def _spread(values: Iterable[float]) -> Spread:
    listed = list(values)
    return {"median": median(listed), "lowest": min(listed), "highest": max(listed)}


def _text(spread: Spread, digits: int) -> str:
    low, high = spread["lowest"], spread["highest"]
    return f"{spread['median']:,.{digits}f} ({low:,.{digits}f}-{high:,.{digits}f})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    return table
