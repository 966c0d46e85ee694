"""What runs one part of a benchmark in a process of its own; see gpu_parts.py."""

import argparse
import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Measure = Callable[[str, argparse.Namespace], dict[str, Any]]


class Skipped(Exception):
    """The part cannot be measured on this machine; the text says why."""


def answer(measure: Measure) -> int:
    """Write the figures of the part that the command line names, or why there are none.

    Returns:
        The exit status: 1 where there are no figures.
    """
    options = _options()
    found: dict[str, Any]
    try:
        found = measure(options.part, options)
    except Skipped as skipped:
        found = {"skipped": str(skipped)}
    except Exception as error:  # noqa: BLE001  # the other parts go on
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    options.part_out.write_text(json.dumps(found), encoding="utf-8")
    return int("error" in found)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", required=True)
    parser.add_argument("--part-out", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True, help="for the daemons' lines")
    parser.add_argument("--mib", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--without", action="append", default=[], help="a way of the driver")
    return parser.parse_args()
