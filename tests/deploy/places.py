"""Where the files under test lie, and how tools are run over them."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kvd.broker.supervision import UNPIN_SECONDS_PER_GIB
from kvd.config.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
INSTALL = "tests/install-debian.sh installs it on Debian"


def stop_seconds(pinned_gib: float) -> float:
    """What the deployments' comments promise: how long a daemon with the default drain may stop."""
    return Settings().drain_seconds + UNPIN_SECONDS_PER_GIB * pinned_gib + 20


def tool(name: str) -> str:
    """The path of a program; the test is skipped where it is missing."""
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed; {INSTALL}")
    return program


def run(
    *command: str | Path, where: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A command to its end, in a folder, with more variables."""
    return subprocess.run(
        command,
        cwd=where,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
