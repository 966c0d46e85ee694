"""CONTRIBUTING.md and pyproject.toml name the same packages."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def named(requirements: list[str]) -> set[str]:
    """The packages of a list of requirements."""
    return {re.split(r"[\s\[<>=!~;]", text, maxsplit=1)[0] for text in requirements}


def test_the_table_names_what_a_daemon_and_an_engine_install() -> None:
    """No package of a daemon's or an engine's without a reason, no reason without a package."""
    rows = re.findall(r"^\| `([\w.-]+)` \| (\w+) \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)
    told = {(name, extra) for name, extra, _, _ in rows}
    extras = PROJECT["optional-dependencies"]
    wanted = {(name, "base") for name in named(PROJECT["dependencies"])}
    wanted |= {
        (name, extra) for extra in ("daemon", "mooncake", "cuda") for name in named(extras[extra])
    }
    assert told == wanted
    assert len(rows) == len(told)
