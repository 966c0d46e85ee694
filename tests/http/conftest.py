"""Daemons that serve HTTP on a port of their own, and a browser."""

import os
import shutil
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from tests.daemon.serving import Daemon, daemon_left_clean
from tests.http.browser import PATIENCE_MS, OpenTab, Show, Tab
from tests.http.serving import Asked, port_of, served
from tests.report.reports import loaded_report


@pytest.fixture(scope="module")
def web() -> Iterator[Daemon]:
    """A ready daemon with HTTP on a free port, shared by tests that break nothing."""
    with daemon_left_clean("--http-listen", "127.0.0.1:0") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """The machine's Chromium; the test is skipped where there is none, and says so."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed; tests/install-debian.sh does that")
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  # only where it is of use

    args = ["--disable-dev-shm-usage"]  # /dev/shm may be small, and daemons fill it
    args += ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=program, args=args, timeout=PATIENCE_MS
        )
        try:
            yield chromium
        finally:
            chromium.close()


@pytest.fixture
def tab(chromium: Any) -> Iterator[OpenTab]:
    """Opens pages on a daemon, which are closed with the test: each draws as long as it is open."""
    contexts = []

    def open_tab(of: Daemon | int, size: dict[str, int]) -> Tab:
        port = of if isinstance(of, int) else port_of(of)
        contexts.append(chromium.new_context(viewport=size))
        return Tab(contexts[-1].new_page(), f"http://127.0.0.1:{port}").open()

    yield open_tab
    for context in contexts:
        context.close()


PIDS = count(1)
SHOWN_PID = "document.getElementById('identity').textContent.match(/process (\\d+)/)?.[1]"


@pytest.fixture(scope="module")
def broker() -> Iterator[tuple[Asked, int]]:
    """A broker whose report is made up, and the port of its page."""
    with served(loaded_report()) as found:
        yield found


@pytest.fixture
def show(tab: OpenTab, broker: tuple[Asked, int]) -> Show:
    """Opens the page of a broker that gives this report, in a window so wide."""
    asked, port = broker

    def open_page(report: dict[str, Any], width: int = 1280) -> Tab:
        # The first report of a new page may be the one before, which has the same time.
        pid = next(PIDS)
        asked.status = report | {"pid": pid, "boot_id": f"{pid:032x}"}
        page = tab(port, {"width": width, "height": 900})
        page.until(f"{SHOWN_PID} === '{pid}'")
        return page

    return open_page
