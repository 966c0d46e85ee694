"""The examples of the documents: the guide's engine runs as it is printed, all are typed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import StartDaemon
from tests.processes import python
from tests.waiting import DEADLINE

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "writing-a-client.md"
# A daemon that stands still for longer than the usual deadline is a miss, and prints another text.
PATIENTLY = f"""
from kvd_client import Scheduler, Worker
for kind in (Scheduler, Worker):
    kind.__init__.__kwdefaults__["deadline"] = {DEADLINE}
"""


def block(kind: str) -> str:
    """The first code block of this kind in the guide."""
    found = re.search(rf"```{kind}\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return found[1]


def test_example_engine_runs(start_daemon: StartDaemon) -> None:
    """The example is served from the cache the second time, and prints what the guide says."""
    daemon = start_daemon()
    done = python("-W", "error", "-c", PATIENTLY + block("python"), daemon.runtime_dir)
    assert (done.stderr, done.stdout) == ("", block("text"))


@pytest.mark.timeout(300)  # without its cache mypy reads numpy for a minute
def test_examples_pass_a_strict_type_checker(tmp_path: Path) -> None:
    """Every Python example in README and docs is right as it stands, by mypy --strict."""
    examples = [
        found[1]
        for document in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
        for found in re.finditer(r"```python\n(.*?)```", document.read_text("utf-8"), re.DOTALL)
    ]
    assert len(examples) > 2
    files = [tmp_path / f"example_{number}.py" for number in range(len(examples))]
    for file, example in zip(files, examples, strict=True):
        file.write_text(example, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", ""]
    command += ["--cache-dir", str(ROOT / ".mypy_cache")]
    done = subprocess.run(
        [*command, *map(str, files)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
