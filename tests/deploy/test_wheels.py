"""The wheels of `make wheels`, and that instructions install nothing else."""

import re
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from kvd.version import VERSION
from tests.deploy.places import ROOT, run, tool


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What `make wheels` builds: the wheel of daemon and client, then that of the tools."""
    folder = tmp_path_factory.mktemp("dist")
    binaries = Path(sys.executable).parent
    command = (tool("make"), "--assume-old=.venv/.base", "wheels", f"DIST={folder}")
    done = run(*command, f"BIN={binaries}", where=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(folder.iterdir())


def test_a_wheel_holds_what_is_not_python(wheels: list[Path]) -> None:
    """Kernel, page and marker files that lie in the packages are in the wheels too."""
    held = {name for wheel in wheels for name in zipfile.ZipFile(wheel).namelist()}
    packages = ("kvd", "client/kvd_client", "client/tools/kvd_tools", "proto/kvd_proto")
    tracked = run("git", "-C", ROOT, "ls-files", *packages)
    assert tracked.returncode == 0, tracked.stderr
    files = [name for name in tracked.stdout.splitlines() if (ROOT / name).exists()]
    names = {re.sub("^(client/tools|client|proto)/", "", name) for name in files}
    assert {name for name in names if not name.endswith(".py")} >= {"kvd/report/page/app.js"}
    assert names <= held


def test_the_wheels_install_without_an_index_and_run(wheels: list[Path], tmp_path: Path) -> None:
    """In a new environment the command, a tool's command and the client are those of the wheels."""
    venv.create(tmp_path)
    python = tmp_path / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    done = run(*pip, "--no-index", "--no-deps", *wheels)
    assert done.returncode == 0, done.stderr
    # Their dependencies are those of this environment; the path of an editable install is not read.
    (site,) = tmp_path.glob("lib/python*/site-packages")
    (here,) = {path for path in sys.path if path.endswith("site-packages")}
    (site / "dependencies.pth").write_text(f"{here}\n")
    kvd = tmp_path / "bin" / "kvd"
    assert run(kvd, "--version", where=tmp_path).stdout.strip() == f"kvd, version {VERSION}"
    assert "--world-size" in run(kvd, "demo", "--help", where=tmp_path).stdout
    code = "import kvd, kvd_client, kvd_proto, kvd_tools, kvd_vllm_plugin as p; print(p.__file__)"
    assert run(python, "-c", code, where=tmp_path, PYTHONPATH="").stdout.startswith(str(site))


def test_no_instruction_installs_by_name() -> None:
    """Pages, scripts and errors name the checkout or a wheel: the name may be another's."""
    by_name = r"install[^|`]* '?kvd-offload"
    places = (":!tests", ":!CHANGELOG.md", ":!pyproject.toml")
    found = run("git", "-C", ROOT, "grep", "-nE", by_name, "--", ".", *places)
    assert found.stdout == ""
