"""`kvd serve` and `kvd status` as an operator meets them."""

import json
import os
import time
from pathlib import Path

import pytest

from tests.conftest import Daemon
from tests.daemon.serving import run_kvd
from tests.daemon.users import OTHER_UID, as_user, needs_root
from tests.waiting import PATIENCE


@pytest.mark.parametrize(
    "command",
    ["status", "engines", "namespaces", "config reload", "config show --running", "selftest"],
)
def test_a_command_for_programs_prints_its_error_as_json(tmp_path: Path, command: str) -> None:
    """With --json and no daemon: one object on stdout, the line for people, exit status 1."""
    done = run_kvd(*command.split(), "--runtime-dir", str(tmp_path), "--json")
    assert done.returncode == 1
    assert done.stderr == f"Error: {json.loads(done.stdout)['error']}\n"
    assert "no daemon answers" in done.stderr


@needs_root
@pytest.mark.parametrize(
    "command",
    [
        "status --wait 2m",
        "top --once",
        "engines",
        "drain",
        "resume",
        "clear --yes",
        "evict --older-than 1h",
        "config reload",
        "config show --running",
        "selftest",
        "purge",
    ],
)
def test_a_directory_that_may_not_be_entered_is_named_at_once(
    runtime_dir: Path, command: str
) -> None:
    """Every command says uid, directory, mode and remedy; none waits or advises `kvd serve`."""
    runtime_dir.parent.chmod(0o711)
    runtime_dir.mkdir(0o750)
    os.chown(runtime_dir, 0, OTHER_UID)
    elsewhere = str(runtime_dir.parent / "elsewhere")
    # The other user may not be able to import: what the command needs is there after this.
    run_kvd(*command.replace("2m", "0").split(), "--runtime-dir", elsewhere)
    begin = time.monotonic()
    with as_user(OTHER_UID + 1):
        done = run_kvd(*command.split(), "--runtime-dir", str(runtime_dir))
    assert time.monotonic() - begin < PATIENCE
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    denied = f"uid {OTHER_UID + 1} may not enter {runtime_dir} (mode 0750, group {OTHER_UID}): "
    assert f"{denied}usermod -aG {OTHER_UID} {OTHER_UID + 1}" in done.stderr
    assert "kvd serve" not in done.stderr


def test_sigterm_drains_and_leaves_nothing(daemon: Daemon) -> None:
    """SIGTERM ends the daemon with 0; sockets, lock and pool are gone."""
    said = daemon.wait_log("pool of 64 MiB at ")
    pool = Path(said.split("pool of 64 MiB at ")[1].split()[0])
    assert pool.exists()
    assert daemon.stop() == 0
    assert not pool.exists()
    assert list(daemon.runtime_dir.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cpu-bytes", "900TiB"], ["the machine's memory", "--cpu-bytes"]),
        (["--pool-dir", "/nonexistent"], ["/nonexistent: no such directory"]),
        (["--pool-dir", "/etc/passwd"], ["/etc/passwd: this is not a directory"]),
        (["--policy", "mru"], ["--policy: policy = 'mru': needs one of adaptive, lru"]),
    ],
)
def test_bad_settings_name_the_value(
    tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    """A setting that cannot work gives one line with key and value, and exit status 78.

    For a pool that does not fit it is 1: there may be more memory later.
    """
    done = run_kvd("serve", "--runtime-dir", str(tmp_path / "run"), *arguments)
    assert done.returncode == (1 if "--cpu-bytes" in arguments else os.EX_CONFIG)
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize("place", ["flag", "file"])
def test_errors_of_settings_follow_the_format_of_the_log(tmp_path: Path, place: str) -> None:
    """One line of JSON for each that is wrong, wherever log_format is set."""
    file = tmp_path / "kvd.toml"
    file.write_text('policy = "mru"\nreserve = "x"\n')
    arguments = ["serve", "--config", str(file), "--runtime-dir", str(tmp_path / "run")]
    if place == "flag":
        arguments += ["--log-format", "json"]
    else:
        file.write_text(f'{file.read_text()}log_format = "json"\n')
    done = run_kvd(*arguments)
    assert done.returncode == os.EX_CONFIG
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["event"].split(":")[1] for line in lines] == ["1", "2"]
    assert {line["level"] for line in lines} == {"error"}
