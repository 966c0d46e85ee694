"""What must hold after every step, when all is quiet."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from kvd.errors import NotRunning, Refusal
from kvd_proto.messages import Check, Checked
from tests.chaos.shared import GIVEN, SPECS, Count, Given, Phase
from tests.chaos.world import World
from tests.daemon.serving import left_over
from tests.daemon.slots import slots_of

T = TypeVar("T")
RECOVERY_SECONDS = 45.0
REST_SECONDS = 30.0
QUIET_SECONDS = 20.0  # leases and tickets last 2 s
NAP_SECONDS = 0.05
RSS_SLACK_BYTES = 64 * 2**20
FD_SLACK = 12
FDS_PER_SESSION = 8  # connection, pidfd, and what it has sent
FDS_PER_NAMESPACE = 3
MOST_ENTRIES = 40
TROUBLE = re.compile(r"Traceback|hit a bug|Assertion|SIGSEGV|IntegrityError|a bug in the lane")


@dataclass
class Invariants:
    """Looks at a world; what is wrong is told to it."""

    world: World
    most_recovery: float = 0.0
    _first: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    """Descriptors and bytes of a process in its first quiet moment."""
    _read: dict[Path, int] = field(default_factory=dict)  # how far files were read
    _given: set[Given] = field(default_factory=set)

    def look(self) -> None:
        """Wait until all has recovered, have everybody rest, and look."""
        world = self.world
        began = time.monotonic()
        self._recovered()
        self.most_recovery = max(self.most_recovery, time.monotonic() - began)
        world.phase[0] = Phase.REST
        try:
            for client in world.wait_for(Count.RESTS, REST_SECONDS):
                world.violated(f"{client.name} (pid {client.pid}) does not come to rest")
            left = _settled(self._left)
            report = world.daemon.report()
            if left or not report:
                world.violated(f"left over after {QUIET_SECONDS:g} s of quiet: {left}")
            else:
                self._integrity()
                self._owned()
                self._bounded(report)
        finally:
            world.phase[0] = Phase.RUN
        self._said()

    def _recovered(self) -> None:
        """Daemon and engines are back within a bounded time, whatever was done to them."""
        world = self.world
        end = time.monotonic() + RECOVERY_SECONDS
        while time.monotonic() < end:
            world.revive()
            if world.daemon.report().get("ready") and not world.wait_for(Count.ATTACHED, 1.0):
                return
        late = [client.name for client in world.wait_for(Count.ATTACHED, 0.0)]
        report = world.daemon.report()
        engines = [(e["name"], e["missing_ranks"]) for e in report.get("engines", [])]
        world.violated(
            f"no recovery within {RECOVERY_SECONDS:g} s: ready {report.get('ready')}"
            f" {report.get('checks')}, not attached {late}, engines {engines}"
        )

    def _left(self) -> dict[str, Any]:
        """What is under way in the daemon."""
        report = self.world.daemon.report()
        return left_over(report) if report else {"answer": "none"}

    def _integrity(self) -> None:
        try:
            checked = self.world.daemon.ask(Check(), Checked)
        except (NotRunning, Refusal) as error:
            self.world.violated(f"integrity cannot be checked: {error}")
            return
        if checked.violation:
            self.world.violated(f"integrity: {checked.violation}")

    def _owned(self) -> None:
        """Each slot that is lent has an owner that knows of it, and no key is there twice."""
        for text in _settled(self._wrong_owners):  # a message may have been under way
            self.world.violated(text)
        for given in GIVEN.iter_unpack(self._news(self.world.folder / "given", GIVEN.size)):
            if self._given and given[0] != next(iter(self._given))[0]:
                self._given.clear()  # only notes of one daemon can be alike
            if given in self._given:
                boot_id, namespace, slot, generation = given
                self.world.violated(
                    f"slot {slot}, generation {generation} of {namespace.hex()[:8]} was given"
                    f" twice by daemon {boot_id.hex()[:8]}"
                )
            self._given.add(given)

    def _wrong_owners(self) -> list[str]:
        world, wrong = self.world, []
        for model in {spec.model for spec in SPECS.values()}:
            names = [spec.name for spec in SPECS.values() if spec.model == model]
            slots = slots_of(world.daemon.runtime_dir, names[0])
            if slots is None:  # at a limit of the daemon, say
                continue
            lent = len(slots.loans)
            known = sum(world.clients[name].counters[Count.LOANS] for name in names)
            if lent > known:
                wrong.append(f"{model}: {lent} slots are lent, {known} are at hand in {names}")
            if slots.twice:
                wrong.append(f"{model}: READY in two slots are {slots.twice}")
        return wrong

    def nothing_lent(self) -> None:
        """When all engines have ended, nothing is theirs."""

        def lent() -> dict[str, Any]:
            left = self._left()
            for space in self.world.daemon.report().get("namespaces", []):
                if space["chunks"]["lent"]:
                    left[space["model"]] = space["chunks"]["lent"]
            return left

        if left := _settled(lent):
            self.world.violated(f"lent to engines that have ended, or left over: {left}")

    def _bounded(self, report: dict[str, Any]) -> None:
        sessions, namespaces = report["sessions"]["open"], len(report["namespaces"])
        allowed = FD_SLACK + FDS_PER_SESSION * sessions + FDS_PER_NAMESPACE * namespaces
        pids = {f"lane {lane['device']}": lane["pid"] for lane in report["lanes"]}
        for name, pid in ({"broker": report["pid"]} | pids).items():
            try:
                process = psutil.Process(pid)
                fds, rss = process.num_fds(), process.memory_info().rss
            except psutil.Error:
                continue
            first_fds, first_rss = self._first.setdefault((name, pid), (fds, rss))
            if fds > first_fds + allowed:
                self.world.violated(f"{name} has {fds} descriptors, {first_fds} at first")
            if rss > first_rss + RSS_SLACK_BYTES:
                self.world.violated(f"{name} has {rss} bytes, {first_rss} at first")
        for where in (self.world.daemon.runtime_dir, self.world.pool_dir):
            entries = [path for path in where.rglob("*") if not path.name.startswith("filler")]
            if len(entries) > MOST_ENTRIES:
                self.world.violated(f"{len(entries)} entries in {where}: {entries[:5]}...")

    def _said(self) -> None:
        """What clients complain of, and trouble in the logs."""
        for line in self._lines(self.world.folder / "complaints"):
            self.world.violated(f"a client says: {line}")
        for line in self._lines(self.world.daemon.log):
            if TROUBLE.search(line):
                self.world.violated(f"the log says: {line[:500]}")
        for client in self.world.clients.values():
            said = "\n".join(self._lines(client.log))
            if TROUBLE.search(said):
                self.world.violated(f"{client.name} failed: {said[-1500:]}")

    def _lines(self, path: Path) -> list[str]:
        return self._news(path).decode(errors="replace").splitlines()

    def _news(self, path: Path, record: int = 0) -> bytes:
        """Whole lines, or records, of a file that were not read before: more may be written."""
        if not path.exists():
            return b""
        begin = self._read.get(path, 0)
        with path.open("rb") as file:
            file.seek(begin)
            news = file.read()
        whole = len(news) // record * record if record else news.rfind(b"\n") + 1
        self._read[path] = begin + whole
        return news[:whole]


def _settled(question: Callable[[], T]) -> T:
    """The answer once it is empty, or the last one of a quiet time."""
    end = time.monotonic() + QUIET_SECONDS
    while (answer := question()) and time.monotonic() < end:
        time.sleep(NAP_SECONDS)
    return answer
