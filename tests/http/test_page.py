"""The status page in a real browser, of a daemon under load and of brokers with made-up reports."""

import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest

from kvd.metrics.conditions import conditions
from kvd.metrics.reading import NOTHING, Span
from tests.daemon.engines import Engine, keys_of, make_layout
from tests.daemon.serving import Daemon, daemon_left_clean
from tests.http.conftest import (
    CONTACT,
    CONTRAST,
    NAMELESS,
    SHOWN_STATE,
    SPLIT,
    UNREACHED,
    OpenTab,
    Show,
)
from tests.http.serving import Asked, over_unix, report_of, served
from tests.report.reports import LONG_NAMES, changed, empty_report, loaded_report
from tests.waiting import eventually

pytestmark = pytest.mark.slow

EVIL = "<img src=x onerror=document.title='evil'>"
MODELS = ("llama-70b", EVIL)
DESKTOP = {"width": 1280, "height": 900}
POD = "vllm-llama-3-1-70b-instruct-prefill-7c9d8f6b5d-x2k4q"
ROUND = 12  # chunks stored and loaded at a time
BLOCKS = 2 * 2 * ROUND + 2  # a half to store from, a half to load into
PICTURE = os.environ.get("KVD_SCREENSHOT")  # where to keep a picture for the README
SECTIONS = [
    *("Now", "Pool", "Readiness", "Throughput", "Hit rate", "What would more memory bring"),
    *("Why a miss", "Lanes", "Tiers", "Jobs by stage", "Broker", "Engines", "Events"),
]
MOVES = "/[1-9].*B.s/.test(document.getElementById('rate-in').textContent)"
READY = "document.getElementById('state').textContent === 'Ready'"


@contextmanager
def engines_at_work(runtime_dir: Path, *models: str) -> Iterator[None]:
    """An engine for each model, storing and loading until the end."""
    stop = threading.Event()
    layout = make_layout(blocks=BLOCKS, page=65536)
    with ThreadPoolExecutor() as threads, ExitStack() as stack:
        engines = [
            stack.enter_context(Engine(runtime_dir, name=name, model=model, layout=layout))
            for name, model in zip((POD, "llama-0"), models, strict=True)
        ]
        stack.callback(stop.set)
        working = [threads.submit(work, engine.wait_attached(), stop) for engine in engines]
        yield
        stop.set()
        for worker in working:
            worker.result(60)


def work(engine: Engine, stop: threading.Event) -> None:
    """The same prompts again and again, of which one in twenty is replaced by a new one."""
    for number in count():
        if stop.wait(0.1):
            return
        keys = keys_of(f"prompt-{number % 10 + number // 20}", ROUND)
        engine.scheduler.lookup_many(keys)
        # The other model may take slots on loan back before they are written.
        engine.store(keys, first_block=1, must=False)
        _, wrong_chunks = engine.load(keys, first_block=BLOCKS // 2 + 1)
        assert wrong_chunks == 0


@pytest.fixture(scope="module")
def busy() -> Iterator[Daemon]:
    """A daemon with two engines of two models at work, one with a hostile name, and two tiers.

    One of the tiers cannot be used.
    """
    options = ["--http-listen", "127.0.0.1:0", "--tier", "memory:,size=256MiB,keep=all"]
    models = (MODELS[0], "gemma-3-27b") if PICTURE else MODELS
    if not PICTURE:
        options += ["--tier", f"disk:/{'n' * 80}/tier,size=64MiB"]
    with (
        daemon_left_clean(*options, cpu_bytes="256MiB") as daemon,
        engines_at_work(daemon.runtime_dir, *models),
    ):
        yield daemon


def test_everything_is_shown_and_can_be_read(tab: OpenTab, busy: Daemon) -> None:
    """At every width, light and dark: nothing is cut off or split, all has contrast and a name."""
    page = tab(busy, DESKTOP)
    page.until(MOVES)
    page.until(READY)
    page.until("document.querySelectorAll('#events-list li').length > 0")
    assert page.ask("[...document.querySelectorAll('h2')].map((h) => h.textContent)") == SECTIONS
    levels = page.ask("[...document.querySelectorAll('h1, h2, h3')].map((h) => +h.tagName[1])")
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    for width, scheme in ((360, "light"), (390, "dark"), (1280, "light"), (1280, "dark")):
        page.resize(width, scheme)
        assert page.ask(CONTRAST) == []
        assert page.ask(NAMELESS) == []
        seen, bad = page.ask(SPLIT)
        assert (bad, seen > 20) == ([], True)
    assert page.complaints == []


def test_figures_are_alive_and_names_are_text(tab: OpenTab, busy: Daemon) -> None:
    """Figures say what they are, charts can be read as tables, a name that is markup does nothing.

    With a tab for each node open, title and header say which is which.
    """
    page = tab(busy, DESKTOP)
    page.until(MOVES)
    assert re.search(r"[\d.]+ % ready [\d.]+ % free of 256 MiB", page.text("#pool"))
    page.until("/[1-9].*% of keys/.test(document.getElementById('engines-table').textContent)")
    assert "of keys looked up since" in page.text("#hits-total")
    assert page.text("#hit-tokens") == NOTHING
    names = json.dumps([*LONG_NAMES])  # the page shortens names as the commands do
    script = f"import('/static/words.js').then((words) => {names}.map(words.shorten))"
    assert page.ask(script) == [*LONG_NAMES.values()]
    assert "host" in page.text("#lanes-table")
    page.until("document.querySelector('#tiers-table tbody')?.textContent.includes('up')")
    page.until("document.getElementById('tiers-table').textContent.includes('nnn')")
    page.until("document.querySelectorAll('#pool-picture rect').length > 10")
    shown = page.text("#rate-in")
    page.until(f"document.getElementById('rate-in').textContent !== {json.dumps(shown)}")
    for name in ("throughput", "hits"):
        page.page.click(f"#{name}-details summary")
        page.until(f"document.querySelectorAll('#{name}-details tbody tr').length > 0")
    for table, name in (("pool", EVIL), ("engines", POD)):  # where one is cut it is a hover away
        heads = f"[...document.querySelectorAll('#{table}-table tbody th')]"
        assert name in page.ask(f"{heads}.map((head) => head.textContent)")
        assert any(name in title for title in page.ask(f"{heads}.map((head) => head.title)"))
    assert "evil" not in page.ask("document.title")
    assert page.ask("document.querySelectorAll('main img').length") == 0
    label = page.ask("document.getElementById('pool-picture').getAttribute('aria-label')")
    assert "llama-70b" in label
    assert socket.gethostname() in page.ask("document.title")
    assert f"on {socket.gethostname()}, {busy.runtime_dir}" in page.text("#where")
    assert page.complaints == []


def test_a_page_that_opens_has_history(tab: OpenTab, busy: Daemon) -> None:
    """Its charts and figures of the last minute begin before it was opened."""
    page = tab(busy, DESKTOP)
    with over_unix(busy) as client:
        eventually(
            lambda: client.get("/history").json()["samples"], lambda samples: len(samples) > 2
        )
        report = report_of(client)
    one = f"retry: 600000\nevent: report\ndata: {json.dumps(report)}\n\n"
    page.page.route(
        "**/events", lambda route: route.fulfill(content_type="text/event-stream", body=one)
    )
    page.page.reload()
    line = "document.querySelector('#throughput-chart path.line.out').getAttribute('d')"
    page.until(f"({line}?.match(/L/g) ?? []).length >= 1")  # one report alone is no line
    assert "stores in the last minute" in page.text("#share-store-text")


def test_the_keyboard_reaches_everything(tab: OpenTab, busy: Daemon) -> None:
    """Tab goes to every control, each shows that it has the focus, Enter works."""
    page = tab(busy, DESKTOP)
    left = page.ask(UNREACHED)
    for _ in range(3 * len(left)):  # some come and go meanwhile
        page.page.keyboard.press("Tab")
        who, outline = page.ask(
            "(() => { const n = document.activeElement, s = getComputedStyle(n);"
            " n.dataset.reached = '';"
            " return [n.outerHTML.slice(0, 60), s.outlineStyle + s.boxShadow]; })()"
        )
        assert outline != "nonenone" or who.startswith("<body"), who
        left = page.ask(UNREACHED)
        if not left:
            break
    assert left == []
    page.page.focus("#pause")
    page.page.keyboard.press("Enter")
    assert page.text("#pause") == "Resume"
    assert page.text("#link") == "paused"


def test_a_picture_for_the_readme(tab: OpenTab, busy: Daemon, tmp_path: Path) -> None:
    """The page draws itself under load; KVD_SCREENSHOT says where the picture is kept."""
    page = tab(busy, {"width": 1280, "height": 1000})
    page.until(
        "document.querySelectorAll('#throughput-chart path, #throughput-chart polyline').length"
    )
    if PICTURE:  # a chart wants some history
        page.page.wait_for_timeout(60_000)
    page.page.screenshot(path=PICTURE or tmp_path / "page.png")


def judged(report: dict[str, Any]) -> dict[str, Any]:
    """The report with what is wrong in it, as the broker would find it."""
    return report | {"conditions": [asdict(condition) for condition in conditions(Span(report))]}


def test_what_is_wrong_comes_first_with_the_remedy(show: Show, broker: tuple[Asked, int]) -> None:
    """A drain and a tier that is set aside: on top, as long as they last; so does having no engine.

    Of KV events the page says how many, how late and after which gaps, where there are any.
    """
    page = show(empty_report(60.0))
    page.until("/no engine is attached/.test(document.getElementById('now').textContent)")
    height = "document.getElementById('engines').getBoundingClientRect().height"
    title = "document.getElementById('engines-title').getBoundingClientRect().height"
    assert page.ask(height) < 5 * page.ask(title)
    assert "KV events" not in page.text("#broker-figures")

    page = show(loaded_report(60.0))
    page.until("/Nothing is wrong|All is well/.test(document.getElementById('now').textContent)")
    asked, _ = broker
    known = {name: asked.status[name] for name in ("pid", "boot_id")}
    report = changed(loaded_report(61.0), "draining", to=True)
    report["tiers"][0] |= {"set_aside_seconds": 75.0, "breaker": "open", "state_seconds": 75.0}
    asked.status = judged(report) | known
    for words in ("kvd resume", "set aside"):
        page.until(f"document.getElementById('problems').textContent.includes('{words}')")
    page.until(r"/at most 12\sms late/.test(document.getElementById('broker-figures').textContent)")
    assert "4 snapshots, 0 overruns" in page.text("#broker-figures")
    assert re.search(r"set aside for \d+", page.text("#tiers-table tbody"))
    assert not page.text("#verdict").startswith("All is well")
    asked.status = judged(loaded_report(62.0)) | known
    page.until("!/kvd resume|set aside/.test(document.getElementById('problems').textContent)")


def many(report: dict[str, Any], number: int) -> dict[str, Any]:
    """The report with so many engines, each with a model of its own, and so many lanes and tiers.

    The last engine waits for a rank.
    """
    namespace, lane, tier = (report[kind][0] for kind in ("namespaces", "lanes", "tiers"))
    engine = report["engines"][-1]  # of one rank
    numbers = [f"{index:02}" for index in range(number)]
    report = report | {
        "namespaces": [namespace | {"id": n * 16, "model": f"{WIDE}{n}"} for n in numbers],
        "engines": [engine | {"name": f"{POD}-{n}", "namespace": n * 16} for n in numbers],
        "lanes": [lane | {"device": f"cuda:{n * 16}"} for n in numbers],
        "tiers": [tier | {"name": f"disk-{n}"} for n in numbers],
    }
    report["engines"][-1] |= {"attached": False, "missing_ranks": [0]}
    check = report["checks"][1]
    report["checks"] = [check | {"name": f"lane {lane['device']}"} for lane in report["lanes"]]
    return report


WIDE = "a-model-of-more-letters-than-27-"
LISTS = ("pool-table", "engines-table", "lanes-table", "tiers-table", "checks")
# Of each name: whether its beginning is cut, its end is, and all is within the card.
CUT = """[...document.querySelectorAll('#engines-table tbody th .name')].map((name) => {
  const [head, tail] = name.children;
  const [own, card] = [name, name.closest("section")].map((box) => box.getBoundingClientRect());
  return [head.scrollWidth > head.clientWidth, tail.scrollWidth > tail.clientWidth,
    own.right <= card.right];
})"""


def test_long_lists_show_eight_with_what_is_wrong_among_them(show: Show) -> None:
    """The page grows no more with the ninth; a button shows all. A name is cut for want of room."""
    height = "document.documentElement.scrollHeight"
    for width, cut in ((1280, False), (390, True)):
        few = show(many(loaded_report(60.0), 8), width).ask(height)
        page = show(many(loaded_report(60.0), 24), width)
        page.resize(width)
        assert page.ask(height) < 1.1 * few
        assert page.ask(CUT) == [[cut, False, True]] * 8
        for place in LISTS:
            shown = f"document.querySelectorAll('#{place} tbody tr, #{place} > li').length"
            assert page.ask(shown) == 8
            button = f"#{place} + button"
            assert page.text(button) == "Show all 24"
            if place == "engines-table":
                assert f"{POD}-23" in page.ask(f"document.getElementById('{place}').textContent")
            page.page.click(button)
            assert page.ask(shown) == 24
            assert page.text(button) == "Show fewer"
        page.resize(width)
        assert page.complaints == []


def test_a_silent_broker_and_a_restart_are_told_and_survived(tab: OpenTab) -> None:
    """Silence and a daemon that is gone: what is shown is old, grey and says since when."""
    unknown = ["Unknown", "quiet", "quiet"]
    with served(loaded_report(60.0)) as (asked, port):
        page = tab(port, DESKTOP)
        page.until(READY)
        asked.answers.clear()
        page.until(CONTACT.format("does not answer"))
        for _ in range(3):  # pause and resume change nothing of it
            assert page.ask(SHOWN_STATE) == unknown
            assert re.search(r"unknown since \d\d:\d\d:\d\d, for \d+ s", page.text("#verdict"))
            page.page.click("#pause")
        late = tab(port, DESKTOP)  # it shows the last report, as old, and what was before it
        assert late.ask(SHOWN_STATE) == unknown
        assert re.search(r"What is below is of \d\d:\d\d:\d\d\.", late.text("#verdict"))
        assert re.search(r"What is shown is from .*, .* ago", late.text("#contact-text"))
        assert "llama" in late.text("#engines-table")
        assert "process" in late.text("#identity")
        assert late.text("#uptime") == ""
        assert late.complaints == []
        asked.answers.set()
        page.until("!document.getElementById('contact').checkVisibility()")
        assert page.text("#pause") == "Resume"
        assert page.ask(SHOWN_STATE)[0] == "Ready"
        page.page.click("#pause")
    page.until(CONTACT.format("no contact with the daemon"))
    assert "What is shown is from" in page.text("#contact-text")
    assert page.ask(SHOWN_STATE) == unknown
    with served(loaded_report(61.0) | {"boot_id": "1f" * 16, "pid": 4243}, port):
        page.until("document.getElementById('restart').checkVisibility()")
        assert "was restarted" in page.text("#restart-text")
        assert "process 4243" in page.text("#identity")
        page.page.click("#restart-seen")
        page.until("!document.getElementById('restart').checkVisibility()")
        page.until("!document.getElementById('contact').checkVisibility()")
    assert page.complaints == []
