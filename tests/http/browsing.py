"""A headless Chromium that notes what pages do behind a reader's back."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 900}
PATIENCE_MS = 60_000


class Tab:
    """One page; `complaints` are console errors, exceptions and requests to elsewhere."""

    def __init__(self, page: Any, origin: str) -> None:
        self.page = page
        self.origin = origin
        self.complaints: list[str] = []
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", self._request)

    def _console(self, message: Any) -> None:
        # A daemon that is down is what some tests are about.
        if message.type == "error" and "net::ERR" not in message.text:
            self.complaints.append(message.text)

    def _request(self, request: Any) -> None:
        if not request.url.startswith((self.origin, "data:")):
            self.complaints.append(f"asked {request.url}")

    def open(self) -> "Tab":
        """Go to the status page and wait for the first report."""
        self.page.goto(f"{self.origin}/")
        self.until("document.querySelector('#checks li') !== null")
        return self

    def until(self, condition: str) -> None:
        """Wait until an expression is true."""
        # Not by the library's own way: that evaluates text, which the page's policy forbids.
        self.page.evaluate(
            "new Promise((found, lost) => {"
            f" const end = Date.now() + {PATIENCE_MS};"
            f" const look = () => ({condition}) ? found()"
            " : Date.now() > end ? lost(new Error('never: ' + document.body.innerText))"
            " : setTimeout(look, 50); look(); })"
        )

    def text(self, selector: str) -> str:
        """What a reader reads there."""
        return " ".join(self.page.inner_text(selector).split())

    def ask(self, script: str) -> Any:
        """The value of a script."""
        return self.page.evaluate(script)


@contextmanager
def browser() -> Iterator[Any]:
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
