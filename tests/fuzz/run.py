"""Fuzz for some time: codec, broker's decisions, and a live daemon with its lane.

    make fuzz SECONDS=600 SEED=7
    python tests/fuzz/run.py --replay build/fuzz/live-7-1.json

Every script is a valid session that was changed; its seed is that of the run and its
number. A script that shows a fault is written to build/fuzz/, whole and then made shorter by
leaving steps out. The last line of the output is JSON.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.core_target import play_core
from tests.fuzz.live_target import LiveTarget, live_target, play_live
from tests.fuzz.mutate import random_script
from tests.fuzz.script import Case, Script
from tests.fuzz.target import Finding, Play, play_codec, shorter

FOLDER = Path("build/fuzz")
BATCH = 150  # scripts between two looks for leaks in the live daemon
IN_PROCESS = 6  # scripts for the targets in this process for each one of the daemon's
PURE_TRIES, LIVE_TRIES = 400, 12
TARGETS: dict[str, Play] = {"codec": play_codec, "core": play_core, "live": play_live}
ENOUGH = 20  # findings, after which a run has shown that it cannot go on


@dataclass
class Tally:
    """What was tried and found."""

    seed: int
    inputs: Counter[str] = field(default_factory=Counter)
    scripts: Counter[str] = field(default_factory=Counter)
    crashes: int = 0
    leaks: int = 0
    verified_bytes: int = 0
    files: list[str] = field(default_factory=list)

    def count(self, target: str, script: Script) -> None:
        """A script was played."""
        self.inputs[target] += sum(bool(step.frame) for step in script)
        self.scripts[target] += 1

    def note(self, target: str, finding: Finding, script: Script) -> Path:
        """A script has shown a fault; the file that it is in."""
        self.leaks += finding.leak
        self.crashes += not finding.leak
        path = FOLDER / f"{target}-{self.seed}-{len(self.files) + 1}.json"
        Case(target, self.seed, str(finding), script).save(path)
        self.files.append(str(path))
        print(f"{target}: {finding}\n  {len(script)} steps in {path}", flush=True)
        return path

    @property
    def enough(self) -> bool:
        """It makes no sense to go on."""
        return len(self.files) >= ENOUGH

    def report(self, seconds: float) -> dict[str, object]:
        """As one JSON object."""
        return {
            "inputs": sum(self.inputs.values()),
            "crashes": self.crashes,
            "leaks": self.leaks,
            "seconds": round(seconds, 1),
            "seed": self.seed,
            "inputs_of": dict(self.inputs),
            "sessions": dict(self.scripts),
            "verified_bytes": self.verified_bytes,
            "files": self.files,
        }


class Run:
    """One run: targets in turn until the time is out."""

    def __init__(self, seed: int, seconds: float) -> None:
        self.tally = Tally(seed)
        self._end = time.monotonic() + seconds
        self._random = random.Random(seed)

    def go_on(self) -> bool:
        """There is time left, and reason."""
        return time.monotonic() < self._end and not self.tally.enough

    def all_targets(self) -> None:
        """Until the time is out; a daemon that a script has harmed is replaced."""
        while self.go_on():
            with live_target() as live:
                try:
                    while self.go_on() and self.batch(live):
                        pass
                finally:
                    self.tally.verified_bytes += live.neighbour.verified_bytes

    def batch(self, live: LiveTarget) -> bool:
        """Some scripts for each target, then a look for leaks; whether the daemon is still good."""
        played: list[Script] = []
        try:
            while self.go_on() and len(played) < BATCH:
                for _ in range(IN_PROCESS):
                    self.pure(self._next())
                played.append(self._next())
                live.play(played[-1])
                self.tally.count("live", played[-1])
            live.look()
        except Finding as finding:
            script: Script = tuple(step for one in played for step in one)
            self._keep("live", finding, script, LIVE_TRIES)
            return False
        return True

    def pure(self, script: Script) -> None:
        """One script for the targets in this process."""
        for target in ("codec", "core"):
            self.tally.count(target, script)
            try:
                TARGETS[target](script)
            except Finding as finding:
                self._keep(target, finding, script, PURE_TRIES)

    def _keep(self, target: str, finding: Finding, script: Script, tries: int) -> None:
        """Write the script whole, then without the steps that its finding does not need."""
        path = self.tally.note(target, finding, script)
        shortened = shorter(script, TARGETS[target], tries)
        Case(target, self.tally.seed, str(finding), shortened).save(path)
        print(f"  {len(shortened)} steps are left of it", flush=True)

    def _next(self) -> Script:
        return random_script(random.Random(self._random.getrandbits(64)))


def replay(path: Path) -> int:
    """Play a file again; 1 if it still finds something."""
    case = Case.load(path)
    print(f"then: {case.problem}")
    try:
        TARGETS[case.target](case.script)
    except Finding as finding:
        print(f"now: {finding}")
        return 1
    print("now: nothing")
    return 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("seconds", type=float, nargs="?", default=600.0)
    parser.add_argument("seed", type=int, nargs="?", default=None)
    parser.add_argument("--replay", type=Path, help="a file of build/fuzz or tests/fuzz/cases")
    chosen = parser.parse_args()
    if chosen.replay is not None:
        return replay(chosen.replay)
    seed = random.SystemRandom().randrange(2**31) if chosen.seed is None else chosen.seed
    print(f"seed {seed}, {chosen.seconds:g} s", flush=True)
    began = time.monotonic()
    run = Run(seed, chosen.seconds)
    run.all_targets()
    print(json.dumps(run.tally.report(time.monotonic() - began)))
    return 1 if run.tally.files else 0


if __name__ == "__main__":
    sys.exit(main())
