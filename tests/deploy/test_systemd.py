"""The unit and what lies beside it."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

import click
import pytest

from kvd.cli import cli
from kvd.config.sources import Sources
from tests.deploy.places import DEPLOY, run, tool

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


def test_systemd_accepts_the_units(machine: Path) -> None:
    """Unit, mount and drop-ins verify without a word, and the unit exposes little."""
    units = ("kvd.service", "run-hugepages-kvd.mount")
    verify = (tool("systemd-analyze"), "verify", "--man=no", f"--root={machine}")
    done = run(*verify, *units)
    assert done.stdout + done.stderr == ""
    security = (tool("systemd-analyze"), "security", "--no-pager", "--offline=yes")
    done = run(*security, f"--threshold={int(HIGHEST_EXPOSURE * 10)}", SYSTEMD / "kvd.service")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr


def test_the_user_is_a_system_user_and_keeps_its_shared_memory() -> None:
    """Nothing of systemd's removes the pool's file between two starts."""
    service = parsed("kvd.service")["Service"]
    assert service["RemoveIPC"] == "no"
    assert service["RuntimeDirectoryPreserve"] == "yes"
    assert "DynamicUser" not in service
    entry = (SYSTEMD / "kvd.sysusers.conf").read_text().splitlines()[-1].split()
    assert entry[:3] == ["u", service["User"], "-"]


@pytest.mark.parametrize("old", ['pool_dir = "/mnt/old"', ""])
def test_the_pool_moves_to_huge_pages_whatever_the_settings_file_has(
    tmp_path: Path, old: str
) -> None:
    """The command of the README sets the mount's directory, also where a section ends the file."""
    (command,) = re.findall(r"^sed -i .*", (SYSTEMD / "README.md").read_text(), re.MULTILINE)
    file = tmp_path / "kvd.toml"
    file.write_text(f'# mine\n{old}\ncpu_bytes = "1GiB"\n[quota.llama]\nfloor = "8MiB"\n')
    for _ in range(2):
        done = run("sh", "-c", command.replace("/etc/kvd/kvd.toml", str(file)))
        assert done.returncode == 0, done.stderr
        settings = Sources(config=file, flags={}, environment={}).load().settings
        assert settings.pool_dir == parsed("run-hugepages-kvd.mount")["Mount"]["Where"]
        assert (settings.cpu_bytes, list(settings.quota)) == ("1GiB", ["llama"])


def test_the_unit_and_the_daemons_settings_agree() -> None:
    """A wrong setting is not tried again, a stop has time to drain, directories are the same."""
    service = parsed("kvd.service")["Service"]
    assert service["Restart"] == "on-failure"
    assert service["RestartPreventExitStatus"] == str(os.EX_CONFIG)
    settings = Sources(config=DEPLOY / "kvd.toml", environment={}).load().settings
    assert float(service["TimeoutStopSec"]) >= settings.drain_seconds + 60
    line = (SYSTEMD / "kvd.tmpfiles.conf").read_text().splitlines()[-1].split()
    expected = [f"/run/{service['RuntimeDirectory']}", service["RuntimeDirectoryMode"]]
    assert line[1:5] == [*expected, service["User"], service["Group"]]


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


STUBS = {
    "install": 'echo "install $*" >>"$LOG"',
    "systemd-sysusers": 'echo "systemd-sysusers $*" >>"$LOG"',
    "systemd-tmpfiles": 'echo "systemd-tmpfiles $*" >>"$LOG"',
    "runuser": 'shift 3; exec setpriv --reuid 65534 --regid 65534 --clear-groups -- "$@"',
}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may enter."""
    if os.geteuid() or Path("/opt/kvd").exists():
        pytest.skip("needs root, and no kvd in /opt")
    with tempfile.TemporaryDirectory(prefix="kvd-install-", dir="/tmp") as path:
        Path(path).chmod(0o755)
        yield Path(path)


def executable(file: Path, script: str) -> Path:
    """A shell script that every user may run, in a folder of its own."""
    file.parent.mkdir(exist_ok=True)
    file.parent.chmod(0o755)  # whatever the umask is
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return file


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_the_installer_refuses_a_python_that_the_service_cannot_run(
    folder: Path, mode: int
) -> None:
    """One below a closed directory is named with the remedy, and nothing is installed with it."""
    log = folder / "log"
    log.touch()
    log.chmod(0o666)
    for name, script in STUBS.items():
        executable(folder / "stubs" / name, script)
    python = executable(folder / "bin" / "python3", 'echo "$*" >>"$LOG"')  # makes no environment
    python.parent.chmod(mode)
    path = f"{folder / 'stubs'}:{os.environ['PATH']}"
    install = ("sh", SYSTEMD / "install.sh", ".[daemon]")
    done = run(*install, PATH=path, LOG=str(log), PYTHON=str(python))
    assert done.returncode
    refused = f"user kvd cannot run {python}" in done.stderr
    assert refused is (mode == 0o700)
    assert ("PYTHON=/usr/bin/python3" in done.stderr) is refused
    assert ("-m venv /opt/kvd\n" in log.read_text()) is not refused
    assert "kvd.service" not in log.read_text()
