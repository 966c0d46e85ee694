"""What the probes say: checks computed from the report, as text for people or as JSON. Pure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvd_proto.sizes import format_size


@dataclass(frozen=True, slots=True)
class Check:
    """One line of a probe. `ok` None: told for information, it decides nothing."""

    name: str
    ok: bool | None
    text: str
    percent: float | None = None
    seconds_left: float | None = None


def passed(checks: Sequence[Check]) -> bool:
    """Whether none of them failed."""
    return all(check.ok is not False for check in checks)


def broker_check(seconds: float | None, problem: str = "") -> Check:
    """The broker's own line: the time it took to answer a PING, or None and why not."""
    if seconds is None:
        return Check("broker", ok=False, text=problem)
    return Check("broker", ok=True, text=f"answered a PING in {1e3 * seconds:.1f} ms")


def readiness(report: dict[str, Any]) -> list[Check]:
    """The daemon's own checks. Engines are none of them: one that is away fails nothing."""
    return [Check(**check) for check in report["checks"]]


def lane_lines(report: dict[str, Any]) -> list[Check]:
    """Each lane's state, last heartbeat, queue and error, for information."""
    lines = []
    for lane in report["lanes"]:
        words = [lane["state"]]
        if lane["seconds_since_heard"] is not None:
            words.append(f"heard of {lane['seconds_since_heard']:.1f} s ago")
        words.append(f"{lane['queued_jobs']} jobs queued")
        if lane["queued_jobs"]:
            words.append(f"the oldest for {lane['oldest_job_seconds']:.1f} s")
        words.append(f"{format_size(lane['bytes_in_flight'])} in flight")
        words.append(f"{lane['counters']['restarts']} restarts")
        words += [f"last error: {lane['last_error']}"] if lane["last_error"] else []
        lines.append(Check(f"lane {lane['device']} now", None, ", ".join(words)))
    return lines


_MARKS = {True: "[+]", False: "[-]", None: "[i]"}


def as_text(probe: str, checks: Sequence[Check], *, verbose: bool) -> str:
    """For people: one line, or a line per check and the verdict."""
    failed = [check for check in checks if check.ok is False]
    verdict = "ok" if not failed else "failed: " + "; ".join(_line(check) for check in failed)
    if not verbose:
        return f"{verdict}\n"
    lines = [f"{_MARKS[check.ok]} {_line(check)}" for check in checks]
    lines.append(f"{probe} {'ok' if not failed else 'failed'}")
    return "\n".join(lines) + "\n"


def as_json(probe: str, checks: Sequence[Check]) -> dict[str, Any]:
    """For programs: every check, and the verdict."""
    return {"probe": probe, "ok": passed(checks), "checks": [asdict(check) for check in checks]}


def _line(check: Check) -> str:
    line = f"{check.name}: {check.text}"
    if check.percent is not None and check.ok is False:
        line += f", {check.percent:.0f} % done"
    if check.seconds_left is not None and check.ok is False:
        line += f", about {check.seconds_left:.0f} s left"
    return line
