"""The command line of runs that take as long, or go on as often, as they are told."""

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Callable

Report = dict[str, object]


def command_line(summary: str, usual: float) -> argparse.ArgumentParser:
    """A parser of how long or how often, and of a seed, which is drawn where none is given."""
    parser = argparse.ArgumentParser(description=summary.partition("\n")[0])
    parser.add_argument("amount", type=type(usual), nargs="?", default=usual)
    drawn = random.SystemRandom().randrange(2**31)
    parser.add_argument("seed", type=int, nargs="?", default=drawn)
    return parser


def main(chosen: argparse.Namespace, run: Callable[[], Report]) -> int:
    """Run; print what was chosen first and the report last, as JSON; 1 if it has violations."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends what it started
    print(json.dumps(vars(chosen), default=str), flush=True)
    began = time.monotonic()
    report = run()
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({"seconds": seconds, "seed": chosen.seed} | report))
    return 1 if report["violations"] else 0
