"""Deletes statements of the product one at a time, and says which deletions no test notices.

    make mutants                 # every statement: hours
    make mutants SAMPLE=100      # a hundred of each package, drawn with SEED (default 0)

1. `instrument.py` makes a copy of the tree in which each statement has a switch.
2. The suite runs once there; `recording.py` notes which statements each test runs.
3. Each statement is switched off, and tests that run it run until one fails. Strong tests come
   first: state machines, properties, conformance, chaos, fuzz, rules taken away. Then come the
   others: those that have noticed another deletion, then those that run the fewest statements.
4. The table says for each package how many deletions were noticed, by which kind of test.

BUILD/results.jsonl has a line a statement; a run that is stopped goes on from there. A statement's
tests run in a process forked from one that has imported everything, two at a time.
"""

import argparse
import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.mutants.instrument import Statement, build, package_of

NUM_PROCESSES = 2
SLOW_SECONDS = 12.0  # strong tests that take longer are left out
BUDGET_SECONDS = 8.0  # of each stage, as recorded; the first test of a stage may take longer
MAX_EXAMPLES = 40
STRONG = (
    *("tests/chaos/", "tests/fuzz/", "tests/soak/", "tests/lane/test_cuda_rules.py"),
    *("::TestDiskTier::", "::TestMemoryTier::", "::TestMooncake::"),
    *("::TestHostDevice::", "::TestCudaDevice::"),
    *("test_every_rule_is_missed", "test_every_call_of_the_worker_may_fail_once"),
)
_IMPORTED_FIRST = ("numpy", "torch", "msgpack", "zmq", "uvicorn", "starlette", "rich.console")


@dataclass(frozen=True, slots=True)
class RecordedTest:
    """A test that passed in the recording."""

    name: str
    seconds: float
    is_strong: bool
    num_statements: int


@dataclass(slots=True)
class Trial:
    """A statement that is switched off, and the process that runs tests on it."""

    statement: int
    tests: list[RecordedTest]
    stage: int = 0
    running: Sequence[RecordedTest] = ()
    started: set[str] = field(default_factory=set)
    pid: int = 0
    deadline: float = 0.0
    failed: str = ""

    @property
    def output(self) -> Path:
        """Where the process writes which tests it starts, and which fail."""
        return Path(f"/tmp/kvd-mutant-{self.statement}")

    def next_tests(self, useful: set[str]) -> Sequence[RecordedTest]:
        """Return the tests of the next stage that has any; () at the end.

        Args:
            useful: names of tests that have noticed another deletion.
        """
        tests = [test for test in self.tests if test.name not in self.started]
        strong = [test for test in tests if test.is_strong and test.seconds <= SLOW_SECONDS]
        others = [test for test in tests if not test.is_strong]
        others.sort(key=lambda test: test.num_statements)
        while self.stage < 3:
            self.stage += 1
            if self.stage == 2:
                first = within_budget([test for test in others if test.name in useful])
                rest = [test for test in others if test.name not in useful]
                chosen = [*first, *within_budget(rest)[:MAX_EXAMPLES]]
            else:
                chosen = list(within_budget(strong))
            if chosen:
                return chosen
        return ()


def within_budget(tests: Sequence[RecordedTest]) -> Sequence[RecordedTest]:
    """Return the first tests that take the budget together; one at least, if there is one."""
    seconds = list(accumulate(test.seconds for test in tests))
    return tests[: max(1, bisect_right(seconds, BUDGET_SECONDS))]


class _Outcomes:
    """Writes each test that starts or fails at once: a hang must not lose the line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", buffering=1)

    def pytest_configure(self) -> None:
        """Report the first example that fails: shrinking it would take long and say no more."""
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        hypothesis.settings.register_profile(
            "mutants", hypothesis.settings.default, phases=phases, database=None
        )
        hypothesis.settings.load_profile("mutants")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._file.write(f"start {nodeid}\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._file.write(f"failed {report.nodeid}\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._file.write(f"failed {report.nodeid}\n")


def record(folder: Path, num_statements: int) -> None:
    """Run the suite in the instrumented copy, and note what each test runs."""
    records = folder / "records"
    shutil.rmtree(records, ignore_errors=True)
    records.mkdir()
    for name in ("gw0", "gw1"):
        (records / f"{name}.seen").write_bytes(bytes(num_statements))
    subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"),
            *("-m", "not nightly", "-p", "no:cacheprovider", "-p", "tests.mutants.recording"),
            *("-o", "faulthandler_timeout=900", "-o", "timeout=1000"),
        ],
        cwd=folder,
        env=_environment(folder) | {"KVD_MUTANTS_FOLDER": str(records)},
        check=False,  # a test that fails there is left out
    )


def read_records(folder: Path) -> dict[int, list[RecordedTest]]:
    """Return for each statement the tests that ran it and passed, the quickest first."""
    tests: dict[int, list[RecordedTest]] = defaultdict(list)
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if row["failed"]:
                continue
            is_strong = row["is_property"] or any(part in row["test"] for part in STRONG)
            test = RecordedTest(row["test"], row["seconds"], is_strong, len(row["ran"]))
            for statement in row["ran"]:
                tests[statement].append(test)
    for recorded in tests.values():
        recorded.sort(key=lambda test: test.seconds)
    return tests


class Trials:
    """Runs the trials, and writes a line for each one that is decided."""

    def __init__(self, folder: Path, by_statement: dict[int, list[RecordedTest]]) -> None:
        self._results = folder / "results.jsonl"
        self._by_statement = by_statement
        self._useful: set[str] = set()
        self._decided: set[int] = set()
        self._live: bytearray = importlib.import_module("kvd_mutants_switch").live
        for row in read_results(folder):
            self._decided.add(row["statement"])
            if row["failed"] and not row["by_strong"]:
                self._useful.add(row["failed"])

    def run(self, statements: Iterable[int]) -> None:
        """Decide every one of these statements that a test runs, and that is not decided yet."""
        waiting = [
            number
            for number in statements
            if number not in self._decided and number in self._by_statement
        ]
        running: list[Trial] = []
        total = len(waiting)
        while waiting or running:
            while waiting and len(running) < NUM_PROCESSES:
                number = waiting.pop()
                trial = Trial(number, self._by_statement[number])
                self._start(trial, trial.next_tests(self._useful))
                running.append(trial)
            running = [trial for trial in running if not self._is_decided(trial)]
            time.sleep(0.01)
            done = total - len(waiting) - len(running)
            print(f"\r{done} of {total} ", end="", flush=True)
        print()

    def _start(self, trial: Trial, tests: Sequence[RecordedTest]) -> None:
        seconds = sum(test.seconds for test in tests)
        trial.running = tests
        trial.deadline = time.monotonic() + 30 + 6 * seconds
        trial.started |= {test.name for test in tests}
        trial.pid = os.fork()
        if trial.pid:
            return
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(null, descriptor)
            os.environ["KVD_MUTANT"] = str(trial.statement)
            self._live[trial.statement] = 0
            options = ["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist"]
            options += ["-o", "faulthandler_timeout=0", "-o", "timeout=0"]
            names = [test.name for test in tests]
            pytest.main([*options, *names], plugins=[_Outcomes(trial.output)])
        except BaseException:  # noqa: BLE001  # the child must not go on as its parent
            traceback.print_exc()
        finally:
            os._exit(0)

    def _is_decided(self, trial: Trial) -> bool:
        ended, _ = os.waitpid(trial.pid, os.WNOHANG)
        hangs = not ended and time.monotonic() > trial.deadline
        if not ended and not hangs:
            return False
        _kill(trial)
        if hangs:
            os.waitpid(trial.pid, 0)
        trial.failed = _failed_test(trial, hangs=hangs)
        if not trial.failed and (tests := trial.next_tests(self._useful)):
            self._start(trial, tests)
            return False
        by_strong = any(test.is_strong for test in trial.tests if test.name == trial.failed)
        if trial.failed and not by_strong:
            self._useful.add(trial.failed)
        row = {
            "statement": trial.statement,
            "failed": trial.failed,
            "by_strong": by_strong,
            "num_tests": len(trial.started),
            "hung": hangs,
        }
        with self._results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return True


def _kill(trial: Trial) -> None:
    """Kill the trial's process, and every process that its tests have left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(trial.pid, signal.SIGKILL)
    mark = f"KVD_MUTANT={trial.statement}\0".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes() and int(process.name) != os.getpid():
                os.kill(int(process.name), signal.SIGKILL)


def _failed_test(trial: Trial, *, hangs: bool) -> str:
    lines = trial.output.read_text().splitlines() if trial.output.exists() else []
    trial.output.unlink(missing_ok=True)
    failed = [line.removeprefix("failed ") for line in lines if line.startswith("failed ")]
    started = [line.removeprefix("start ") for line in lines if line.startswith("start ")]
    if hangs and not failed:
        failed = started[-1:] or [trial.running[0].name]
    return failed[0] if failed else ""


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the statements that are decided."""
    path = folder / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def print_table(folder: Path, statements: Sequence[Statement], covered: Iterable[int]) -> None:
    """Print how many deletions were noticed, by package, and every one that was not."""
    rows = {row["statement"]: row for row in read_results(folder)}
    all_of = Counter(package_of(statement.path) for statement in statements)
    covered_of = Counter(package_of(statements[number].path) for number in covered)
    decided, strong, other = Counter[str](), Counter[str](), Counter[str]()
    for number, row in rows.items():
        package = package_of(statements[number].path)
        decided[package] += 1
        strong[package] += row["by_strong"]
        other[package] += bool(row["failed"]) and not row["by_strong"]
    print("| package | statements | run by tests | deleted | strong | other tests | not noticed |")
    print("|---|---|---|---|---|---|---|")
    for package in sorted(all_of):
        left = decided[package] - strong[package] - other[package]
        figures = (all_of[package], covered_of[package], decided[package])
        print(
            f"| {package} |", *(f"{n} |" for n in (*figures, strong[package], other[package], left))
        )
    for number, row in sorted(rows.items()):
        if not row["failed"]:
            statement = statements[number]
            text = statement.text.splitlines()[0][:80]
            print(f"{statement.path}:{statement.line} {statement.scope}: {text}")


def _environment(folder: Path) -> dict[str, str]:
    roots = [folder, folder / "client", folder / "proto", folder / "client" / "tools"]
    paths = os.pathsep.join(map(str, roots))
    return dict(os.environ) | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def _draw(statements: Sequence[Statement], sample: int, seed: int) -> list[int]:
    """Return the numbers of `sample` statements of each package in random order; 0: of all."""
    by_package: dict[str, list[int]] = defaultdict(list)
    for statement in statements:
        by_package[package_of(statement.path)].append(statement.number)
    chosen: list[int] = []
    chance = random.Random(seed)
    for _, numbers in sorted(by_package.items()):
        chosen += chance.sample(numbers, min(sample or len(numbers), len(numbers)))
    chance.shuffle(chosen)
    return chosen


def main() -> None:
    """Make the copy and the recording if they are not there, run the trials, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="for the copy; kept, to go on from there")
    parser.add_argument("--sample", type=int, default=0, help="statements of each package; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if not (folder / "statements.json").exists():
        build(Path.cwd(), folder)
        record(folder, len(json.loads((folder / "statements.json").read_text())))
    if Path.cwd() != folder:  # again, with the copy's modules
        command = [sys.executable, "-m", "tests.mutants.run", *sys.argv[1:]]
        command[3] = str(folder)
        sys.exit(subprocess.call(command, cwd=folder, env=_environment(folder)))
    statements = [Statement(**row) for row in json.loads(Path("statements.json").read_text())]
    by_statement = read_records(folder / "records")
    for name in _IMPORTED_FIRST:
        importlib.import_module(name)
    for path in sorted({statement.path for statement in statements}):
        module = path.removeprefix("client/").removesuffix(".py").replace("/", ".")
        if not module.endswith("__main__"):
            importlib.import_module(module.removesuffix(".__init__"))
    for path in sorted({test.name.partition("::")[0] for test in chain(*by_statement.values())}):
        with contextlib.suppress(Exception, pytest.skip.Exception):  # forked trials say why
            importlib.import_module(path.removesuffix(".py").replace("/", "."))
    Trials(folder, by_statement).run(_draw(statements, arguments.sample, arguments.seed))
    print_table(folder, statements, by_statement)


if __name__ == "__main__":
    main()
