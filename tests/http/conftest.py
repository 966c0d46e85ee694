"""Daemons that serve HTTP, the status page in a browser's tab, and scripts that look at it."""

import os
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from tests.daemon.serving import Daemon, daemon_left_clean
from tests.http.serving import Asked, port_of, served
from tests.report.reports import loaded_report

PATIENCE_MS = 60_000
# WCAG 2: relative luminance and contrast of every text with what lies behind it.
CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = rgba(getComputedStyle(node).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return rgba("Canvas");
  };
  const bad = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !node.checkVisibility()) continue;
    if (node.closest("svg, .unseen, noscript, option")) continue;
    const [a, b] = [light(rgba(getComputedStyle(node).color)), light(behind(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) bad.push(`${walk.currentNode.data.trim()}: ${ratio.toFixed(2)}`);
  }
  return bad;
}"""
# Figures that stand on another line than their unit.
SPLIT = r"""() => {
  const figure = /\d[\d.,]*[\s\u00a0](?:[KMGTP]iB|[kMGT]?B\/s|B|s|ms|µs|min|h|d|%)(?![\p{L}\d])/gu;
  const bad = [];
  let seen = 0;
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode;
    if (!node.parentElement.checkVisibility() || node.parentElement.closest(".unseen")) continue;
    for (const found of node.data.matchAll(figure)) {
      const range = document.createRange();
      range.setStart(node, found.index);
      range.setEnd(node, found.index + found[0].length);
      seen += 1;
      if (new Set([...range.getClientRects()].map((box) => box.top)).size > 1) bad.push(found[0]);
    }
  }
  return [seen, bad];
}"""
NAMELESS = """() => [...document.querySelectorAll(
    "svg, button, select, a, summary, table, section")]
  .filter((node) => node.getAttribute("aria-hidden") !== "true")
  .filter((node) => !(node.getAttribute("aria-label") || node.textContent.trim()
    || node.labels?.length || document.getElementById(node.getAttribute("aria-labelledby"))))
  .map((node) => node.outerHTML.slice(0, 80))"""
# A banner says that the page and the daemon have lost each other, and why.
CONTACT = (
    "document.getElementById('contact').checkVisibility()"
    " && document.getElementById('contact-text').textContent.includes('{}')"
)
SHOWN_STATE = """["state", "state", "verdict"].map((id, i) =>
  i ? document.getElementById(id).dataset.tone : document.getElementById(id).textContent)"""
UNREACHED = """[...document.querySelectorAll("a, button, select, summary")]
  .filter((node) => node.checkVisibility() && !("reached" in node.dataset))
  .map((node) => node.outerHTML.slice(0, 80))"""


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

    def resize(self, width: int, scheme: str = "light") -> None:
        """Give the window this width and the page this colour scheme; nothing scrolls sideways."""
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(color_scheme=scheme)
        self.until(f"document.documentElement.scrollWidth <= {width}")

    def text(self, selector: str) -> str:
        """What a reader reads there."""
        return " ".join(self.page.inner_text(selector).split())

    def ask(self, script: str) -> Any:
        """The value of a script."""
        return self.page.evaluate(script)


OpenTab = Callable[..., Tab]
"""Opens the page of a daemon or of a port, in a window of a size."""

Show = Callable[..., Tab]
"""Opens the page of a broker with this report, in a window of a width."""


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
    with served(loaded_report()) as serving:
        yield serving


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
