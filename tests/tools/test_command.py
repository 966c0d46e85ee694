import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvd_tools.demo.command import MEANING
from tests.processes import python
from tests.tools.places import nothing_is_left
from tests.waiting import PATIENCE

DEMO = ["-m", "kvd", "demo"]
LONG = ["--requests", "5000", "--cpu-bytes", str(64 * 2**20)]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """No test leaves a folder of its demos."""
    with nothing_is_left():
        yield


def demo(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `kvd demo` to its end, with more environment variables."""
    return python(*DEMO, *arguments, environment=os.environ | variables)


@contextlib.contextmanager
def serving() -> Iterator[tuple[subprocess.Popen[bytes], list[psutil.Process]]]:
    """A long demo whose ranks have begun to serve, with all that it has started."""
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", *DEMO, *LONG],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        parent = psutil.Process(process.pid)
        # Each rank opens its control page just before it is ready.
        while sum(is_rank(child) for child in parent.children()) < 2:
            assert process.poll() is None, process.communicate()[1]
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
        yield process, parent.children(recursive=True)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # where does it stand?
        raise AssertionError(process.communicate()[1].decode()) from None
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def is_rank(process: psutil.Process) -> bool:
    """Whether a child of the demo is one of its ranks, and has its control page."""
    with contextlib.suppress(psutil.Error, OSError):
        files = Path(f"/proc/{process.pid}/fd").iterdir()
        return "--multiprocessing-fork" in process.cmdline() and any(
            "kvd-control" in str(fd.readlink()) for fd in files
        )
    return False


def all_ended(processes: list[psutil.Process]) -> bool:
    """Whether they all end."""
    return not psutil.wait_procs(processes, timeout=PATIENCE)[1]


def test_every_loaded_byte_is_verified(tmp_path: Path) -> None:
    """Ranks store, evict, load and verify; the JSON has every figure and no wrong byte."""
    out = tmp_path / "out.json"
    done = demo("--requests", "40", "--seed", "3", "--world-size", "3", "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(out.read_text())
    assert figures.keys() == MEANING.keys()
    assert figures["requests"] == 40
    assert figures["world_size"] == 3
    assert figures["mismatched_bytes"] == figures["strayed_bytes"] == 0
    assert figures["hit_chunks"] == figures["loaded_chunks"] > 0
    assert figures["evicted_chunks"] > 0
    assert figures["verified_bytes"] > 0
    assert figures["tier_stored_chunks"] is figures["tier_out_GBps"] is None
    assert "tier" not in done.stdout
    assert "bytes are right" in done.stdout


def test_what_a_small_pool_has_no_room_for_comes_up_from_a_tier(tmp_path: Path) -> None:
    """With a disk below the pool every byte is right, chunks go down and come up again."""
    out, tier = tmp_path / "out.json", tmp_path / "tier"
    count = ["--requests", "60", "--seed", "3"]
    told = ["--tier", f"disk:{tier},size=512MiB,late=30", "--json", str(out)]
    done = demo(*count, *told)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(out.read_text())
    assert figures["mismatched_bytes"] == figures["strayed_bytes"] == 0
    assert figures["tier_stored_chunks"] > 0
    assert figures["tier_loaded_chunks"] > 0
    assert figures["tier_in_GBps"] > 0
    assert figures["tier_out_GBps"] > 0


def test_a_wrong_byte_is_found(tmp_path: Path) -> None:
    """One byte flipped before a store makes the demo fail and say how many bytes are wrong."""
    out = tmp_path / "out.json"
    done = demo(
        "--requests", "30", "--corrupt", "--json", str(out), "--cpu-bytes", str(256 * 2**20)
    )
    assert done.returncode == 1
    assert json.loads(out.read_text())["mismatched_bytes"] > 0
    assert "loaded bytes are wrong" in " ".join(done.stdout.split())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(number: signal.Signals) -> None:
    """Ctrl-C and SIGTERM end the daemon, its lane and the ranks."""
    with serving() as (process, started):
        assert len(started) >= 4  # daemon, lane, two ranks
        process.send_signal(number)
        assert process.wait(PATIENCE) != 0
        assert all_ended(started)


def test_a_dead_rank_ends_everything() -> None:
    """When a rank is killed, the demo says so and ends the others."""
    with serving() as (process, started):
        victim = next(child for child in started if is_rank(child))
        victim.kill()
        _, said = process.communicate(timeout=60)
        assert process.returncode == 1
        assert f"(pid {victim.pid}) ended with status -9" in " ".join(said.decode().split())
        assert all_ended(started)


def test_nothing_outlives_a_killed_demo() -> None:
    """SIGKILL leaves no chance to clean up; the processes end all the same."""
    with serving() as (process, started):
        daemon = next(child.cmdline() for child in started if "serve" in child.cmdline())
        process.kill()
        assert all_ended(started)
        shutil.rmtree(Path(daemon[daemon.index("--runtime-dir") + 1]).parent)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cpu-bytes", "banana"], "'banana' is no size"),
        (["--cpu-bytes", "4KiB", "--requests", "1"], "at least 64 KiB"),
        (["--cpu-bytes", "64KiB", "--requests", "1"], "65536 bytes"),
        (["--json", "/proc/none/out.json"], "/proc/none/out.json"),
    ],
)
def test_bad_options_are_named_before_anything_runs(arguments: list[str], words: str) -> None:
    """One line with the value, no traceback; the exit status is not 0."""
    done = demo(*arguments)
    assert done.returncode
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is not None, reason="this environment has vLLM"
)
def test_without_vllm_it_says_how_to_get_it() -> None:
    """`kvd demo-vllm` in one sentence names the environment and the remedy, exit status 1."""
    done = python("-m", "kvd", "demo-vllm")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert sys.prefix in done.stderr
    assert "make demo-vllm" in done.stderr
    assert not done.stdout
