"""Where the files under test lie, and how a test says that a tool is missing."""

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
INSTALL = "tests/install-debian.sh installs it on Debian"


def tool(name: str) -> str:
    """The path of a program; the test is skipped where it is missing."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; {INSTALL}")
    return found
