"""What must hold after every step, when all is quiet."""

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from kvd.errors import NotRunning, Refusal
from kvd_proto.messages import Check, Checked
from tests.chaos.given import Given, given_twice
from tests.chaos.shared import SPECS, Count, Phase
from tests.chaos.world import World
from tests.daemon.serving import left_over
from tests.daemon.slots import slots_of

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
class Held:
    """What a process held in its first quiet moment."""

    fds: int
    rss: int


@dataclass
class Invariants:
    """Looks at a world; what is wrong is told to it."""

    world: World
    most_recovery: float = 0.0
    most_quiet: float = 0.0
    first: dict[tuple[str, int], Held] = field(default_factory=dict)
    _complaints_read: int = 0
    _log_read: int = 0
    _notes_read: int = 0
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
            began = time.monotonic()
            report = self._quiet()
            self.most_quiet = max(self.most_quiet, time.monotonic() - began)
            if report:
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

    def _quiet(self) -> dict[str, Any]:
        """The status when nothing is under way any more; empty where that does not come."""
        end = time.monotonic() + QUIET_SECONDS
        left: dict[str, Any] = {"answer": "none"}
        while time.monotonic() < end:
            report = self.world.daemon.report()
            if report:
                left = left_over(report)
                if not left:
                    return report
            time.sleep(NAP_SECONDS)
        self.world.violated(f"left over after {QUIET_SECONDS:g} s of quiet: {left}")
        return {}

    def _owned(self) -> None:
        """Each slot that is lent has an owner that knows of it, and no key is there twice."""
        end = time.monotonic() + QUIET_SECONDS
        wrong = self._wrong_owners()
        while wrong and time.monotonic() < end:  # a message may have been under way
            time.sleep(NAP_SECONDS)
            wrong = self._wrong_owners()
        for text in wrong:
            self.world.violated(text)
        twice, self._notes_read = given_twice(self.world.folder, self._notes_read, self._given)
        for boot_id, namespace, slot, generation in twice:
            self.world.violated(
                f"slot {slot}, generation {generation} of {namespace.hex()[:8]} was given twice"
                f" by daemon {boot_id.hex()[:8]}"
            )

    def _wrong_owners(self) -> list[str]:
        world, wrong = self.world, []
        for model in {spec.model for spec in SPECS.values()}:
            names = [spec.name for spec in SPECS.values() if spec.model == model]
            found = slots_of(world.daemon.runtime_dir, names[0])
            if found is None:  # at a limit of the daemon, say
                continue
            lent = len(found.loans)
            known = sum(world.clients[name].counters[Count.LOANS] for name in names)
            if lent > known:
                wrong.append(f"{model}: {lent} slots are lent, {known} are at hand in {names}")
            if found.twice:
                wrong.append(f"{model}: READY in two slots are {found.twice}")
        return wrong

    def nothing_lent(self) -> None:
        """When all engines have ended, nothing is theirs."""
        end = time.monotonic() + QUIET_SECONDS
        lent: dict[str, int] = {}
        while time.monotonic() < end:
            report = self.world.daemon.report()
            if report:
                spaces = report["namespaces"]
                lent = {space["model"]: space["chunks"]["lent"] for space in spaces}
                if not any(lent.values()) and not left_over(report):
                    return
            time.sleep(NAP_SECONDS)
        self.world.violated(f"lent to engines that have ended: {lent}")

    def _integrity(self) -> None:
        try:
            checked = self.world.daemon.ask(Check(), Checked)
        except (NotRunning, Refusal) as error:
            self.world.violated(f"integrity cannot be checked: {error}")
            return
        if checked.violation:
            self.world.violated(f"integrity: {checked.violation}")

    def _bounded(self, report: dict[str, Any]) -> None:
        sessions, namespaces = report["sessions"]["open"], len(report["namespaces"])
        allowed = FD_SLACK + FDS_PER_SESSION * sessions + FDS_PER_NAMESPACE * namespaces
        pids = {"broker": report["pid"]} | {
            f"lane {lane['device']}": lane["pid"] for lane in report["lanes"]
        }
        for name, pid in pids.items():
            try:
                process = psutil.Process(pid)
                held = Held(process.num_fds(), process.memory_info().rss)
            except psutil.Error:
                continue
            first = self.first.setdefault((name, pid), held)
            if held.fds > first.fds + allowed:
                self.world.violated(f"{name} has {held.fds} descriptors, {first.fds} at first")
            if held.rss > first.rss + RSS_SLACK_BYTES:
                self.world.violated(f"{name} has {held.rss} bytes, {first.rss} at first")
        for where in (self.world.daemon.runtime_dir, self.world.pool_dir):
            entries = [path for path in where.rglob("*") if not path.name.startswith("filler")]
            if len(entries) > MOST_ENTRIES:
                self.world.violated(f"{len(entries)} entries in {where}: {entries[:5]}...")

    def _said(self) -> None:
        """What clients complain of, and trouble in the daemon's log."""
        lines, self._complaints_read = _news(
            self.world.folder / "complaints", self._complaints_read
        )
        for line in lines:
            self.world.violated(f"a client says: {line}")
        lines, self._log_read = _news(self.world.daemon.log, self._log_read)
        for line in lines:
            if TROUBLE.search(line):
                self.world.violated(f"the log says: {line[:500]}")
        for client in self.world.clients.values():
            said = "\n".join(_news(client.log, 0)[0])
            if TROUBLE.search(said):
                self.world.violated(f"{client.name} failed: {said[-1500:]}")
                client.log.write_text("")


def _news(path: Path, begin: int) -> tuple[list[str], int]:
    """Whole lines from there on, and where they end: more may be written meanwhile."""
    if not path.exists():
        return [], begin
    with path.open("rb") as file:
        file.seek(begin)
        whole, end, _ = file.read().rpartition(b"\n")
    return whole.decode(errors="replace").splitlines(), begin + len(whole) + len(end)
