"""`kvd demo`, as its user runs it: how it ends whatever happens, what its engine is asked for."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd_tools.demo.command import MEANING
from kvd_tools.demo.workload import (
    BLOCKS_PER_CHUNK,
    conversations,
    longest_hit,
    page_content,
    window_blocks,
)
from kvd_tools.engine_server import RESOURCE_TRACKER, kill_group
from tests.engine_demos import nothing_is_left
from tests.processes import python
from tests.waiting import PATIENCE, eventually

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
        process.wait(PATIENCE)
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


def end(processes: list[psutil.Process]) -> bool:
    """Whether they all end."""
    return not psutil.wait_procs(processes, timeout=PATIENCE)[1]


def test_every_loaded_byte_is_verified(tmp_path: Path) -> None:
    """Ranks store, evict, load and verify; the JSON has every figure and no wrong byte."""
    out = tmp_path / "out.json"
    done = demo("--requests", "40", "--seed", "3", "--world-size", "3", "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(out.read_text())
    assert figures.keys() == MEANING.keys()
    assert (figures["requests"], figures["world_size"]) == (40, 3)
    assert figures["mismatched_bytes"] == figures["strayed_bytes"] == 0
    assert figures["hit_chunks"] == figures["loaded_chunks"] > 0
    assert figures["evicted_chunks"] > 0
    assert figures["verified_bytes"] > 0
    assert figures["tier_stored_chunks"] is figures["tier_out_GBps"] is None
    assert "tier" not in done.stdout
    assert "bytes are right" in done.stdout


def test_what_a_small_pool_has_no_room_for_comes_up_from_a_tier(tmp_path: Path) -> None:
    """With a disk below the pool chunks go down and come up again; a flipped byte is found.

    The demo fails then, and says how many bytes are wrong. It needs no torch.
    """
    (tmp_path / "torch.py").write_text("raise ImportError('this Python has no torch')\n")
    out, tier = tmp_path / "out.json", tmp_path / "tier"
    options = ["--requests", "60", "--seed", "3", "--tier", f"disk:{tier},size=512MiB,late=30"]
    done = demo(*options, "--corrupt", "--json", str(out), PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    figures = json.loads(out.read_text())
    assert figures["mismatched_bytes"] > 0
    assert "loaded bytes are wrong" in " ".join(done.stdout.split())
    assert figures["strayed_bytes"] == 0
    for name in ("tier_stored_chunks", "tier_loaded_chunks", "tier_in_GBps", "tier_out_GBps"):
        assert figures[name] > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_everything(number: signal.Signals) -> None:
    """Ctrl-C, SIGTERM, and SIGKILL, which leaves no chance to clean up."""
    with serving() as (process, started):
        assert len(started) >= 4  # daemon, lane, two ranks
        daemon = next(child.cmdline() for child in started if "serve" in child.cmdline())
        process.send_signal(number)
        assert process.wait(PATIENCE) != 0
        assert end(started)
        if number is signal.SIGKILL:
            shutil.rmtree(Path(daemon[daemon.index("--runtime-dir") + 1]).parent)


def test_a_dead_rank_ends_everything() -> None:
    """When a rank is killed, the demo says so and ends the others."""
    with serving() as (process, started):
        victim = next(child for child in started if is_rank(child))
        victim.kill()
        _, error = process.communicate(timeout=60)
        assert process.returncode == 1
        assert f"(pid {victim.pid}) ended with status -9" in " ".join(error.decode().split())
        assert end(started)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cpu-bytes", "banana"], "'banana' is no size"),
        (["--json", "/proc/none/out.json"], "/proc/none/out.json"),
    ],
)
def test_bad_options_are_named_before_anything_runs(arguments: list[str], words: str) -> None:
    """One line with the value, no traceback; the exit status is not 0."""
    done = demo(*arguments)
    assert done.returncode
    assert words in done.stderr
    assert "Traceback" not in done.stderr


# A process with a child of its own, and shared memory that nobody removes.
OWNER = """
import subprocess, sys
from multiprocessing.shared_memory import SharedMemory
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(SharedMemory(create=True, size=4096).name, flush=True)
child.wait()
"""


def test_a_killed_group_leaves_no_shared_memory() -> None:
    """All processes end, and the resource tracker removes what they had in /dev/shm."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert owner.stdout is not None
        memory = Path("/dev/shm", owner.stdout.readline().strip())
        assert memory.is_file()
        # Before its exec the tracker looks like the owner, and would be killed as one.
        parent = psutil.Process(owner.pid)
        eventually(lambda: RESOURCE_TRACKER in str([c.cmdline() for c in parent.children()]))
        assert kill_group(owner.pid)
        assert owner.wait(PATIENCE) == -9
        eventually(lambda: not kill_group(owner.pid))
        assert not memory.exists()
    finally:
        owner.kill()
        owner.communicate()


@given(st.integers(0, 1000))
def test_a_piece_always_has_the_same_prefix(seed: int) -> None:
    """In generated prompts a number names a piece together with all that is before it."""
    before: dict[int, int | None] = {}
    for prompt in conversations(40, seed):
        previous = None
        for piece in prompt:
            assert before.setdefault(piece, previous) == previous
            previous = piece


@given(st.integers(0, 20), st.dictionaries(st.integers(0, 20), st.integers(0, 1)))
def test_the_longest_hit_is_longest(prefix: int, first_blocks: dict[int, int]) -> None:
    """The window after the answer is there, block for block, and after nothing longer."""

    def is_there(chunk: int, first: int) -> bool:
        return chunk in first_blocks and first_blocks[chunk] <= first

    def loadable(end: int) -> bool:
        return all(is_there(*divmod(block, BLOCKS_PER_CHUNK)) for block in window_blocks(end))

    hit = longest_hit(prefix, is_there)
    assert 0 <= hit <= prefix
    assert loadable(hit)
    assert not any(loadable(end) for end in range(hit + 1, prefix + 1))


PAGE = 256


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(1, PAGE // 8 - 1))
def test_other_and_shifted_pages_are_wrong(one: int, other: int, words: int) -> None:
    """A page of another key, rank, tensor or block is wrong in every word; a shifted one shows."""
    page = page_content(one, PAGE)
    if one != other:
        assert (page.view(np.uint64) != page_content(other, PAGE).view(np.uint64)).all()
    assert (np.roll(page, 8 * words) != page).any()
