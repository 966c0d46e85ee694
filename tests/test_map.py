"""The map of docs/architecture.md and the tables of CONTRIBUTING.md name what there is."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def test_every_make_target_is_in_the_table_with_the_time_that_it_takes() -> None:
    """No target without a row, no row without a target, no row without a time or its lack."""
    targets = set(re.findall(r"^([a-z0-9.-]+):.*##", MAKEFILE, re.MULTILINE)) - {"help"}
    rows = re.findall(r"^\| (`make .+?) \| .+ \| (.+) \|$", PAGE, re.MULTILINE)
    listed = [name for commands, _ in rows for name in re.findall(r"`make ([a-z0-9.-]+)", commands)]
    assert sorted(listed) == sorted(targets)
    assert all(re.search(r"\d+ (s|min|h)\b|not timed", time) for _, time in rows)


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def named(requirements: list[str]) -> set[str]:
    """The packages of a list of requirements."""
    return {re.split(r"[\s\[<>=!~;]", text, maxsplit=1)[0] for text in requirements}


def test_the_table_names_what_a_daemon_and_an_engine_install() -> None:
    """No package of a daemon's or an engine's without a reason, no reason without a package."""
    rows = re.findall(r"^\| `([\w.-]+)` \| (\w+) \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)
    listed = {(name, extra) for name, extra, _, _ in rows}
    extras = PROJECT["optional-dependencies"]
    installed = {(name, "base") for name in named(PROJECT["dependencies"])}
    installed |= {
        (name, extra) for extra in ("daemon", "mooncake", "cuda") for name in named(extras[extra])
    }
    assert listed == installed
    assert len(rows) == len(listed)


PRODUCT = ("kvd", "client/kvd_client", "client/tools/kvd_tools", "proto/kvd_proto")


def test_each_module_stands_in_the_map() -> None:
    """Names are relative to the package of the heading, or whole paths if it names several."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    listed: list[str] = []
    for section in page.split("\n## Map\n")[1].split("\n## ")[0].split("\n### ")[1:]:
        package, *others = re.findall(r"`([^`]+)`", section.partition(":")[0])
        for row in re.findall(r"^- ((?:`[^`]+\.py`(?:, )?)+):", section, re.MULTILINE):
            listed += [name if others else f"{package}/{name}" for name in row[1:-1].split("`, `")]
    modules = [
        str(path.relative_to(ROOT))
        for package in PRODUCT
        for path in (ROOT / package).rglob("*.py")
        if not path.name.startswith("__")
    ]
    assert sorted(listed) == sorted(modules)
