"""`kvd config` and the settings of commands, as an operator types them."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvd.cli import cli
from kvd.config.settings import SETTINGS


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A good file."""
    path = tmp_path / "kvd.toml"
    path.write_text('cpu_bytes = "64GiB"\npolicy = "lru"\n')
    return path


def kvd(*arguments: str, **environment: str) -> Result:
    """Run the command line here, with the default file out of the way."""
    return CliRunner().invoke(cli, arguments, env={"KVD_CONFIG": "/dev/null", **environment})


def test_show_names_the_place_of_each_value(file: Path) -> None:
    """The table has a line for every setting: its value, and file, variable, flag or default."""
    done = kvd("config", "show", "--config", str(file), "--max-sessions", "7", KVD_RESERVE="1GiB")
    assert done.exit_code == 0
    rows = [line.split() for line in done.output.splitlines()]
    assert ["cpu_bytes", "64GiB", f"{file}:1"] in rows
    assert ["reserve", "1GiB", "KVD_RESERVE"] in rows
    assert ["max_sessions", "7", "--max-sessions"] in rows
    assert ["reuse_threshold", "1", "default"] in rows
    assert {row[0] for row in rows} >= set(SETTINGS)


def test_check_accepts_a_good_file_and_looks_at_nothing_else(file: Path) -> None:
    """Exit status 0 for a good file, even where the environment is wrong."""
    done = kvd("config", "check", str(file), KVD_POLICY="mru")
    assert done.exit_code == 0
    assert done.output == f"{file}: ok, 2 settings\n"


def test_check_says_all_that_is_wrong(file: Path) -> None:
    """Exit status 1 and every mistake, or that the file is not there."""
    file.write_text('cpu_bytes = "64 gigs"\npolicies = "lru"\n')
    done = kvd("config", "check", str(file))
    assert done.exit_code == 1
    assert "64 gigs" in done.output
    assert "did you mean policy?" in done.output
    file.unlink()
    done = kvd("config", "check", str(file))
    assert done.exit_code == 1
    assert f"{file}: cannot be read" in done.output


def test_check_asks_the_backends_of_tiers(file: Path) -> None:
    """A tier of an unknown name is refused with the place and the names that there are."""
    file.write_text('policy = "lru"\ntier = ["disc:/var/lib/kvd,size=1GiB"]\n')
    done = kvd("config", "check", str(file))
    assert done.exit_code == 1
    place = f"{file}:2: tier: 'disc:/var/lib/kvd,size=1GiB'"
    assert f"{place}: no tier is called disc; known are disk, mooncake" in done.output


@pytest.mark.parametrize(
    ("tiers", "words"),
    [
        (["disk:{run}/."], "is, contains or lies in the runtime directory (runtime_dir = {link})"),
        (["disk:{link}"], "the runtime directory"),
        (["disk:{run}/sub/"], "the runtime directory"),
        (["disk:{top}"], "the runtime directory"),
        (["disk:{pool}/../pool"], "the pool's directory (pool_dir = {pool})"),
        (["disk:/data/a", "disk:/data//a/"], "another tier's directory (/data/a)"),
        (["disk:/data/a", "memory:", "disk:/data/a/b"], "another tier's directory (/data/a)"),
    ],
)
def test_a_tier_in_a_directory_of_something_else_is_refused(
    file: Path, tmp_path: Path, tiers: list[str], words: str
) -> None:
    """The runtime directory, the pool's and another tier's are named, and none of these is one."""
    run, link = tmp_path / "run", tmp_path / "link"
    run.mkdir()
    link.symlink_to(run)
    names = {"top": tmp_path, "run": run, "link": link, "pool": tmp_path / "pool"}
    texts = [f"{tier.format(**names)}{'' if tier == 'memory:' else ',size=1GiB'}" for tier in tiers]
    settings = f'runtime_dir = "{link}"\npool_dir = "{names["pool"]}"\n'
    file.write_text(f"{settings}tier = {json.dumps(texts)}\n")
    done = kvd("config", "check", str(file))
    assert done.exit_code == 1
    assert f"{file}:3: tier: {texts[-1]!r}: its directory" in done.output
    assert words.format(**names) in done.output
    assert "give the tier a directory of its own, such as disk:/var/lib/kvd/tier" in done.output
    for text in (f"disk:{tmp_path}/run2,size=1GiB", f"disk:{names['pool']}/tier,size=1GiB"):
        file.write_text(f"{settings}tier = {json.dumps([text])}\n")
        assert kvd("config", "check", str(file)).exit_code == 0


@pytest.mark.parametrize("command", ["status", "drain", "selftest"])
def test_tools_look_where_the_daemon_would_be(tmp_path: Path, command: str) -> None:
    """KVD_RUNTIME_DIR and the file's runtime_dir lead a tool as they lead the daemon."""
    done = kvd(command, KVD_RUNTIME_DIR=str(tmp_path / "variable"))
    assert str(tmp_path / "variable") in done.output
    file = tmp_path / "kvd.toml"
    file.write_text(f'runtime_dir = "{tmp_path}/file"\n')
    done = kvd(command, KVD_CONFIG=str(file))
    assert f"{tmp_path}/file" in done.output
