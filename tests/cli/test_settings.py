"""Settings: which source wins, what is refused in what words, and the files made from them."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from docs import generate_configuration
from kvd.cli.config import as_toml, toml_value
from kvd.config import values
from kvd.config.settings import SETTINGS, Settings
from kvd.config.sources import DEFAULT, Sources
from kvd.config.values import Quota
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


def test_the_file_is_the_flag_then_the_variable_then_the_default_one(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--config comes before KVD_CONFIG, and that before the default file, if it is there."""
    default, other = tmp_path / "default.toml", tmp_path / "other.toml"
    monkeypatch.setattr("kvd.config.sources.DEFAULT_FILE", default)
    assert Sources(environment={}).file is None
    default.write_text("")
    assert Sources(environment={}).file == default
    assert Sources(environment={"KVD_CONFIG": str(other)}).file == other
    assert Sources(config=file, environment={"KVD_CONFIG": str(other)}).file == file


def test_everything_wrong_in_a_file_is_told_at_once(file: Path) -> None:
    """Each line names file, line, key, value and remedy; unknown keys get the nearest one."""
    text = '# mine\ncpu_byte = "1GiB"\nreserve = "2Gi"\npolicy = "mru"\nlease_seconds = "x"\n'
    lines = problems(file, text + "max_sessions = 0\nhost_ratio = true\n[http]\nport = 1\n")
    assert sorted(lines) == sorted(
        [
            f"{file}:2: cpu_byte = '1GiB': no such setting; did you mean cpu_bytes?",
            f"{file}:3: reserve = '2Gi': needs a size such as 64GiB or 512MiB; did you mean 2GiB?",
            f"{file}:4: policy = 'mru': needs one of adaptive, lru",
            f"{file}:5: lease_seconds = 'x': needs a number above 0 and at most 86400",
            f"{file}:6: max_sessions = 0: needs a whole number from 1 to 65536",
            f"{file}:7: host_ratio = True: needs a number above 0 and at most 1000",
            f"{file}:8: http = {{'port': 1}}: no such setting; known are: {', '.join(SETTINGS)}",
        ]
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[quota.llama]\nflor = "1GiB"\n', "llama: flor is neither floor nor cap"),
        (
            '[quota.llama]\ncap = "150%"\n',
            "llama: cap = '150%': needs a size such as 8GiB",
        ),
        ('[quota.llama]\ncap = "8Gi"\n', "% of the pool; did you mean 8GiB?"),
        ("[quota.llama]\ncap = true\n", "needs for each model"),
        ("quota = 5\n", "needs for each model"),
        ("[quota.llama]\n", "llama: nothing is neither floor nor cap"),
        (
            'cpu_bytes = "1GiB"\n[quota.a]\nfloor = "60%"\n[quota.b]\nfloor = "600MiB"\n',
            "the floors of a, b add up to 1.19 GiB, the pool has 1 GiB",
        ),
        (
            'cpu_bytes = "1GiB"\n[quota.a]\nfloor = "50%"\ncap = "5MiB"\n',
            "the cap of a, 5 MiB, is below its floor, 512 MiB",
        ),
    ],
)
def test_quotas_that_cannot_hold_are_refused(file: Path, text: str, words: str) -> None:
    """Place, model, key and value are named; what contradicts the pool's size is refused too."""
    (line,) = problems(file, text)
    place = text.partition("quota")[0].count("\n") + 1
    assert line.startswith(f"{file}:{place}: quota")
    assert words in line


def test_quotas_are_sections_of_the_file_or_one_line_elsewhere(file: Path) -> None:
    """A section for each model says the same as a table in a variable or a flag."""
    file.write_text('cpu_bytes = "1GiB"\n[quota."org/llama"]\nfloor = "64MiB"\ncap = "50%"\n')
    from_file = Sources(config=file, environment={}).load().settings
    line = '{"org/llama" = {floor = "64MiB", cap = "50%"}}'
    elsewhere = Sources(flags={"quota": line}, environment={}).load().settings
    assert from_file.quota == elsewhere.quota
    assert from_file.quotas(2**30) == {"org/llama": Quota(2**26, 2**29)}
    with pytest.raises(ConfigError, match=r"--quota: quota = 'llama': not TOML in one line.*needs"):
        Sources(flags={"quota": "llama"}, environment={}).load()


def test_tiers_are_a_list_in_the_file_and_stand_side_by_side_elsewhere(file: Path) -> None:
    """A semicolon or white space is between two of them; a target may have spaces."""
    wanted = ["disk:/a b,size=1GiB", "memory:,late=1"]
    file.write_text('tier = ["disk:/a b,size=1GiB", "memory:,late=1"]\n')
    assert Sources(config=file, environment={}).load().settings.tier == wanted
    for text in ("disk:/a b,size=1GiB;memory:,late=1", " disk:/a b,size=1GiB\n memory:,late=1 "):
        environment = {"KVD_TIER": text, "KVD_CONFIG": "/dev/null"}
        assert Sources(environment=environment).load().settings.tier == wanted


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('tier = ["disk"]', "'disk' is no tier; give NAME:TARGET"),
        ('tier = ["disk:/a,keep=some"]', "keep=some is none of asked, all, never"),
        ('tier = ["disk:/a", "disk:/a,size=1GiB"]', "is given twice"),
        ('tier = ["a:", "b:", "c:", "d:", "e:"]', "5 tiers; at most 4"),
        ('tier = "disk:/a"', "needs a list of"),
        ('tier = ["disk:/a,size=much"]', "size=much"),
    ],
)
def test_a_tier_that_cannot_be_is_refused(file: Path, text: str, words: str) -> None:
    """Place, text and remedy are named."""
    assert values.MAX_TIERS == messages.MAX_TIERS
    (line,) = problems(file, text + "\n")
    assert line.startswith(f"{file}:1: tier = ")
    assert words in line


def test_variables_and_flags_are_named_in_errors(file: Path) -> None:
    """A bad variable or flag is named as the operator wrote it."""
    lines = problems(
        file,
        'policy = "lru"\n',
        environment={"KVD_DRAIN_SECONDS": "soon"},
        flags={"cpu_bytes": "-5GiB"},
    )
    assert lines == [
        "KVD_DRAIN_SECONDS: drain_seconds = 'soon': needs a number above 0 and at most 86400",
        (
            "--cpu-bytes: cpu_bytes = '-5GiB': needs a size of at least 64 KiB such as 64GiB or"
            " 512MiB, or auto"
        ),
    ]


@pytest.mark.parametrize("number", ["inf", "nan", "-inf", "0", "-1", "86401"])
def test_numbers_outside_their_bounds_are_refused(file: Path, number: str) -> None:
    """Infinite, undefined, negative and too large numbers never become a deadline."""
    (line,) = problems(file, f"lease_seconds = {number}\n")
    assert "lease_seconds" in line
    assert "86400" in line


@pytest.mark.parametrize(
    "data", [b"cpu_bytes = 64GiB", b"cpu_bytes", b"\x00", b"a = 1\na = 2", b'policy = "\xff"\n']
)
def test_what_is_not_toml_is_refused_with_the_place(file: Path, data: bytes) -> None:
    """A file that is no TOML, or no UTF-8, is named, with what a setting looks like."""
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=rf"^{file}: not TOML.*cpu_bytes = "):
        Sources(config=file, environment={}).load()


def test_a_file_that_cannot_be_read_is_refused(file: Path) -> None:
    """A file that somebody named must be there; a pipe in its place makes nobody wait."""
    sources = Sources(environment={"KVD_CONFIG": str(file)})
    with pytest.raises(ConfigError, match="cannot be read"):
        sources.load()
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


def test_an_empty_variable_is_not_set() -> None:
    """KVD_POLICY= as compose files write it leaves the default."""
    loaded = Sources(environment={"KVD_POLICY": "", "KVD_CONFIG": "/dev/null"}).load()
    assert loaded.settings == Settings()


def test_a_misspelt_variable_is_warned_of_and_foreign_ones_are_not() -> None:
    """KVD_CPU_BYTE is a mistake; KVD_PORT comes from an orchestrator and is nobody's."""
    environment = {
        "KVD_CPU_BYTE": "1GiB",
        "KVD_PORT": "tcp://10.0.0.1:80",
        "KVD_CONFIG": "/dev/null",
    }
    loaded = Sources(environment=environment).load()
    assert loaded.warnings == ("KVD_CPU_BYTE is no setting; did you mean KVD_CPU_BYTES?",)


def test_a_tool_needs_only_the_runtime_directory(file: Path) -> None:
    """Flag, variable, file, default decide it; other mistakes in the file do not matter."""
    file.write_text('runtime_dir = "/from/file"\npolicy = "mru"\n')
    environment = {"KVD_CONFIG": str(file)}
    assert Sources(environment=environment).runtime_dir() == "/from/file"
    environment["KVD_RUNTIME_DIR"] = "/from/variable"
    assert Sources(environment=environment).runtime_dir() == "/from/variable"
    flags = {"runtime_dir": "/from/flag"}
    assert Sources(flags=flags, environment=environment).runtime_dir() == "/from/flag"
    assert Sources(environment={"KVD_CONFIG": "/dev/null"}).runtime_dir() == "/run/kvd"
    file.write_text("runtime_dir = 5\n")
    with pytest.raises(ConfigError, match="--runtime-dir"):
        Sources(config=file, environment={}).runtime_dir()


def test_generated_files_are_current() -> None:
    """deploy/kvd.toml and the table in docs/configuration.md agree with the settings."""
    page = generate_configuration.PAGE.read_text(encoding="utf-8")
    assert generate_configuration.page(page) == page, "run make docs"
    assert (
        generate_configuration.SAMPLE.read_text(encoding="utf-8") == generate_configuration.sample()
    )


def test_the_sample_with_every_line_in_use_gives_the_defaults(file: Path) -> None:
    """Each commented setting of deploy/kvd.toml can be put to use as it stands."""
    lines = generate_configuration.SAMPLE.read_text(encoding="utf-8").splitlines()
    used = [line.removeprefix("#") for line in lines if line.startswith("#") and line[1:2] != " "]
    assert len(used) == len(SETTINGS)
    file.write_text("\n".join(used))
    loaded = Sources(config=file, environment={}).load()
    assert loaded.settings == Settings()
    assert DEFAULT not in loaded.origins.values()
