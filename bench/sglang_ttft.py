"""Measures a real SGLang engine on CPU: time to first token of prompts that come back.

By where their KV is: nowhere (computed), in the host memory of SGLang's own HiCache, in kvd, in
kvd and loaded layer by layer, and in the engine's device memory, which is the floor. Every way has
an engine of its own, one is alive at a time, and all are started round by round, in reversed order
every second time. An engine's device memory holds two prompts: each is asked when others have
pushed it out, and at once again for the floor, for one start of an engine may compute faster than
the next; without a cache it is computed first. HiCache leaves 10 GiB of the machine's memory
alone, so that 14 GiB have to be free. Prints tables, writes bench/out/sglang_ttft.json. Runs with
the Python of an environment with SGLang, and wants a machine at rest:
`.venv-sglang/bin/python bench/sglang_ttft.py`.
"""

import argparse
import json
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from harness import median
from needs import check_needs, missing_engine
from rich.console import Console
from rich.table import Table
from sglang_engines import (
    TOKEN_BYTES,
    Asking,
    Setup,
    Way,
    as_text,
    findable,
    in_turn,
    make_tokens,
    spread,
    write_bench_model,
)
from vllm_ttft import terminate

from kvd_tools.sglang_engine import SglangServer

OUT = Path(__file__).parent / "out"
PROMPT_TOKENS = 1900
FOUND = findable(PROMPT_TOKENS)
DEVICE_TOKENS = 4096  # two prompts with their answers
PROMPTS, TIMES = 3, 2  # of a start, and how often each comes back
ROUNDS, QUICK_ROUNDS = 2, 1
CACHE_BYTES = 2 * 10**9  # 1.7 times what all prompts of a start need
COMPUTED, DEVICE = "computed", "device"


@dataclass(slots=True)
class Start:
    """One start of one way; seconds to the first token.

    new: of prompts that were never asked before.
    back: of prompts that came back when others had pushed them out.
    device: of the same, asked at once again.
    elsewhere: prompts that were found, or not found, against what is expected; left out.
    answers: tokens, by the prompt's number.
    others: how busy the CPUs were when nothing was asked, percent.
    """

    new: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)
    elsewhere: int = 0
    answers: dict[int, list[list[int]]] = field(default_factory=dict)
    others: list[float] = field(default_factory=list)

    def take(self, way: Way, engine: SglangServer) -> None:
        """Ask all prompts, and all of them again."""
        asking = Asking(engine, self.others)
        untimed, *prompts = (make_tokens(PROMPT_TOKENS, number) for number in range(PROMPTS + 1))
        for _ in range(2):  # the engine's first steps
            asking.ask(untimed)
        for number, prompt in enumerate(prompts):
            self._ask(asking, number, prompt, 0, self.new)
        for _ in range(TIMES):
            for number, prompt in enumerate(prompts):
                found = 0 if way is Way.NOTHING else FOUND
                self._ask(asking, number, prompt, found, self.back)
                self._ask(asking, number, prompt, FOUND, self.device)

    def _ask(
        self, asking: Asking, number: int, prompt: list[int], found: int, seconds: list[float]
    ) -> None:
        answer = asking.ask(prompt)
        self.answers.setdefault(number, []).append(answer.tokens)
        if answer.cached_tokens == found:
            seconds.append(answer.first_token_seconds)
        else:
            self.elsewhere += 1


def main() -> None:
    """Start and ask every way in turn."""
    signal.signal(signal.SIGTERM, terminate)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one start of each")
    rounds = QUICK_ROUNDS if parser.parse_args().quick else ROUNDS
    check_needs(missing_engine("sglang"))
    starts: dict[Way, list[Start]] = {way: [] for way in Way}
    console = Console(width=140)
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder,
        console.status("starting") as status,
    ):
        place = Path(folder)
        setup = Setup(
            model=write_bench_model(place),
            device_tokens=DEVICE_TOKENS,
            cache_bytes=CACHE_BYTES,
            threads=len(os.sched_getaffinity(0)),
            chunked_prefill=FOUND,  # what is computed behind it is a step of its own, also when new
        )
        for number in range(rounds):
            for way in in_turn(number, list(Way)):
                status.update(f"round {number + 1} of {rounds}: {way}")
                with setup.started(way, place / f"{number}-{way}") as engine:
                    starts[way].append(Start())
                    starts[way][-1].take(way, engine)
    report(console, starts, OUT / "sglang_ttft.json")


def report(console: Console, starts: Mapping[Way, Sequence[Start]], out: Path) -> None:
    """Print the tables, write the file."""
    plain = starts[Way.NOTHING]
    rows = {
        COMPUTED if way is Way.NOTHING else str(way): _row(
            [s.back for s in several], several, plain
        )
        for way, several in starts.items()
    }
    rows[DEVICE] = _row([start.device for start in plain], plain, plain)
    every = [start for several in starts.values() for start in several]
    machine = (
        f"{os.cpu_count()} CPUs, {np.mean([share for s in every for share in s.others]):.0f}% taken"
        f" by others, SGLang {version('sglang')}, {len(plain)} starts of each, prompts of"
        f" {PROMPT_TOKENS:,} tokens, {FOUND:,} found ({FOUND * TOKEN_BYTES / 1e6:.0f} MB)"
    )
    columns = ("prompts", "first token, ms", "to computed", "to device", "over device, ms")
    table = _table(f"median (lowest..highest); {machine}", "KV found in", *columns)
    for where, row in rows.items():
        spreads = [(row["first_ms"], 0), (row["to_computed"], 3), (row["to_device"], 3)]
        spreads.append((row["over_device_ms"], 0))
        table.add_row(where, str(row["prompts"]), *(as_text(*each) for each in spreads))
    console.print(table)
    engines = {
        str(way): {
            "new_ms": spread([1e3 * seconds for s in several for seconds in s.new]),
            "device_ms": spread([1e3 * seconds for s in several for seconds in s.device]),
        }
        for way, several in starts.items()
    }
    table = _table("each engine", "behind it", "new prompts, ms", "device, ms")
    for name, figures in engines.items():
        table.add_row(name, *(as_text(each, 0) for each in figures.values()))
    console.print(table)
    answers = [
        (a, plain[0].answers[n][0]) for s in every for n, all_ in s.answers.items() for a in all_
    ]
    counts = {
        "answers": len(answers),
        "same_answers": sum(one == other for one, other in answers),
        "elsewhere": sum(start.elsewhere for start in every),
    }
    console.print(
        f"{counts['same_answers']} of {counts['answers']} answers have the tokens of the first;"
        f" {counts['elsewhere']} prompts were not where they were expected, and are left out"
    )
    out.parent.mkdir(exist_ok=True)
    text = json.dumps({"machine": machine, "rows": rows, "engines": engines, **counts}, indent=2)
    out.write_text(text + "\n")
    console.print(f"written to {out}")


def _row(
    asked: Sequence[Sequence[float]], starts: Sequence[Start], plain: Sequence[Start]
) -> dict[str, Any]:
    """Figures of one row; ratios and differences are those of medians of a round.

    Args:
        asked: seconds, by round.
        starts: of the same engines, in which the floor was measured.
        plain: of the engines that computed.
    """
    medians = [1e3 * median(seconds) for seconds in asked]
    computed = [1e3 * median(start.back) for start in plain]
    device = [1e3 * median(start.device) for start in starts]
    return {
        "prompts": sum(map(len, asked)),
        "first_ms": spread([1e3 * each for seconds in asked for each in seconds]),
        "to_computed": spread([a / b for a, b in zip(medians, computed, strict=True)]),
        "to_device": spread([a / b for a, b in zip(medians, device, strict=True)]),
        "over_device_ms": spread([a - b for a, b in zip(medians, device, strict=True)]),
        "all_ms": [[1e3 * each for each in seconds] for seconds in asked],
    }


def _table(title: str, *columns: str) -> Table:
    table = Table(*columns, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


if __name__ == "__main__":
    main()
