"""A pytest plugin: which statements each test runs, in its process and in those that it starts.

Writes `NAME.jsonl` into the folder KVD_MUTANTS_FOLDER, a line a test: ID, seconds, outcome,
whether it is a property, and the numbers of the statements that ran. What a module's fixture runs
counts for the first test that uses the fixture.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_FOLDER = Path(os.environ["KVD_MUTANTS_FOLDER"])
_failed: list[str] = []
_NAME = os.environ.get("PYTEST_XDIST_WORKER", "all")
_SEEN = _FOLDER / f"{_NAME}.seen"
_RESULTS = _FOLDER / f"{_NAME}.jsonl"
os.environ["KVD_MUTANTS_SEEN"] = str(_SEEN)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Zero the bytes before a test, and write what it ran."""
    _failed.clear()
    with _SEEN.open("r+b") as seen:
        seen.write(bytes(_SEEN.stat().st_size))
    start = time.monotonic()
    result = yield
    seconds = time.monotonic() - start
    ran = [number for number, byte in enumerate(_SEEN.read_bytes()) if byte]
    line = {"test": item.nodeid, "seconds": round(seconds, 3), "failed": bool(_failed)}
    line |= {"is_property": bool(item.get_closest_marker("hypothesis")), "ran": ran}
    with _RESULTS.open("a") as file:
        file.write(json.dumps(line) + "\n")
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a failure of the test that runs."""
    if report.failed:
        _failed.append(report.nodeid)
