"""Fuzz for some time: codec, broker's decisions, and a live daemon with its lane.

    make fuzz SECONDS=600 SEED=7
    python tests/fuzz/run.py --replay build/fuzz/live-7-1.json

Every script is a valid session that was changed; its seed is that of the run and its number. A
script that shows a fault is written to build/fuzz/, whole and then made shorter by leaving steps
out. The last line of the output is JSON.
"""

import random
import sys
import time
from collections import Counter
from pathlib import Path

from kvd_proto.codec import WIRE
from kvd_proto.errors import DecodeError
from tests import long_runs
from tests.fuzz.core_target import play_core
from tests.fuzz.live_target import LiveTarget, live_target, play_live
from tests.fuzz.mutate import random_script
from tests.fuzz.sessions import Case, Finding, Play, Script
from tests.long_runs import Report, command_line

FOLDER = Path("build/fuzz")
BATCH = 150  # scripts between two looks for leaks in the live daemon
IN_PROCESS = 6  # scripts for the targets in this process for each one of the daemon's
TRIES = {"codec": 400, "core": 400, "live": 12}  # to make a script shorter
ENOUGH = 20  # findings, after which a run has shown that it cannot go on


def play_codec(script: Script) -> None:
    """A frame is refused with a DecodeError, or is a message that survives a round trip."""
    for frame in (step.frame for step in script if step.frame):
        try:
            header, message = WIRE.decode(frame)
        except DecodeError as error:
            if not str(error):
                raise Finding(f"{type(error).__name__} has no text") from error
            continue
        except Exception as error:
            raise Finding(f"decoding raises {error!r}") from error
        again = WIRE.encode(message, header.request_id)
        # repr: NaN is not equal to itself
        if repr(WIRE.decode(again)) != repr((header, message)):
            raise Finding(f"{message!r} does not survive a round trip")


TARGETS: dict[str, Play] = {"codec": play_codec, "core": play_core, "live": play_live}


class Run:
    """One run: targets in turn until the time is out."""

    def __init__(self, seed: int, seconds: float) -> None:
        self.seed = seed
        self.inputs: Counter[str] = Counter()
        self.sessions: Counter[str] = Counter()
        self.leaks = 0
        self.verified_bytes = 0
        self.files: list[str] = []
        self._end = time.monotonic() + seconds
        self._random = random.Random(seed)

    def all_targets(self) -> Report:
        """Until the time is out; a daemon that a script has harmed is replaced."""
        while self._goes_on():
            with live_target() as live:
                try:
                    while self._goes_on() and self._batch(live):
                        pass
                finally:
                    self.verified_bytes += live.neighbour.verified_bytes
        return {
            "inputs": sum(self.inputs.values()),
            "crashes": len(self.files) - self.leaks,
            "leaks": self.leaks,
            "inputs_of": dict(self.inputs),
            "sessions": dict(self.sessions),
            "verified_bytes": self.verified_bytes,
            "violations": self.files,
        }

    def _goes_on(self) -> bool:
        return time.monotonic() < self._end and len(self.files) < ENOUGH

    def _batch(self, live: LiveTarget) -> bool:
        """Some scripts for each target, then a look for leaks; whether the daemon is still good."""
        played: list[Script] = []
        try:
            while self._goes_on() and len(played) < BATCH:
                for _ in range(IN_PROCESS):
                    self._play_in_process()
                played.append(self._next("live"))
                live.play(played[-1])
            live.look()
        except Finding as finding:
            self._keep("live", finding, tuple(step for script in played for step in script))
            return False
        return True

    def _play_in_process(self) -> None:
        script = self._next("codec", "core")
        for target in ("codec", "core"):
            try:
                TARGETS[target](script)
            except Finding as finding:
                self._keep(target, finding, script)

    def _next(self, *targets: str) -> Script:
        script = random_script(random.Random(self._random.getrandbits(64)))
        for target in targets:
            self.inputs[target] += sum(bool(step.frame) for step in script)
            self.sessions[target] += 1
        return script

    def _keep(self, target: str, finding: Finding, script: Script) -> None:
        """Write the script whole, then without the steps that its finding does not need."""
        self.leaks += finding.leak
        path = FOLDER / f"{target}-{self.seed}-{len(self.files) + 1}.json"
        self.files.append(str(path))
        Case(target, self.seed, str(finding), script).save(path)
        print(f"{target}: {finding}\n  {len(script)} steps in {path}", flush=True)
        shortened = shorter(script, TARGETS[target], TRIES[target])
        Case(target, self.seed, str(finding), shortened).save(path)
        print(f"  {len(shortened)} steps are left of it", flush=True)


def shorter(script: Script, play: Play, tries: int) -> Script:
    """Return the script without the steps that its finding does not need; `tries` plays at most."""
    size = max(1, len(script) // 2)
    while size:
        place = 0
        while place < len(script) and tries:
            less = script[:place] + script[place + size :]
            tries -= 1
            try:
                play(less)
            except Finding:
                script = less
            else:
                place += size
        size //= 2
    return script


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
    parser = command_line(__doc__, 600.0)
    parser.add_argument("--replay", type=Path, help="a file of build/fuzz or tests/fuzz/cases")
    chosen = parser.parse_args()
    if chosen.replay is not None:
        return replay(chosen.replay)
    return long_runs.main(chosen, lambda: Run(chosen.seed, chosen.amount).all_targets())


if __name__ == "__main__":
    sys.exit(main())
