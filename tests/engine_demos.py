"""What holds of `kvd demo-vllm` and `kvd demo-sglang`, as their user runs them, with two layers."""

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.processes import children_running, has_ended
from tests.waiting import eventually

PROMPTS, TOKENS = 4, 200
FINDABLE = 192  # whole chunks of 64 tokens, or whole pages of 16


@contextmanager
def nothing_is_left() -> Iterator[None]:
    """Afterwards no folder of a demo is left, but for one of another demo that runs."""
    places = (Path("/dev/shm"), Path(tempfile.gettempdir()))

    def folders() -> set[Path]:
        return {path for place in places for path in place.glob("kvd-demo-*")}

    before = folders()
    yield
    eventually(lambda: not any(map(_is_orphan, folders() - before)))


def _is_orphan(folder: Path) -> bool:
    """Whether no process names it."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(str(folder) in word for word in process.cmdline()):
                return False
    return True


@contextmanager
def running(command: str) -> Iterator[subprocess.Popen[str]]:
    """The demo, just started; it is ended with the context, and has left no folder then."""
    arguments = f"{command} --layers 2 --prompts {PROMPTS} --prompt-tokens {TOKENS}".split()
    with nothing_is_left():
        process = subprocess.Popen(
            [sys.executable, "-m", "kvd", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


def finds_known_prompts(command: str, seconds: float) -> None:
    """Cold nothing is found, warm and in a new engine all that can be, with the same answers.

    Where a store or load came too late, which is computed then, the demo runs once more; both runs
    take `seconds` at most.
    """
    most = [0, PROMPTS * FINDABLE, PROMPTS * FINDABLE]
    end = time.monotonic() + seconds
    for _ in range(2):
        with running(command) as demo:
            out, error = demo.communicate(timeout=end - time.monotonic())
        assert demo.returncode == 0, out + error
        hits = re.findall(r" s +([\d,]+) of ([\d,]+)  ", out)
        tokens = [int(number.replace(",", "")) for number, _ in hits]
        assert len(tokens) == len(most), out
        assert all(map(int.__le__, tokens, most)), out
        assert {total for _, total in hits} == {f"{PROMPTS * TOKENS:,}"}
        assert "Every answer has the same" in out
        if tokens == most:
            return
    pytest.fail(out)


def ends_with_ctrl_c(demo: subprocess.Popen[str], engine: str) -> None:
    """An interrupt while the engine, by its module, starts ends it, the daemon and the demo."""
    parent = psutil.Process(demo.pid)
    eventually(lambda: children_running(demo.pid, engine))
    started = parent.children(recursive=True)
    assert len(started) >= 3  # daemon, lane, engine
    demo.send_signal(signal.SIGINT)
    _, error = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert "Aborted" in error
    eventually(lambda: all(map(has_ended, started)))
