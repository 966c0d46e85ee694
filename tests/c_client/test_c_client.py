"""A client in C, written from docs/protocol.md alone, against a real daemon."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.daemon.serving import StartDaemon
from tests.waiting import PATIENCE

HERE = Path(__file__).parent
PROTOCOL_MD = HERE.parents[1] / "docs" / "protocol.md"
SKIPPED = "is not installed; tests/install-debian.sh does that on Debian"
STEPS = (
    *("hello", "registered", "attached", "miss", "lent", "pending", "stored", "hit"),
    *("loaded and equal", "another generation is stale", "submitted before it was told"),
    *("given up", "reset", "pong", "refused", "unregistered"),
)


def cc(*arguments: str, source: str = "") -> subprocess.CompletedProcess[str]:
    """Run the C compiler."""
    return subprocess.run(
        ["cc", *arguments], input=source, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, built without a warning; skips where compiler or libraries are missing."""
    if shutil.which("cc") is None:
        pytest.skip(f"a C compiler {SKIPPED}")
    if cc("-fsyntax-only", "-x", "c", "-", source="#include <msgpack.h>\n").returncode:
        pytest.skip(f"msgpack for C {SKIPPED}")
    program = tmp_path_factory.mktemp("c_client") / "c_client"
    sources = [str(path) for path in sorted(HERE.glob("*.c"))]
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(program)]
    # Debian 13 has renamed the library.
    built = [cc(*flags, *sources, name) for name in ("-lmsgpack-c", "-lmsgpackc")]
    assert program.exists(), "\n".join(one.stderr for one in built)
    return program


def run(*command: Path | str) -> list[str]:
    """The lines that the program prints; it must end well."""
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=4 * PATIENCE, check=False
    )
    assert not ended.returncode, (ended.stdout, ended.stderr)
    return ended.stdout.splitlines()


def test_a_client_in_c_stores_finds_and_loads_chunks(
    start_daemon: StartDaemon, client: Path
) -> None:
    """It says hello, registers, stores, looks up in the directory, loads, and compares."""
    daemon = start_daemon()
    for _ in range(2):
        assert run(client, str(daemon.runtime_dir)) == [f"ok: {step}" for step in STEPS]
    report = daemon.wait_ready()
    counters = report["counters"]
    assert (counters["lookup_chunks"], counters["hit_chunks"]) == (8, 4)
    assert daemon.stop() == 0


def test_the_documented_directory_is_read_as_documented(tmp_path: Path, client: Path) -> None:
    """The directory that docs/protocol.md shows byte by byte gives what its table says."""
    text = PROTOCOL_MD.read_text(encoding="utf-8").split("## A directory, byte by byte")[1]
    text = text.split("\n## ")[0]
    (size,) = re.findall(r"(\d+) bytes in all", text)
    directory = bytearray(int(size))
    for at, row in re.findall(r"^ *(\d+)  ((?:[0-9a-f]{8} ?){4})$", text, re.MULTILINE):
        directory[int(at) : int(at) + 16] = bytes.fromhex(row)
    path = tmp_path / "directory"
    path.write_bytes(directory)
    due = dict(re.findall(r"^\| `(chunk-\d+)` \|.*\| (\w+) \|$", text, re.MULTILINE))
    assert sorted(due.values()) == ["HIT", "HIT_PENDING", "MISS", "MISS"]
    assert run(client, "--lookup", path, *due) == [f"{key} {result}" for key, result in due.items()]
