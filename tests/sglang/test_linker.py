"""kvd behind a real SGLang engine: its answers are those of an engine without it."""

import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvd_tools.demo_vllm.models import write_model
from tests.conftest import StartDaemon
from tests.daemon.serving import Daemon
from tests.sglang.engine import Answer, Engine
from tests.waiting import eventually

TOLERANCE = 2e-3  # of log-probabilities: how a prompt is cut into chunks changes sums' order
LENGTH = 700
PROMPTS = [[(7 * i + 131 * p) % 1000 + 3 for i in range(LENGTH)] for p in range(4)]
OTHERS = [[(11 * i + 17 * p) % 1000 + 3 for i in range(900)] for p in range(8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model with random weights of ordinary scale."""
    return write_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """Answers of an engine without an external cache."""
    log = tmp_path_factory.mktemp("plain") / "engine.log"
    with Engine(model, log, page_size=16) as engine:
        return one_by_one(engine, PROMPTS)


@pytest.fixture
def folder() -> Iterator[Path]:
    """For logs."""
    with tempfile.TemporaryDirectory(prefix="kvd-sglang-") as path:
        yield Path(path)


def one_by_one(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """Answers to prompts that are sent one after another."""
    return [engine.generate([prompt])[0] for prompt in prompts]


def push_out(engine: Engine) -> None:
    """Fill the engine's own cache with other prompts."""
    one_by_one(engine, OTHERS)


def check(answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """The same tokens, and log-probabilities as near as the engine's own are."""
    for answer, right in zip(answers, expected, strict=True):
        assert not answer.aborted
        assert answer.tokens == right.tokens
        assert answer.logprobs == pytest.approx(right.logprobs, abs=TOLERANCE)


def stored(daemon: Daemon, chunks: int) -> None:
    """Wait until so many chunks are READY."""
    eventually(
        daemon.status,
        lambda report: sum(n["chunks"]["ready"] for n in report["namespaces"]) >= chunks,
    )


def test_the_answers_are_worth_comparing(expected: list[Answer]) -> None:
    """They differ from prompt to prompt, and the model is not sure of itself everywhere."""
    assert len({tuple(answer.tokens) for answer in expected}) == len(expected)
    assert min(min(answer.logprobs) for answer in expected) < -0.1


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_what_was_pushed_out_comes_back(
    daemon: Daemon, model: Path, expected: list[Answer], folder: Path, page_size: int
) -> None:
    """Prompts that have left the engine's cache are found in kvd's, and in a new engine."""
    found = (LENGTH - 1) // 64 * 64
    with Engine(model, folder / "one.log", daemon.runtime_dir, page_size=page_size) as engine:
        check(one_by_one(engine, PROMPTS), expected)
        stored(daemon, len(PROMPTS) * (LENGTH // 64))
        push_out(engine)
        answers = one_by_one(engine, PROMPTS)
        check(answers, expected)
        assert min(answer.cached for answer in answers) >= found
        push_out(engine)
        together = engine.generate(PROMPTS)
        check(together, expected)
    with Engine(model, folder / "two.log", daemon.runtime_dir, page_size=page_size) as engine:
        answers = one_by_one(engine, PROMPTS)
        check(answers, expected)
        assert min(answer.cached for answer in answers) >= found


def test_two_ranks_load_alike(
    daemon: Daemon, model: Path, expected: list[Answer], folder: Path
) -> None:
    """With tensor parallelism each rank has chunks of its own, and both find the same prefix."""
    with Engine(model, folder / "tp.log", daemon.runtime_dir, page_size=16, tp_size=2) as engine:
        check(one_by_one(engine, PROMPTS), expected)
        stored(daemon, 2 * len(PROMPTS) * (LENGTH // 64))
        push_out(engine)
        answers = one_by_one(engine, PROMPTS)
        check(answers, expected)
        assert min(answer.cached for answer in answers) >= 640


def test_an_engine_starts_without_a_daemon(
    model: Path, expected: list[Answer], folder: Path, tmp_path: Path
) -> None:
    """It answers as ever, and finds nothing."""
    with Engine(model, folder / "absent.log", tmp_path / "absent", page_size=16) as engine:
        check(one_by_one(engine, PROMPTS[:1]), expected[:1])


def test_a_killed_daemon_is_a_cache_that_misses(
    start_daemon: StartDaemon,
    model: Path,
    expected: list[Answer],
    folder: Path,
) -> None:
    """Without it prompts are computed; with the one that follows they are found again."""
    daemon = start_daemon("--keep-pool", "yes")
    with Engine(model, folder / "engine.log", daemon.runtime_dir, page_size=16) as engine:
        check(one_by_one(engine, PROMPTS), expected)
        stored(daemon, len(PROMPTS) * (LENGTH // 64))
        daemon.stop(signal.SIGKILL)
        push_out(engine)
        answers = one_by_one(engine, PROMPTS)
        check(answers, expected)
        assert max(answer.cached for answer in answers) < 64
        push_out(engine)
        start_daemon("--keep-pool", "yes")
        eventually(lambda: engine.generate([PROMPTS[0]])[0].cached, lambda cached: cached >= 640)
        check(one_by_one(engine, PROMPTS), expected)
