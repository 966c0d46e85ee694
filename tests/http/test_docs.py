"""docs/http.md and what a daemon exposes say the same."""

import re
from pathlib import Path

import pytest

from docs import generate_status
from kvd.metrics.schema import ROWS
from tests.daemon.engines import Engine, keys_of
from tests.daemon.serving import Daemon
from tests.http.scraping import Scrape, scrape
from tests.http.serving import over_unix

PAGE = Path(__file__).parents[2] / "docs" / "http.md"
ROW = re.compile(r"^\| `(kvd_\w+)` \| \w+ \| (.*?) \| .* \|$", re.MULTILINE)


@pytest.fixture(scope="module")
def exposed(web: Daemon) -> Scrape:
    """A scrape of a daemon with an engine that has stored."""
    with Engine(web.runtime_dir).wait_attached() as engine, over_unix(web) as client:
        engine.store(keys_of("docs", 4))
        return scrape(client)


def test_what_a_scrape_has_is_declared(exposed: Scrape) -> None:
    """Every family of a scrape, with its labels, is a row of the docs, and every row is there."""
    told = {
        name: set(re.findall(r"`(\w+)`", labels)) for name, labels in ROW.findall(PAGE.read_text())
    }
    told |= {row.metric: set(row.names) for row in ROWS if row.metric}
    found = {}
    for family in exposed.families:
        name = family.name + ("_total" if family.type == "counter" else "")
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == told[name]
        found[name] = family
    assert found.keys() == told.keys()


def test_the_page_of_the_report_is_up_to_date() -> None:
    """docs/status.md is what its generator writes."""
    page = generate_status.PAGE.read_text(encoding="utf-8")
    assert generate_status.page(page) == page, "run make docs"


def test_every_path_is_told(web: Daemon) -> None:
    """The table of paths names all that are served, apart from the page's files."""
    with over_unix(web) as client:
        sentence = client.get("/nothing").text
    paths = sentence.rstrip(".\n").partition("there is ")[2].split(", ")
    assert "/livez" in paths
    assert set(paths) <= set(re.findall(r"`(/\w*)`", PAGE.read_text()))
