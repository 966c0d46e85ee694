"""A daemon that is absent, killed or frozen is a cache that misses: the engine serves on."""

import os
import signal
import threading
from pathlib import Path

import pytest

from kvd_tools.engine_server import Completion
from kvd_tools.errors import DemoError
from kvd_tools.sglang_engine import SglangServerOptions
from tests.conftest import StartDaemon
from tests.sglang.conftest import StartEngine
from tests.sglang.support import (
    CHUNK_TOKENS,
    TEST_SECONDS,
    ask_all,
    check,
    findable,
    prompts,
    push_out,
    wait_served,
    with_kvd,
)
from tests.waiting import PATIENCE

PROMPTS = prompts(4)
KEEP = ("--keep-pool", "yes")
ROUNDS = 5
ENGINE_DEADLINE, FROZEN_SECONDS = 15.0, 20.0

pytestmark = pytest.mark.timeout(TEST_SECONDS)


def test_absent_killed_and_frozen_it_costs_misses(
    start_daemon: StartDaemon,
    runtime_dir: Path,
    model: Path,
    start_engine: StartEngine,
    expected: list[Completion],
) -> None:
    """One engine through all of it: started without a daemon, it finds prompts whenever it can."""
    engine = start_engine(
        with_kvd(SglangServerOptions(model), runtime_dir, deadline=ENGINE_DEADLINE)
    )
    engine.wait_ready()
    check(ask_all(engine, PROMPTS), expected)

    def found() -> bool:
        push_out(engine)
        answers = ask_all(engine, PROMPTS)
        check(answers, expected)
        return min(answer.cached_tokens for answer in answers) >= findable()

    daemon = start_daemon(*KEEP)
    wait_served(daemon)
    assert any(found() for _ in range(ROUNDS))

    daemon.stop(signal.SIGKILL)
    push_out(engine)
    answers = ask_all(engine, PROMPTS)
    check(answers, expected)
    assert max(answer.cached_tokens for answer in answers) < CHUNK_TOKENS

    daemon = start_daemon(*KEEP)
    wait_served(daemon)
    assert found()

    push_out(engine)
    frozen = [daemon.process.pid]
    frozen += [lane["pid"] for lane in daemon.status()["lanes"]]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)

    def go_on() -> None:
        for pid in reversed(frozen):  # a broker that goes on first may kill a lane that hangs
            os.kill(pid, signal.SIGCONT)

    wake = threading.Timer(FROZEN_SECONDS, go_on)
    wake.start()
    try:
        check(ask_all(engine, PROMPTS), expected)
    finally:
        wake.join(FROZEN_SECONDS + PATIENCE)


def test_a_setting_that_is_wrong_stops_the_engine_with_a_sentence(
    model: Path, start_engine: StartEngine, runtime_dir: Path
) -> None:
    """It names the key, its value and what is possible."""
    options = SglangServerOptions(model, linker={"runtime_dir": str(runtime_dir), "leese": 3})
    engine = start_engine(options)
    with pytest.raises(DemoError, match="leese"):
        engine.wait_ready()
