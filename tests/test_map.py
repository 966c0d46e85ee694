"""The map of docs/architecture.md lists each module of the product, and none that is gone."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
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
