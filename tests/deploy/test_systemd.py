"""The unit and what lies beside it."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import ClassVar

import click
import pytest

from kvd.cli import cli
from kvd.config.sources import Sources
from tests.deploy.places import DEPLOY, tool

SYSTEMD = DEPLOY / "systemd"
HIGHEST_EXPOSURE = 2.0


def parsed(name: str) -> ConfigParser:
    """A unit file; of keys given twice the last."""
    parser = ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((SYSTEMD / name).read_text())
    return parser


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A file system with systemd's own units and everything of ours installed."""
    own = Path("/lib/systemd/system")
    if not own.is_dir():
        pytest.skip("systemd's own units are not installed")
    root = tmp_path / "root"
    shutil.copytree(own, root / "usr/lib/systemd/system", symlinks=True)
    (root / "lib").symlink_to("usr/lib")
    units = root / "etc/systemd/system"
    (units / "kvd.service.d").mkdir(parents=True)
    for name in ("kvd.service", "run-hugepages-kvd.mount"):
        shutil.copy(SYSTEMD / name, units)
    for name in ("hugepages.conf", "wait-ready.conf"):
        shutil.copy(SYSTEMD / name, units / "kvd.service.d")
    kvd = root / "opt/kvd/bin/kvd"
    kvd.parent.mkdir(parents=True)
    kvd.write_text("#!/bin/sh\n")
    kvd.chmod(0o755)
    return root


def verify(root: Path) -> str:
    """What systemd-analyze has to say of our units."""
    units = ["kvd.service", "run-hugepages-kvd.mount"]
    done = subprocess.run(
        [tool("systemd-analyze"), "verify", "--man=no", f"--root={root}", *units],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.stdout + done.stderr


def test_systemd_has_nothing_to_say_of_the_units(machine: Path) -> None:
    """Unit, mount and drop-ins verify without a word."""
    assert verify(machine) == ""


def test_the_unit_exposes_little() -> None:
    """The figure of systemd-analyze security is low."""
    done = subprocess.run(
        [
            *(tool("systemd-analyze"), "security", "--no-pager", "--offline=yes"),
            *(f"--threshold={int(HIGHEST_EXPOSURE * 10)}", str(SYSTEMD / "kvd.service")),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr


def test_the_user_is_a_system_user_and_keeps_its_shared_memory() -> None:
    """Nothing of systemd's removes the pool's file between two starts."""
    service = parsed("kvd.service")["Service"]
    assert service["RemoveIPC"] == "no"
    assert service["RuntimeDirectoryPreserve"] == "yes"
    assert "DynamicUser" not in service
    entry = (SYSTEMD / "kvd.sysusers.conf").read_text().splitlines()[-1].split()
    assert entry[:3] == ["u", service["User"], "-"]


def test_directory_rights_agree() -> None:
    """systemd-tmpfiles and the unit make the same runtime directory."""
    service = parsed("kvd.service")["Service"]
    line = (SYSTEMD / "kvd.tmpfiles.conf").read_text().splitlines()[-1].split()
    expected = [f"/run/{service['RuntimeDirectory']}", service["RuntimeDirectoryMode"]]
    assert line[1:5] == [*expected, service["User"], service["Group"]]


def test_stopping_leaves_time_for_the_default_drain() -> None:
    """TimeoutStopSec is longer than drain_seconds of the shipped settings."""
    settings = Sources(config=DEPLOY / "kvd.toml", environment={}).load().settings
    timeout = float(parsed("kvd.service")["Service"]["TimeoutStopSec"])
    assert timeout >= settings.drain_seconds + 60


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("kvd.service", "ExecStart"),
        ("kvd.service", "ExecReload"),
        ("wait-ready.conf", "ExecStartPost"),
    ],
)
def test_the_commands_of_the_units_are_ones_that_kvd_takes(name: str, key: str) -> None:
    """Command and options exist."""
    _, *words = parsed(name)["Service"][key].split()
    found: click.Command | None = cli
    while isinstance(found, click.Group):
        found = found.get_command(click.Context(found), words.pop(0))
    assert found is not None
    known = {option for parameter in found.params for option in parameter.opts}
    assert {option for option in words if option.startswith("--")} <= known


def test_the_installer_installs_what_is_there() -> None:
    """Every file that install.sh names lies beside it, and the shell can read the script."""
    script = SYSTEMD / "install.sh"
    subprocess.run(["sh", "-n", str(script)], check=True, timeout=60)
    for name in re.findall(r"\$here/([a-z./]+)", script.read_text()):
        assert (SYSTEMD / name).is_file()


class Installing:
    """install.sh on a machine that it cannot change; user kvd is nobody here."""

    STUBS: ClassVar = {
        "install": 'echo "install $*" >>"$LOG"',
        "systemd-sysusers": 'echo "systemd-sysusers $*" >>"$LOG"',
        "systemd-tmpfiles": 'echo "systemd-tmpfiles $*" >>"$LOG"',
        "runuser": 'shift 3; exec setpriv --reuid 65534 --regid 65534 --clear-groups -- "$@"',
    }

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        stubs = folder / "stubs"
        stubs.mkdir()
        for name, script in self.STUBS.items():
            self.write(stubs / name, script)
        self._path = f"{stubs}:{os.environ['PATH']}"

    def write(self, file: Path, script: str) -> Path:
        """An executable for everybody who reaches it."""
        file.parent.mkdir(exist_ok=True)
        file.parent.chmod(0o755)  # whatever the umask is
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        return file

    def run(self, python: Path) -> str:
        """Install with this Python, which does not come to an end; what it says."""
        done = subprocess.run(
            ["sh", str(SYSTEMD / "install.sh"), "kvd-offload[daemon]"],
            env=os.environ | {"PATH": self._path, "LOG": str(self.log), "PYTHON": str(python)},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode
        return done.stderr


@pytest.fixture
def installing() -> Iterator[Installing]:
    """A folder that everybody may enter."""
    if os.geteuid() or Path("/opt/kvd").exists():
        pytest.skip("needs root, and no kvd in /opt")
    with tempfile.TemporaryDirectory(prefix="kvd-install-", dir="/tmp") as path:
        Path(path).chmod(0o755)
        yield Installing(Path(path))


def test_the_installer_refuses_a_python_that_the_service_cannot_run(
    installing: Installing,
) -> None:
    """One below a closed directory is named with the remedy, and no unit is installed."""
    python = installing.write(installing.folder / "closed" / "python3", 'echo "$*" >>"$LOG"')
    python.parent.chmod(0o700)
    said = installing.run(python)
    assert f"user kvd cannot run {python}" in said
    assert "PYTHON=/usr/bin/python3" in said
    assert "kvd.service" not in installing.log.read_text()
    assert "-m venv" not in installing.log.read_text()


def test_the_installer_takes_a_python_that_the_service_can_run(installing: Installing) -> None:
    """In an open directory it is asked for the environment."""
    installing.log.touch()
    installing.log.chmod(0o666)
    python = installing.write(installing.folder / "open" / "python3", 'echo "$*" >>"$LOG"')
    assert "user kvd cannot run" not in installing.run(python)
    assert "-m venv /opt/kvd\n" in installing.log.read_text()
