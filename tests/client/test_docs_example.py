"""The documents: the guide's engines run as printed, its tables are whole, all is typed."""

import dataclasses
import enum
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import kvd_client
from tests.conftest import Daemon, StartDaemon
from tests.processes import python
from tests.torch_engine import SOURCE_PATH, write_torch_engine
from tests.waiting import DEADLINE

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "writing-a-client.md"
# What calls take and return; jobs' messages name a kind only, the rest are objects with methods.
FIELDS = [
    name
    for name in kvd_client.__all__
    if isinstance(kind := getattr(kvd_client, name), type)
    and (issubclass(kind, (enum.Enum, tuple, msgspec.Struct)) or dataclasses.is_dataclass(kind))
    and name not in {"Load", "Store"}
]
# A daemon that stands still for longer than the usual deadline is a miss, and prints another text.
PATIENTLY = f"""
from kvd_client import Scheduler, Worker
for kind in (Scheduler, Worker):
    kind.__init__.__kwdefaults__["deadline"] = {DEADLINE}
"""


def run_example(words: str, daemon: Daemon, folder: Path) -> None:
    """Run the guide's example that has these words; it prints the text block that follows it."""
    examples = re.findall(
        r"```python\n(.*?)```.*?```text\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL
    )
    ((program, printed),) = [example for example in examples if words in example[0]]
    file = folder / "engine.py"
    file.write_text(PATIENTLY + program, encoding="utf-8")
    done = python("-W", "error", file, daemon.runtime_dir)
    assert (done.stderr, done.stdout) == ("", printed)


def test_example_engine_runs(start_daemon: StartDaemon, tmp_path: Path) -> None:
    """The second prompt comes from the cache, as the guide prints it, and half of the tokens.

    It reports why the first one missed.
    """
    daemon = start_daemon()
    run_example("def serve(", daemon, tmp_path)
    counters = daemon.status()["counters"]
    assert (counters["hit_tokens"], counters["lookup_tokens"]) == (320, 640)
    assert sum(counters["missed"].values()) == counters["missed"]["never_seen"] == 10


def test_example_of_two_processes_runs(shared_daemon: Daemon, tmp_path: Path) -> None:
    """A ticket that is sent to the worker's process stores and loads there."""
    run_example("multiprocessing", shared_daemon, tmp_path)


@pytest.mark.parametrize(("transfer", "way"), [("auto", "export"), ("staging", "staging")])
def test_example_with_torch_runs(
    shared_daemon: Daemon, tmp_path: Path, transfer: str, way: str
) -> None:
    """Tensors are stored and loaded either way."""
    engine = write_torch_engine(tmp_path)
    done = python(
        "-W",
        "error",
        engine,
        shared_daemon.runtime_dir,
        transfer,
        environment=os.environ | {"PYTHONPATH": SOURCE_PATH},
    )
    assert (done.stderr, done.stdout) == ("", f"{way} True\n")


def parse_names(kind: type) -> set[str]:
    """What a caller sees of a value: an enumeration's members, or fields and plain properties."""
    if issubclass(kind, enum.Enum):
        return {member.name for member in kind}
    if dataclasses.is_dataclass(kind):
        names = {field.name for field in dataclasses.fields(kind) if not field.kw_only}
        return names | {name for name, value in vars(kind).items() if isinstance(value, property)}
    return set(getattr(kind, "__struct_fields__", getattr(kind, "_fields", ())))


@pytest.mark.parametrize("name", FIELDS)
def test_the_guide_has_every_field_and_answer(name: str) -> None:
    """Each is a row of its class's table, and each row is one."""
    section = re.search(rf"### `{name}`\n(.*?)\n##", GUIDE.read_text("utf-8"), re.DOTALL)
    assert section
    rows = re.findall(r"^\| (`.*?) \|", section[1], re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) == parse_names(getattr(kvd_client, name))


@pytest.mark.timeout(300)  # without its cache mypy reads numpy for a minute
def test_examples_pass_a_strict_type_checker(tmp_path: Path) -> None:
    """Every Python example in README and docs is right as it stands, by mypy --strict."""
    examples = [
        block[1]
        for document in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
        for block in re.finditer(r"```python\n(.*?)```", document.read_text("utf-8"), re.DOTALL)
    ]
    assert len(examples) > 2
    files = [tmp_path / f"example_{number}.py" for number in range(len(examples))]
    for file, example in zip(files, examples, strict=True):
        file.write_text(example, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", ""]
    command += ["--cache-dir", str(ROOT / ".mypy_cache")]
    done = subprocess.run(
        [*command, *map(str, files)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
