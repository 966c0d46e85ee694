"""`kvd demo-sglang` as its user runs it, with a model of two layers."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.processes import children_running, has_ended
from tests.sglang.support import TEST_SECONDS
from tests.tools.places import nothing_is_left
from tests.waiting import eventually

PROMPTS, TOKENS = 4, 200
FINDABLE = 192  # whole pages of 16
DEMO = [
    *(sys.executable, "-m", "kvd", "demo-sglang", "--layers", "2"),
    *("--prompts", str(PROMPTS), "--prompt-tokens", str(TOKENS)),
]
ENGINE = "kvd_tools.demo_sglang.server"

pytestmark = pytest.mark.timeout(TEST_SECONDS)


@pytest.fixture
def demo() -> Iterator[subprocess.Popen[str]]:
    """The demo, just started; it is ended with the test, and has left no folder then."""
    with nothing_is_left():
        process = subprocess.Popen(DEMO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


def test_known_prompts_are_found_also_after_a_restart(demo: subprocess.Popen[str]) -> None:
    """Cold nothing is found, warm and in a new engine every whole chunk, with the same answers."""
    out, error = demo.communicate(timeout=TEST_SECONDS - 60)
    assert demo.returncode == 0, out + error
    hits = re.findall(r" s +([\d,]+) of ([\d,]+)  ", out)
    found = [int(number.replace(",", "")) for number, _ in hits]
    assert found == [0, PROMPTS * FINDABLE, PROMPTS * FINDABLE], out
    assert {total for _, total in hits} == {f"{PROMPTS * TOKENS:,}"}
    assert "Every answer has the same" in out


def test_ctrl_c_ends_everything(demo: subprocess.Popen[str]) -> None:
    """An interrupt while the engine starts ends it, the daemon and the demo."""
    parent = psutil.Process(demo.pid)
    eventually(lambda: children_running(demo.pid, ENGINE))
    started = parent.children(recursive=True)
    assert len(started) >= 3  # daemon, lane, engine
    demo.send_signal(signal.SIGINT)
    _, error = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert "Aborted" in error
    eventually(lambda: [child for child in started if not has_ended(child)], lambda left: not left)
