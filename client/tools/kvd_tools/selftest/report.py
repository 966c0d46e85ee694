"""What the self-test found, for programs and for people."""

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from kvd_tools.selftest.bench import Bench, Moved
from kvd_tools.selftest.steps import STEPS, Outcome


@dataclass(frozen=True, slots=True)
class LaneReport:
    """One lane: the steps that were done, and, where all were, medians of its jobs.

    gbps: 10^9 bytes a second of copying in the lane; latency: seconds of a whole job, as an
    engine waits for it. By "store" and "load".
    """

    device: str
    steps: tuple[Outcome, ...]
    job_bytes: int
    gbps: dict[str, float]
    latency_seconds: dict[str, float]

    @property
    def failed(self) -> Outcome | None:
        """The step that failed, if any."""
        return None if self.steps[-1].ok else self.steps[-1]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        failed = self.failed
        return {
            "device": self.device,
            "ok": failed is None,
            "failed_step": failed.name if failed else None,
            "text": failed.text if failed else "",
            "steps": [asdict(step) for step in self.steps],
            "job_bytes": self.job_bytes,
            "gbps": self.gbps,
            "latency_seconds": self.latency_seconds,
        }


def lane_report(bench: Bench, outcomes: list[Outcome]) -> LaneReport:
    """What a bench went through."""
    complete = len(outcomes) == len(STEPS) and outcomes[-1].ok
    samples = {kind: moved for kind, moved in bench.samples.items() if complete and moved}
    return LaneReport(
        device=bench.device,
        steps=tuple(outcomes),
        job_bytes=max((moved.bytes for each in samples.values() for moved in each), default=0),
        gbps={kind: _gbps(moved) for kind, moved in samples.items()},
        latency_seconds={
            kind: median(each.latency_seconds for each in moved) for kind, moved in samples.items()
        },
    )


def _gbps(moved: list[Moved]) -> float:
    return median(each.bytes / max(each.copy_seconds, 1e-9) for each in moved) / 1e9


def print_report(reports: list[LaneReport], console: Console) -> None:
    """A table of the steps for each lane, and a line with what it measured."""
    for report in reports:
        table = Table("step", "", "seen", "seconds", title=f"lane {report.device}")
        for step in report.steps:
            mark = "[green]ok[/]" if step.ok else "[bold red]FAILED[/]"
            table.add_row(step.name, mark, step.text, f"{step.seconds:.3f}")
        console.print(table)
        failed = report.failed
        if failed is not None:
            console.print(f"[bold red]{report.device}: {failed.name} failed:[/] {failed.text}")
            continue
        for kind, gbps in report.gbps.items():
            milliseconds = report.latency_seconds[kind] * 1000
            console.print(
                f"{report.device}: {kind} {gbps:.2f} GB/s,"
                f" {milliseconds:.2f} ms a job of {report.job_bytes} bytes"
            )
