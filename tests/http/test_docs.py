"""docs/http.md and what a daemon exposes say the same."""

import re
from pathlib import Path

import pytest

from tests.daemon.engines import Engine, keys_of
from tests.daemon.serving import Daemon
from tests.http.scraping import Scrape, scrape
from tests.http.serving import over_unix

PAGE = Path(__file__).parents[2] / "docs" / "http.md"
ROW = re.compile(r"^\| `((?:kvd|process)_\w+)` \| (\w+) \| (.*?) \| (.*) \|$", re.MULTILINE)


@pytest.fixture(scope="module")
def exposed(web: Daemon) -> Scrape:
    """A scrape of a daemon with an engine that has stored."""
    with Engine(web.runtime_dir).wait_attached() as engine, over_unix(web) as client:
        engine.store(keys_of("docs", 4))
        return scrape(client)


def test_every_metric_is_in_the_table_and_nothing_else(exposed: Scrape) -> None:
    """Name, type and meaning are those of a scrape, in its order."""
    told = [(name, kind, text) for name, kind, _, text in ROW.findall(PAGE.read_text())]
    assert told == [
        (
            family.name + ("_total" if family.type == "counter" else ""),
            family.type,
            family.documentation,
        )
        for family in exposed.families
    ]


def test_labels_are_those_of_the_table(exposed: Scrape) -> None:
    """Every sample has the labels that the table gives its metric, and no others."""
    told = {
        name: set(re.findall(r"`(\w+)`", labels))
        for name, _, labels, _ in ROW.findall(PAGE.read_text())
    }
    for family in exposed.families:
        name = family.name + ("_total" if family.type == "counter" else "")
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == told[name]


def test_every_path_is_told(web: Daemon) -> None:
    """The table of paths names all that are served, apart from the page's files."""
    with over_unix(web) as client:
        sentence = client.get("/nothing").text
    paths = sentence.rstrip(".\n").partition("there is ")[2].split(", ")
    assert "/livez" in paths
    assert set(paths) <= set(re.findall(r"`(/\w*)`", PAGE.read_text()))
