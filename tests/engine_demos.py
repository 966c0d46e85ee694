"""What holds of `kvd demo-vllm` and `kvd demo-sglang`, as their user runs them, with two layers."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from tests.processes import children_running, has_ended
from tests.tools.places import nothing_is_left
from tests.waiting import eventually

PROMPTS, TOKENS = 4, 200
FINDABLE = 192  # whole chunks of 64 tokens, or whole pages of 16


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

    Where a store or load came too late, which is computed then, the demo runs once more.

    Args:
        command: of the demo.
        seconds: that both runs may take.
    """
    most = [0, PROMPTS * FINDABLE, PROMPTS * FINDABLE]
    end = time.monotonic() + seconds
    for _ in range(2):
        with running(command) as demo:
            out, error = demo.communicate(timeout=end - time.monotonic())
        assert demo.returncode == 0, out + error
        hits = re.findall(r" s +([\d,]+) of ([\d,]+)  ", out)
        found = [int(number.replace(",", "")) for number, _ in hits]
        assert len(found) == len(most), out
        assert all(map(int.__le__, found, most)), out
        assert {total for _, total in hits} == {f"{PROMPTS * TOKENS:,}"}
        assert "Every answer has the same" in out
        if found == most:
            return
    pytest.fail(out)


def ends_with_ctrl_c(demo: subprocess.Popen[str], engine: str) -> None:
    """An interrupt while the engine starts ends it, the daemon and the demo.

    Args:
        demo: just started.
        engine: the module of its server.
    """
    parent = psutil.Process(demo.pid)
    eventually(lambda: children_running(demo.pid, engine))
    started = parent.children(recursive=True)
    assert len(started) >= 3  # daemon, lane, engine
    demo.send_signal(signal.SIGINT)
    _, error = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert "Aborted" in error
    eventually(lambda: [child for child in started if not has_ended(child)], lambda left: not left)
