"""The status page in a real browser, with a real daemon under load."""

import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count, pairwise
from pathlib import Path

import psutil
import pytest

from kvd.metrics.reading import NOTHING, shorten
from kvd_proto.messages import KvEvents, Ping
from tests.daemon.engines import Engine, keys_of, make_layout
from tests.daemon.serving import Daemon, StartDaemon, daemon_left_clean, run_kvd
from tests.http.browser import (
    BROKEN_HEADS,
    CONTACT,
    CONTRAST,
    NAMELESS,
    SHOWN_STATE,
    SPLIT,
    TALL,
    UNREACHED,
    OpenTab,
)
from tests.http.serving import over_unix, port_of, report_of
from tests.processes import frozen, has_ended
from tests.raw_client import RawClient
from tests.report.reports import HUB, LONG_NAMES, REVISION
from tests.waiting import eventually

pytestmark = pytest.mark.slow

EVIL = "<img src=x onerror=document.title='evil'>"
MODELS = ("llama-70b", EVIL)
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 900}
PODS = 24
ROUND = 12  # chunks stored and loaded at a time
BLOCKS = 2 * 2 * ROUND + 2  # a half to store from, a half to load into
PICTURE = os.environ.get("KVD_SCREENSHOT")  # where to keep a picture for the README
SECTIONS = [
    "Now",
    "Pool",
    "Readiness",
    "Throughput",
    "Hit rate",
    "What would more memory bring",
    "Why a miss",
    "Lanes",
    "Tiers",
    "Jobs by stage",
    "Broker",
    "Engines",
    "Events",
]


@contextmanager
def engines_at_work(runtime_dir: Path, *names: str) -> Iterator[None]:
    """An engine for each name, of a model of that name, storing and loading until the end."""
    stop = threading.Event()
    layout = make_layout(blocks=BLOCKS, page=65536)
    with ThreadPoolExecutor() as threads, ExitStack() as stack:
        engines = [
            stack.enter_context(Engine(runtime_dir, name=f"{name}-0", model=name, layout=layout))
            for name in names
        ]
        stack.callback(stop.set)
        working = [threads.submit(work, engine.wait_attached(), stop) for engine in engines]
        yield
        stop.set()
        for each in working:
            each.result(60)


def work(engine: Engine, stop: threading.Event) -> None:
    """The same prompts again and again, of which one in twenty is replaced by a new one."""
    for number in count():
        if stop.wait(0.1):
            return
        keys = keys_of(f"prompt-{number % 10 + number // 20}", ROUND)
        engine.scheduler.lookup_many(keys)
        # The other model may take slots on loan back before they are written.
        engine.store(keys, first_block=1, must=False)
        _, wrong = engine.load(keys, first_block=BLOCKS // 2 + 1)
        assert wrong == 0


@pytest.fixture(scope="module")
def busy() -> Iterator[Daemon]:
    """A daemon with a tier and two engines of two models at work, one with a hostile name."""
    options = ("--http-listen", "127.0.0.1:0", "--tier", "memory:,size=256MiB,keep=all")
    models = (MODELS[0], "gemma-3-27b") if PICTURE else MODELS
    with (
        daemon_left_clean(*options, cpu_bytes="256MiB") as daemon,
        engines_at_work(daemon.runtime_dir, *models),
    ):
        yield daemon


@pytest.fixture(scope="module")
def crowd() -> Iterator[Daemon]:
    """24 engines that are named as pods, models as snapshots, and a tier with a long error."""
    sizes = ("8B", "70B", "405B")
    models = [f"{HUB}meta-llama--Llama-3.1-{size}-Instruct/snapshots/{REVISION}" for size in sizes]
    absent = f"disk:/{'n' * 80}/tier,size=64MiB"
    options = ("--http-listen", "127.0.0.1:0", "--tier", absent)
    with (
        daemon_left_clean(*options, cpu_bytes="256MiB") as daemon,
        ExitStack() as stack,
    ):
        engines = [
            stack.enter_context(
                Engine(
                    daemon.runtime_dir,
                    name=pod(i),
                    model=models[i % 3],
                    world_size=1 if i else 8,
                )
            )
            for i in range(PODS)
        ]
        for engine in engines:
            engine.wait_attached()
        yield daemon


def pod(number: int) -> str:
    """The name of a pod, as a Deployment gives it."""
    return f"vllm-llama-3-1-70b-instruct-prefill-7c9d8f6b5d-{number:05x}"


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_everything_is_there_and_moves(tab: OpenTab, busy: Daemon, size: dict[str, int]) -> None:
    """Every section is shown at both widths, nothing is cut off, figures are alive."""
    page = tab(busy, size)
    page.until("/[1-9].*B.s/.test(document.getElementById('rate-in').textContent)")
    titles = page.ask("[...document.querySelectorAll('h2')].map((h) => h.textContent)")
    assert titles == SECTIONS
    assert page.ask("document.documentElement.scrollWidth") <= size["width"]
    page.until("document.getElementById('state').textContent === 'Ready'")
    assert "llama-70b-0" in page.text("#engines-table")
    assert "host" in page.text("#lanes-table")
    page.until("document.querySelector('#tiers-table tbody')?.textContent.includes('up')")
    page.until("document.querySelectorAll('#pool-picture rect').length > 10")
    shown = page.text("#rate-in")
    page.until(f"document.getElementById('rate-in').textContent !== {json.dumps(shown)}")
    assert page.complaints == []


def test_figures_are_named_for_what_they_are(tab: OpenTab, busy: Daemon) -> None:
    """Of the pool what is ready and free; keys found where engines count no tokens."""
    page = tab(busy, DESKTOP)
    use = r"[\d.]+ % ready [\d.]+ % free of 256 MiB"
    assert re.search(use, page.text("#pool"))
    page.until("/[1-9].*% of keys/.test(document.getElementById('engines-table').textContent)")
    assert "of keys looked up since" in page.text("#hits-total")
    assert page.text("#hit-tokens") == NOTHING


def test_pictures_have_tables_in_which_names_are_text(tab: OpenTab, busy: Daemon) -> None:
    """Charts and pool can be read as tables and in words; a name that is markup does nothing."""
    page = tab(busy, DESKTOP)
    page.until("document.querySelectorAll('#pool-table tbody tr').length >= 2")
    for name in ("throughput", "hits"):
        page.page.click(f"#{name}-details summary")
        page.until(f"document.querySelectorAll('#{name}-details tbody tr').length > 0")
    assert shorten(EVIL) in page.text("#pool-table")
    titles = page.ask("[...document.querySelectorAll('#pool-table th')].map((c) => c.title)")
    assert any(EVIL in title for title in titles)
    assert "evil" not in page.ask("document.title")
    assert page.ask("document.querySelectorAll('main img').length") == 0
    label = page.ask("document.getElementById('pool-picture').getAttribute('aria-label')")
    assert "llama-70b" in label
    assert page.complaints == []


@pytest.mark.parametrize("width", [390, 1100, 1280, 1440])
def test_real_names_take_a_line_or_two(tab: OpenTab, crowd: Daemon, width: int) -> None:
    """With 24 pods and models' paths nothing scrolls sideways; whole names are a hover away."""
    page = tab(crowd, {"width": width, "height": 900})
    rows = "document.querySelectorAll('#engines-table tbody tr').length"
    page.until(f"{rows} === {PODS} && document.querySelector('#pool-table tbody tr')")
    page.until("document.getElementById('tiers-table').textContent.includes('nnn')")
    assert page.ask("document.documentElement.scrollWidth") <= width
    assert page.ask(TALL) == []
    assert width < 500 or page.ask(BROKEN_HEADS) == []
    named = page.ask(
        "[...document.querySelectorAll('#engines-table th[scope=row]')]"
        ".map((cell) => [cell.textContent, cell.title])"
    )
    assert sorted(whole for _, whole in named) == sorted(map(pod, range(PODS)))
    assert len({short for short, _ in named}) == PODS
    titles = page.ask("[...document.querySelectorAll('#pool-table th')].map((c) => c.title)")
    assert sum(f"{HUB}meta-llama--Llama-3.1-70B" in title for title in titles) == 1
    assert page.complaints == []


def test_the_page_shortens_names_as_the_commands_do(tab: OpenTab, web: Daemon) -> None:
    """`shorten` of the page and of `kvd.metrics.reading` agree."""
    page = tab(web, DESKTOP)
    names = json.dumps([*LONG_NAMES])
    script = f"import('/static/words.js').then((words) => {names}.map(words.shorten))"
    assert page.ask(script) == [*LONG_NAMES.values()]


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


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_it_can_be_read(tab: OpenTab, busy: Daemon, size: dict[str, int], scheme: str) -> None:
    """Text has a contrast of 4.5 or more in both colour schemes; everything has a name."""
    page = tab(busy, size, color_scheme=scheme)
    page.until("document.querySelectorAll('#events-list li').length > 0")
    assert page.ask(CONTRAST) == []
    assert page.ask(NAMELESS) == []
    levels = page.ask("[...document.querySelectorAll('h1, h2, h3')].map((h) => +h.tagName[1])")
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


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


def test_no_figure_is_split_from_its_unit(tab: OpenTab, busy: Daemon) -> None:
    """On a narrow phone every figure stands on one line with its unit."""
    page = tab(busy, {"width": 360, "height": 700})
    page.until("/[1-9].*B.s/.test(document.getElementById('rate-in').textContent)")
    seen, bad = page.ask(SPLIT)
    assert bad == []
    assert seen > 20
    assert page.ask("document.documentElement.scrollWidth") <= 360


def test_the_page_names_its_host(tab: OpenTab, busy: Daemon) -> None:
    """With a tab for each node open, title and header say which is which."""
    page = tab(busy, DESKTOP)
    host = socket.gethostname()
    page.until(f"document.title.includes({json.dumps(host)})")
    assert f"on {host}, {busy.runtime_dir}" in page.text("#where")


def test_a_restart_is_told_and_survived(tab: OpenTab, start_daemon: StartDaemon) -> None:
    """The daemon is killed and started again on its port: the page says both, and goes on."""
    first = start_daemon("--http-listen", "127.0.0.1:0")
    port = port_of(first)
    page = tab(first, DESKTOP)
    children = psutil.Process(first.process.pid).children()
    first.stop(signal.SIGKILL)
    eventually(lambda: all(map(has_ended, children)))  # one of them has the port, too
    page.until(CONTACT.format("no contact with the daemon"))
    assert "What is shown is from" in page.text("#contact-text")
    assert page.ask(SHOWN_STATE) == ["Unknown", "quiet", "quiet"]
    second = start_daemon("--http-listen", f"127.0.0.1:{port}")
    page.until("document.getElementById('restart').checkVisibility()")
    assert "was restarted" in page.text("#restart-text")
    assert f"process {second.process.pid}" in page.text("#identity")
    page.page.click("#restart-seen")
    page.until("!document.getElementById('restart').checkVisibility()")
    page.until("!document.getElementById('contact').checkVisibility()")
    assert page.complaints == []


def test_a_daemon_without_engines_is_not_called_well(tab: OpenTab, web: Daemon) -> None:
    """It says that none is attached; the empty card is small, and charts begin with the daemon."""
    page = tab(web, DESKTOP)
    page.until("/no engine is attached|held up/.test(document.getElementById('now').textContent)")
    page.until("document.querySelectorAll('#events-list li').length > 1")
    height = "document.getElementById('engines').getBoundingClientRect().height"
    title = "document.getElementById('engines-title').getBoundingClientRect().height"
    assert page.ask(height) < 5 * page.ask(title)
    assert re.match(r"start, \d+ (s|min)", page.text("#throughput-chart + .scale .left"))


def test_a_wedged_broker_is_told(tab: OpenTab, web: Daemon) -> None:
    """A broker that stands still: the state is unknown, grey, since when; then it is back."""
    page = tab(web, DESKTOP)
    page.until("document.getElementById('state').textContent === 'Ready'")
    with frozen(web.process.pid):
        page.until(CONTACT.format("does not answer"))
        for _ in range(3):  # pause and resume change nothing of it
            assert page.ask(SHOWN_STATE) == ["Unknown", "quiet", "quiet"]
            assert re.search(r"unknown since \d\d:\d\d:\d\d, for \d+ s", page.text("#verdict"))
            page.page.click("#pause")
    page.until("!document.getElementById('contact').checkVisibility()")
    assert page.text("#pause") == "Resume"
    assert page.ask(SHOWN_STATE)[0] == "Ready"
    assert "unknown" not in page.text("#verdict")


def test_what_is_wrong_comes_first_with_the_remedy(tab: OpenTab, start_daemon: StartDaemon) -> None:
    """A daemon that drains says so on top, with the command that ends it."""
    daemon = start_daemon("--http-listen", "127.0.0.1:0")
    page = tab(daemon, PHONE)
    page.until("/Nothing is wrong|held up/.test(document.getElementById('now').textContent)")
    remedy = "document.getElementById('problems').textContent.includes('kvd resume')"
    assert not page.ask(remedy)
    where = ("--runtime-dir", str(daemon.runtime_dir))
    assert run_kvd("drain", *where).returncode == 0
    page.until(remedy)
    assert not page.text("#verdict").startswith("All is well")
    assert run_kvd("resume", *where).returncode == 0
    page.until(f"!{remedy}")


def test_a_tier_that_is_set_aside_is_told(
    tab: OpenTab, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """The tier's row and the list of what is wrong say so as long as it hangs, and no longer."""
    hang = tmp_path / "hang"
    tier = f"memory:,size=64MiB,keep=all,late=0.5,hang={hang}"
    daemon = start_daemon("--http-listen", "127.0.0.1:0", "--tier", tier)
    page = tab(daemon, DESKTOP)
    row = "document.querySelector('#tiers-table tbody').textContent"
    problem = "document.getElementById('problems').textContent.includes('set aside')"
    page.until(f"/up for \\d+\\ss/.test({row}) && !{problem}")
    with Engine(daemon.runtime_dir).wait_attached() as engine:
        turn = count()

        def kept() -> int:
            # Always more: what a process had to put goes with it, where it is replaced.
            engine.store(keys_of(f"turn-{next(turn)}", 1))
            puts: int = daemon.status()["tiers"][0]["counters"]["puts"]["ok"]
            return puts

        eventually(kept)
        hang.touch()  # from now on puts hang
        aside = f"/set aside for \\d+\\ss/.test({row}) && {problem}"
        eventually(lambda: (kept(), page.ask(aside)), lambda seen: seen[1])
        hang.unlink()
        page.until(f"/up/.test({row}) && !{problem}")


def test_what_routers_are_told_is_shown(tab: OpenTab, web: Daemon) -> None:
    """Of KV events the page says how many, how late and after which gaps, where there are any."""
    page = tab(web, DESKTOP)
    figures = "document.getElementById('broker-figures').textContent"
    page.until(f"/Leases/.test({figures})")
    assert "KV events" not in page.text("#broker-figures")
    client = RawClient(web.runtime_dir)
    try:
        client.hello(engine="publishing")
        ping = Ping(kv_events=KvEvents(published=7, snapshots=2, overruns=1, lag_us=30_000))

        def told() -> bool:
            client.ask(ping)  # a lag is shown for some seconds
            return bool(page.ask(f"/at most 30\\sms late/.test({figures})"))

        eventually(told)
        assert "2 snapshots, 1 overrun" in page.text("#broker-figures")
    finally:
        client.close()


def test_a_picture_for_the_readme(tab: OpenTab, busy: Daemon, tmp_path: Path) -> None:
    """The page draws itself under load; KVD_SCREENSHOT says where the picture is kept."""
    page = tab(busy, {"width": 1280, "height": 1000})
    page.until(
        "document.querySelectorAll('#throughput-chart path, #throughput-chart polyline').length"
    )
    target = Path(PICTURE or tmp_path / "page.png")
    if PICTURE:  # a chart wants some history
        page.page.wait_for_timeout(60_000)
    page.page.screenshot(path=target)
    assert target.read_bytes()[:4] == b"\x89PNG"
