"""Rules about the source that no running test can show, and tables of docs that name tests."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "security.md"
TESTING = ROOT / "docs" / "testing.md"
SHIPPED = sorted(
    file
    for folder in ("kvd", "client/kvd_client", "proto/kvd_proto")
    for file in (ROOT / folder).rglob("*.py")
)
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "yaml", "commands"}
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "subprocess.getoutput"}


def imported(node: ast.AST) -> Iterator[str]:
    """Top-level names of the modules that a statement imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield node.module.partition(".")[0]


def offences(source: str) -> list[str]:
    """What a source does that ours must not, each with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        found += [f"{node.lineno}: {m}" for m in MODULES.intersection(imported(node))]  # type: ignore[attr-defined]  # statements have lines
        if isinstance(node, ast.Call):
            if (name := ast.unparse(node.func)) in CALLS:
                found.append(f"{node.lineno}: {name}")
            found += [
                f"{node.lineno}: shell"
                for keyword in node.keywords
                if keyword.arg == "shell" and ast.unparse(keyword.value) != "False"
            ]
    return found


def test_no_pickle_no_eval_no_shell() -> None:
    """Bytes from outside never become objects or code, and no shell sees a word of them."""
    assert len(SHIPPED) > 100
    found = {str(file.relative_to(ROOT)): offences(file.read_text()) for file in SHIPPED}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_no_request_or_job_can_come_from_the_network() -> None:
    """Our sources name no ZeroMQ endpoint but ipc://."""
    schemes = {
        found
        for file in SHIPPED
        for found in re.findall(r"\b(tcp|udp|ipc|inproc|pgm|ws)://", file.read_text())
    }
    assert schemes == {"ipc"}


def test_the_linters_security_rules_are_on() -> None:
    """All of ruff's bandit rules hold for what is shipped, but for three that are argued."""
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert lint["select"] == ["ALL"]
    assert {rule for rule in lint["ignore"] if rule.startswith("S")} == {"S603", "S607", "S108"}


def test_every_test_of_what_hardware_may_do_exists() -> None:
    """The table of traps points at tests that are there, at least one a row."""
    page = TESTING.read_text().partition("### What would go wrong on hardware")[2]
    table = page.partition("### ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    for row in rows:
        assert "`tests/" in row.split("|")[2], row
        for file, name in re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row):
            assert f"def {name}(" in (ROOT / file).read_text(), f"{file} has no {name}"


def test_every_test_that_the_page_names_exists() -> None:
    """The table of threats points at tests that are there; a row has one, or says why not."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE.read_text())
    assert len(named) > 25
    for file, name in named:
        assert f"def {name}(" in (ROOT / file).read_text(), f"{file} has no {name}"
    threats = [row for row in rows if row.count("|") == 5 and "---" not in row]
    for row in threats[1:]:
        proof = row.split("|")[4]
        assert "`tests/" in proof or "not stopped" in proof, row
