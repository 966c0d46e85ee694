"""Settings: which source wins, what is refused in what words, and the files made from them."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from docs import generate_configuration
from kvd.cli import cli
from kvd.cli.config import as_toml, toml_value
from kvd.config.settings import SETTINGS, Settings
from kvd.config.sources import DEFAULT, Sources
from kvd.errors import ConfigError
from kvd_proto import messages
from tests.daemon.users import OTHER_UID, as_user, needs_root

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "cpu_bytes": st.sampled_from(["64GiB", "65536", "512 MiB", "auto"]),
    "runtime_dir": st.sampled_from(["/a", "/tmp/with space", '/quo"te', "/é\x7f\\"]),
    "http_listen": st.sampled_from(["off", "127.0.0.1:0", "[::1]:9330"]),
    "host_ratio": st.floats(0, 1000, exclude_min=True),
    "max_sessions": st.integers(1, 65536),
    "policy": st.sampled_from(["adaptive", "lru"]),
    "quota": st.sampled_from(
        [
            {},
            {"a/b c": {"floor": "1%"}},
            {"llama": {"floor": 0, "cap": "8 GiB"}, "é\x7f": {"cap": "5%"}},
        ]
    ),
    "tier": st.sampled_from(
        [["disk:/d,size=1GiB"], ["disk:/d e", "memory:,size=1MiB"], ["mooncake:master=[::1]:1"]]
    ),
}
SOME = st.fixed_dictionaries({}, optional=VALUES)


def toml_of(values: dict[str, Any]) -> str:
    """A file with these values, text in TOML's literal strings where that works."""
    lines = []
    for key, value in values.items():
        if isinstance(value, str):
            escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\x7f", "\\u007f")
            lines.append(f'{key} = "{escaped}"')
        else:
            lines.append(f"{key} = {toml_value(value)}")
    return "\n".join(lines) + "\n"


def text_of(value: Any) -> str:
    """A value as a variable or a flag says it."""
    if isinstance(value, list):
        return ";".join(value)
    return toml_value(value) if isinstance(value, dict) else str(value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where a test puts its file."""
    return tmp_path / "kvd.toml"


def problems(file: Path, text: str, **more: Any) -> list[str]:
    """The lines of the refusal of a file with this text."""
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        Sources(config=file, environment=more.pop("environment", {}), **more).load()
    return str(caught.value).splitlines()


@given(in_file=SOME, in_environment=SOME, in_flags=SOME)
def test_the_later_source_wins_key_by_key(
    in_file: dict[str, Any], in_environment: dict[str, Any], in_flags: dict[str, Any]
) -> None:
    """Defaults, then file, then environment, then flags; the origin says which one it was."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kvd.toml"
        path.write_text(toml_of(in_file), encoding="utf-8")
        environment = {
            SETTINGS[key].variable: text_of(value) for key, value in in_environment.items()
        }
        flags = {key: text_of(value) for key, value in in_flags.items()}
        loaded = Sources(config=path, flags=flags, environment=environment).load()
    for key, known in SETTINGS.items():
        value = getattr(loaded.settings, key)
        if key in in_flags:
            assert (value, loaded.origins[key]) == (in_flags[key], known.flag)
        elif key in in_environment:
            assert (value, loaded.origins[key]) == (in_environment[key], known.variable)
        elif key in in_file:
            assert value == in_file[key]
            line = list(in_file).index(key) + 1
            assert loaded.origins[key] == f"{path}:{line}"
        else:
            assert (value, loaded.origins[key]) == (known.default, DEFAULT)


@given(values=SOME)
def test_what_is_shown_as_toml_gives_the_same_settings(values: dict[str, Any]) -> None:
    """`kvd config show --toml` prints a file that says what holds now, whatever the texts are."""
    flags = {key: text_of(value) for key, value in values.items()}
    loaded = Sources(flags=flags, environment={}).load()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kvd.toml"
        path.write_text(as_toml(loaded.as_json()["settings"]), encoding="utf-8")
        assert Sources(config=path, environment={}).load().settings == loaded.settings


def test_everything_wrong_in_a_file_is_told_at_once(file: Path) -> None:
    """Each line names file, line, key, value and remedy; unknown keys get the nearest one."""
    text = '# mine\ncpu_byte = "1GiB"\nreserve = "2Gi"\npolicy = "mru"\nlease_seconds = "x"\n'
    lines = problems(file, text + "max_sessions = 0\nhost_ratio = inf\n[http]\nport = 1\n")
    assert sorted(lines) == sorted(
        [
            f"{file}:2: cpu_byte = '1GiB': no such setting; did you mean cpu_bytes?",
            f"{file}:3: reserve = '2Gi': needs a size such as 64GiB or 512MiB; did you mean 2GiB?",
            f"{file}:4: policy = 'mru': needs one of adaptive, lru",
            f"{file}:5: lease_seconds = 'x': needs a number above 0 and at most 86400",
            f"{file}:6: max_sessions = 0: needs a whole number from 1 to 65536",
            f"{file}:7: host_ratio = inf: needs a number above 0 and at most 1000",
            f"{file}:8: http = {{'port': 1}}: no such setting; known are: {', '.join(SETTINGS)}",
        ]
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("quota = 5\n", "quota = 5: needs a table in TOML, not JSON"),
        (
            'cpu_bytes = "1GiB"\n[quota.a]\nfloor = "60%"\n[quota.b]\nfloor = "600MiB"\n',
            "the floors of a, b add up to 1.19 GiB, the pool has 1 GiB",
        ),
        ('tier = ["disk"]', "'disk' is no tier; give NAME:TARGET"),
        (f"tier = {[f'{name}:' for name in 'abcde']}", f"5 tiers; at most {messages.MAX_TIERS}"),
        ('tier = "disk:/a"', "needs a list of"),
    ],
)
def test_quotas_and_tiers_that_cannot_be_are_refused(file: Path, text: str, words: str) -> None:
    """Their place in a file is named; tests/doctor/test_verdicts.py has what else is wrong."""
    (line,) = problems(file, text + "\n")
    name = "tier" if text.startswith("tier") else "quota"
    place = text.partition(name)[0].count("\n") + 1
    assert line.startswith(f"{file}:{place}: {name}")
    assert words in line


def test_variables_and_flags_are_named_in_errors(file: Path) -> None:
    """A bad variable or flag is named as the operator wrote it."""
    flags, variables = {"cpu_bytes": "-5GiB"}, {"KVD_DRAIN_SECONDS": "soon"}
    of_variable, of_flag = problems(file, "", environment=variables, flags=flags)
    assert of_variable.startswith("KVD_DRAIN_SECONDS: drain_seconds = 'soon': needs a number above")
    assert of_flag.startswith("--cpu-bytes: cpu_bytes = '-5GiB': needs a size of at least 64 KiB")


def test_a_file_that_is_no_settings_file_is_refused(file: Path) -> None:
    """One that is not there, a pipe, no TOML or no UTF-8: named, with what a setting looks like."""
    sources = Sources(environment={"KVD_CONFIG": str(file)})
    with pytest.raises(ConfigError, match="cannot be read"):
        sources.load()
    for data in (b"cpu_bytes", b"\x00", b"a = 1\na = 2", b'policy = "\xff"\n'):
        file.write_bytes(data)
        with pytest.raises(ConfigError, match=rf"^{file}: not TOML.*cpu_bytes = "):
            sources.load()
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ConfigError, match="no regular file"):
        sources.load()


@needs_root
def test_a_file_that_may_not_be_reached_says_who_may(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default file, too: it is not taken for one that is not there."""
    runtime_dir.parent.chmod(0o711)
    runtime_dir.mkdir(0o700)
    file = runtime_dir / "kvd.toml"
    monkeypatch.setattr("kvd.config.sources.DEFAULT_FILE", file)
    for sources in (Sources(environment={}), Sources(config=file, environment={})):
        denied = f"^{file}: cannot be read: uid {OTHER_UID} may not enter {runtime_dir} "
        with pytest.raises(ConfigError, match=denied), as_user():
            sources.runtime_dir()
    runtime_dir.chmod(0o711)
    file.touch(0o600)
    denied = f"^{file}: cannot be read: uid {OTHER_UID} may not read {file} "
    with pytest.raises(ConfigError, match=denied), as_user():
        Sources(environment={}).load()


def test_a_misspelt_variable_is_warned_of_and_foreign_ones_are_not() -> None:
    """KVD_CPU_BYTE is a mistake; KVD_PORT comes from an orchestrator and is nobody's."""
    variables = {"KVD_CPU_BYTE": "1GiB", "KVD_PORT": "tcp://10.0.0.1:80"}
    environment = variables | {"KVD_CONFIG": "/dev/null"}
    loaded = Sources(environment=environment).load()
    assert loaded.warnings == ("KVD_CPU_BYTE is no setting; did you mean KVD_CPU_BYTES?",)


def test_generated_files_are_current(file: Path) -> None:
    """deploy/kvd.toml and the table in docs/configuration.md agree with the settings.

    Each commented setting of deploy/kvd.toml can be put to use as it stands.
    """
    page = generate_configuration.PAGE.read_text(encoding="utf-8")
    assert generate_configuration.page(page) == page, "run make docs"
    sample = generate_configuration.SAMPLE.read_text(encoding="utf-8")
    assert sample == generate_configuration.sample()
    lines = [line for line in sample.splitlines() if line.startswith("#")]
    used = [line.removeprefix("#") for line in lines if line[1:2] != " "]
    assert len(used) == len(SETTINGS)
    file.write_text("\n".join(used))
    loaded = Sources(config=file, environment={}).load()
    assert loaded.settings == Settings()
    assert DEFAULT not in loaded.origins.values()


def kvd(*arguments: str, **environment: str) -> Result:
    """Run the command line here, with the default file out of the way."""
    return CliRunner().invoke(cli, arguments, env={"KVD_CONFIG": "/dev/null", **environment})


def test_show_names_the_place_of_each_value(file: Path) -> None:
    """The table has a line for every setting: its value, and file, variable, flag or default."""
    file.write_text('cpu_bytes = "64GiB"\n')
    done = kvd("config", "show", "--config", str(file), "--max-sessions", "7", KVD_RESERVE="1GiB")
    assert done.exit_code == 0
    rows = [line.split() for line in done.output.splitlines()]
    assert ["cpu_bytes", "64GiB", f"{file}:1"] in rows
    assert ["reserve", "1GiB", "KVD_RESERVE"] in rows
    assert ["max_sessions", "7", "--max-sessions"] in rows
    assert ["reuse_threshold", "1", "default"] in rows
    assert {row[0] for row in rows} >= set(SETTINGS)


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ('cpu_bytes = "64GiB"\npolicy = "lru"\n', 0, "ok, 2 settings"),
        ('cpu_bytes = "64 gigs"\npolicies = "lru"\n', 1, "did you mean policy?"),
        ('tier = ["disc:/a,size=1GiB"]', 1, "no tier is called disc; known are disk, mooncake"),
        (None, 1, "cannot be read"),
    ],
)
def test_check_says_what_is_wrong_in_a_file_alone(
    file: Path, text: str | None, status: int, words: str
) -> None:
    """Each mistake, with exit status 1, whatever the environment has; backends check tiers."""
    if text is not None:
        file.write_text(text)
    done = kvd("config", "check", str(file), KVD_POLICY="mru")
    assert (done.exit_code, words in done.output) == (status, True), done.output
    assert done.output.removeprefix("Error: ").startswith(str(file))


@pytest.mark.parametrize(
    ("tiers", "words"),
    [
        (["disk:{run}/."], "is, contains or lies in the runtime directory (runtime_dir = {link})"),
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
    name = texts[-1].partition(",")[0]
    assert f"{file}:3: tier: {name}: its directory" in done.output
    assert words.format(**names) in done.output
    assert "give the tier a directory of its own, such as disk:/var/lib/kvd/tier" in done.output
    for text in (f"disk:{tmp_path}/run2,size=1GiB", f"disk:{names['pool']}/tier,size=1GiB"):
        file.write_text(f"{settings}tier = {json.dumps([text])}\n")
        assert kvd("config", "check", str(file)).exit_code == 0


@pytest.mark.parametrize("command", ["status", "drain", "selftest"])
def test_tools_look_where_the_daemon_would_be(file: Path, command: str) -> None:
    """Flag, variable, file decide it as for the daemon; other mistakes there do not matter."""
    place = file.parent
    file.write_text(f'runtime_dir = "{place}/file"\npolicy = "no such"\n')
    assert f"{place}/variable" in kvd(command, KVD_RUNTIME_DIR=f"{place}/variable").output
    assert f"{place}/file" in kvd(command, KVD_CONFIG=str(file)).output
    if command != "selftest":
        assert f"{place}/file" in kvd(command, "--config", str(file)).output
        both = ("--config", str(file), "--runtime-dir", f"{place}/flag")
        assert f"{place}/flag" in kvd(command, *both).output
