"""The engine of docs/writing-a-client.md runs as it is printed, against a real daemon."""

import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import StartDaemon

GUIDE = Path(__file__).parents[2] / "docs" / "writing-a-client.md"


def block(kind: str) -> str:
    """The first code block of this kind in the guide."""
    found = re.search(rf"```{kind}\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return found[1]


def test_example_engine_runs(start_daemon: StartDaemon) -> None:
    """The example is served from the cache the second time, and prints what the guide says."""
    daemon = start_daemon()
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block("python"), str(daemon.runtime_dir)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stderr, done.stdout) == ("", block("text"))
