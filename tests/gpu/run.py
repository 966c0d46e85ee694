"""`make gpu`: the tests that need a GPU, then the benchmark, in under 8 minutes.

It needs what environment.py says. The figures are in bench/out/gpu.json, the logs of the
benchmark's parts in bench/out/gpu, those of the tests in bench/out/gpu-tests. What matters of the
logs is printed, the last lines being a summary.
"""

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

if __name__ == "__main__":  # else the caller has found it already
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.environment import ROOT, Refused, check, environment, mib_that_fit

TESTS = (
    *("-m", "pytest", "-v", "-c", "tests/gpu/pytest.ini", "--rootdir", "tests/gpu"),
    *("--confcutdir", "tests/gpu", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu"),
)
OUT = ROOT / "bench" / "out"
SECONDS = 470.0
SHARE_OF_TESTS = 0.45
LAST_WORDS_SECONDS = 10.0
REASON_LETTERS = 300
SHOWN_LINES, SHOWN_LETTERS = 25, 2500
_OUTCOME = re.compile(r"^\S*::(\S+)(?: (PASSED|FAILED|ERROR|SKIPPED)\b.*)?", re.MULTILINE)


def main() -> int:
    """Run all; the exit status, 2 where it refuses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=2048, help="the benchmark moves at a time")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for figures and logs")
    options, others = parser.parse_known_args()
    try:
        check()
        mib = mib_that_fit(options.mib)
        if mib < options.mib:
            print(
                f"/dev/shm is small: {mib} MiB are moved at a time rather than {options.mib};"
                " to change that: mount -o remount,size=24g /dev/shm",
                flush=True,
            )
        with tempfile.TemporaryDirectory(prefix="kvd-gpu-") as folder:
            Path(folder).chmod(0o755)  # engines of other users import from it, too
            variables = environment(Path(folder))
            how = ["--mib", f"{mib}", *others]
            return _tests_and_benchmark(how, variables, options.out.resolve())
    except Refused as refusal:
        print(f"make gpu: {refusal}", file=sys.stderr)
        return 2


def _tests_and_benchmark(how: Sequence[str], variables: Mapping[str, str], out: Path) -> int:
    end = time.monotonic() + SECONDS
    logs = out / "gpu-tests"
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    log = logs / "tests.log"
    ours = {**variables, "GPU_TESTS_LOG": str(logs / "daemons.log")}
    print("the tests", flush=True)
    half = time.monotonic() + SHARE_OF_TESTS * SECONDS
    with log.open("wb") as sink:
        tested = _run("the tests", [sys.executable, *TESTS], ours, half, sink.fileno())
    log_text = log.read_text(encoding="utf-8", errors="replace")
    if tested:
        print(extract(log_text), flush=True)
    left = end - time.monotonic() - LAST_WORDS_SECONDS
    bench = [sys.executable, "bench/gpu.py", "--out", str(out / "gpu.json")]
    measured = _run("the benchmark", [*bench, "--seconds", f"{left:.0f}", *how], variables, end)
    for line in tests_summary(log_text):
        print(line)
    print(f"tests: exit status {tested}, lines in {log} and {logs / 'daemons.log'}")
    return measured or tested


def tests_summary(log_text: str) -> list[str]:
    """How many tests passed, and the names of the others, of what `pytest -v` has said.

    A test without an outcome was running when pytest was ended.
    """
    outcomes: dict[str, str] = {}
    for name, outcome in _OUTCOME.findall(log_text):
        outcomes[name] = outcome or outcomes.get(name) or "NOT ENDED"
    passed = [name for name, outcome in outcomes.items() if outcome == "PASSED"]
    lines = [f"tests: {len(passed)} of {len(outcomes)} passed"]
    lines += [f"  passed: {name}" for name in passed]
    lines += [
        f"  {outcome.lower()}: {name}" for name, outcome in outcomes.items() if name not in passed
    ]
    reasons = dict.fromkeys(re.findall(r"^SKIPPED \[\d+\] \S+ (.*)$", log_text, re.MULTILINE))
    return [*lines, *(f"  reason to skip: {reason[:REASON_LETTERS]}" for reason in reasons)]


def extract(log_text: str) -> str:
    """The last lines of a log, not too many."""
    return "\n".join(log_text.splitlines()[-SHOWN_LINES:])[-SHOWN_LETTERS:]


def _run(
    what: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    end: float,
    sink: int | None = None,
) -> int:
    """Run a program until it ends or the time is over; its exit status. Nothing of it stays."""
    # A shell ignores Ctrl-C in what it runs in the background, and so would all that this starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, process_group=0, stdout=sink, stderr=sink
    )
    try:
        return process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        print(f"make gpu: {what} take too long and are ended", file=sys.stderr)
        return 1
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # it ends the daemons that it has started
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WORDS_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(LAST_WORDS_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
