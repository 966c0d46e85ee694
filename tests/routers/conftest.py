"""What the tests of routers share, and the table of pairs that `make test-routers` prints."""

import pytest

from tests.vllm.conftest import models, module_dir, patient_resets, start_engine

__all__ = ["models", "module_dir", "patient_resets", "start_engine"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print, for each scenario, how many pairs of prompt and engine were compared."""
    rows = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "teardown"
        for name, value in report.user_properties
        if name == "pairs"
    ]
    if not rows:
        return
    terminalreporter.section("promised by Dynamo's indexer, found by the engine")
    columns = ("pairs", "in pool", "computed", "differ")
    totals = [sum(column) for column in zip(*(row[1:] for row in rows), strict=True)]
    for scenario, *counts in [("scenario", *columns), *rows, ("all", *totals)]:
        line = f"{scenario:62}" + "".join(f"{count!s:>9}" for count in counts)
        terminalreporter.write_line(line)
