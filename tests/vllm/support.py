"""Prompts, engines and traffic for the tests with the real engine."""

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from kvd_tools.demo_vllm.engine import EngineProcess
from kvd_tools.demo_vllm.models import DEFAULTS, Kind, write_model
from kvd_tools.demo_vllm.options import EngineOptions, kvd_transfer
from kvd_tools.demo_vllm.rounds import ATTACHED
from kvd_tools.demo_vllm.wire import Answer
from tests.conftest import Daemon
from tests.waiting import DEADLINE, PATIENCE, eventually

ROOT = Path(__file__).parents[2]
BLOCK = 32
TEST_SECONDS = 900  # of a test that starts engines: on a busy machine each takes minutes
PROMPT_TOKENS = 400  # twelve blocks and a half: 384 tokens can be cached, whole chunks of 1, 2 or 4
CACHED_TOKENS = 384
MAX_MODEL_LEN = 1024
SHORT = list(range(2, 10))  # with its answer less than a block
# Log-probabilities of the same request in another batch; see test_corruption for what damage does.
TOLERANCE = 2e-3
GPU_BLOCKS: dict[str, int] = {"dense": 64, "hybrid": 160, "mla": 128}


def numbers(answer: Answer) -> tuple[list[int], list[dict[int, float]]]:
    """All that two equal answers have in common: tokens and log-probabilities."""
    assert not answer.error
    return answer.tokens, answer.logprobs


def pid_of(engine: EngineProcess, *titles: str) -> int:
    """The process of an engine that vLLM has given the first of these titles that there is."""
    assert engine._process is not None
    found = {}
    for process in psutil.Process(engine._process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            found[process.pid] = " ".join(process.cmdline())
    return next(pid for title in titles for pid in sorted(found) if found[pid].startswith(title))


def prompts(count: int, seed: int = 0, tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    """Random prompts that share nothing."""
    source = random.Random(seed)
    vocab = DEFAULTS["dense"].vocab
    return [[source.randrange(2, vocab) for _ in range(tokens)] for _ in range(count)]


@dataclass(frozen=True)
class Setting:
    """What decides an engine's answers."""

    kind: Kind = "dense"
    tensor_parallel: int = 1

    def options(self, models: Path, kv_transfer: dict[str, Any] | None = None) -> EngineOptions:
        """An engine of this setting, with or without a cache behind it."""
        return EngineOptions(
            model=write_model(models / self.kind, self.kind),
            num_gpu_blocks=GPU_BLOCKS[self.kind],
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK,
            tensor_parallel=self.tensor_parallel,
            threads=1,
            kv_transfer=kv_transfer,
        )


def with_in_process_copy(options: EngineOptions) -> EngineOptions:
    """The same engine with vLLM's own offloading and a copy inside the engine.

    MLA needs it to be warm on a CPU without AMX: vLLM has no prefix cache of its own there.
    """
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "InProcessSpec",
            "spec_module_path": "bench.in_process",
            "blocks_per_chunk": 2,
            "bytes": 64 * 2**20,
        },
    }
    return replace(options, kv_transfer=transfer, env={"PYTHONPATH": str(ROOT)})


@dataclass(frozen=True)
class References:
    """Answers of an engine without kvd: computed, and with the prompt in its own cache."""

    prompts: list[list[int]]
    cold: list[Answer]
    warm: list[Answer]


def compute_references(engine: EngineProcess, count: int) -> References:
    """Ask an engine that no daemon serves, prompt by prompt, each twice."""
    asked = prompts(count)
    cold, warm = [], []
    for prompt in asked:
        cold += engine.generate([prompt])
        warm += engine.generate([prompt])
    assert [answer.cached_tokens for answer in cold] == [0] * count
    assert {answer.cached_tokens for answer in warm} == {CACHED_TOKENS}
    engine.reset()
    return References(asked, cold, warm)


def with_kvd(options: EngineOptions, runtime_dir: Path, **extra: Any) -> EngineOptions:
    """The same engine with kvd behind it, and with patience where nothing else is said."""
    patience = {"deadline": DEADLINE, "load_timeout": DEADLINE}
    return replace(options, kv_transfer=kvd_transfer(runtime_dir, **(patience | extra)))


def far_apart(a: Answer, b: Answer, tolerance: float = TOLERANCE) -> str:
    """How two answers differ by more than another batch explains; "" if they do not."""
    if a.error or b.error:
        return f"an answer is incomplete: {a.error or b.error}"
    if len(a.tokens) != len(b.tokens):
        return f"{len(a.tokens)} and {len(b.tokens)} tokens"
    for at, (one, other) in enumerate(zip(a.tokens, b.tokens, strict=True)):
        if one != other:
            return f"token {at} is {one} and {other}"
        theirs = b.logprobs[at]
        gap = max(
            (
                abs(value - theirs[token])
                for token, value in a.logprobs[at].items()
                if token in theirs
            ),
            default=float("inf"),
        )
        if gap > tolerance:
            return f"log-probabilities of token {at} differ by {gap:.2g}"
    return ""


def chunks_of(daemon: Daemon) -> dict[str, int]:
    """Chunks by state, over all namespaces."""
    total: dict[str, int] = {}
    for namespace in daemon.status()["namespaces"]:
        for state, count in namespace["chunks"].items():
            total[state] = total.get(state, 0) + count
    return total


def wait_for(what: str, test: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """Ask until the answer is true, and return it."""
    end = time.monotonic() + seconds
    while not (answer := test()):
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)  # the daemon's state is asked for, it sends no events
    return answer


def wait_attached(daemon: Daemon, engines: int = 1) -> None:
    """Until so many engines have all their ranks registered, and their schedulers are there.

    After an outage each of an engine's processes finds the daemon by itself.
    """

    def whole(engine: dict[str, Any]) -> bool:
        kinds = [session["kind"] for session in engine["sessions"]]
        return engine["attached"] and "scheduler" in kinds

    wait_for(
        f"{engines} engines attached",
        lambda: sum(map(whole, daemon.status()["engines"])) >= engines,
    )


def wait_served(daemon: Daemon, *engines: EngineProcess) -> int:
    """Until these engines are attached, and their schedulers know it; prompt tokens it took.

    The daemon says so to the engine after it has said so in its status: what is asked in between
    is neither found nor stored. The prompts are too short for a chunk.
    """
    wait_attached(daemon, len(engines))
    tokens = 0
    for engine in engines:

        def knows(engine: EngineProcess = engine) -> bool:
            nonlocal tokens
            engine.generate([SHORT])  # vLLM renews the metric with every step
            tokens += len(SHORT)
            return metric(engine, ATTACHED) > 0

        wait_for(f"{engine} knows that it is attached", knows)
    return tokens


def metric(engine: EngineProcess, name: str) -> float:
    """A metric's value, over all labels."""
    values = engine.metrics().items()
    return sum(value for key, value in values if key.partition("{")[0] in {name, f"{name}_total"})


def wait_told(daemon: Daemon, tokens: int) -> int:
    """Prompt tokens found, once the engine has told of so many asked for."""

    def told() -> dict[str, int]:
        (engine,) = daemon.status()["engines"]
        found: dict[str, int] = engine["counters"]
        return found

    return eventually(told, lambda found: found["lookup_tokens"] == tokens)["hit_tokens"]


def wait_stored(daemon: Daemon, at_least: int = 1) -> int:
    """Until nothing is being written; how many chunks are there."""

    def settled() -> int:
        found = chunks_of(daemon)
        quiet = found.get("writing", 0) + found.get("draining", 0) == 0
        return found["ready"] if quiet and found.get("ready", 0) >= at_least else 0

    try:
        ready: int = wait_for(f"{at_least} chunks stored", settled)
    except AssertionError as error:
        raise AssertionError(f"{error}: {daemon.status()}") from None
    return ready


def lane_pid(daemon: Daemon) -> int:
    """The process of the host lane."""
    (pid,) = [lane["pid"] for lane in daemon.status()["lanes"] if lane["device"] == "host"]
    return int(pid)


class Traffic:
    """Prompts sent all the while, a few at a time; every answer is kept.

    Args:
        engine: who answers.
        references: the prompts and what the answers should be.
        at_once: prompts in flight.
    """

    def __init__(self, engine: EngineProcess, references: References, at_once: int = 3) -> None:
        self._engine = engine
        self._references = references
        self._at_once = at_once
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._next = 0
        self.answers: list[tuple[int, Answer]] = []
        self.errors: list[BaseException] = []

    def __enter__(self) -> Self:
        for number in range(self._at_once):
            thread = threading.Thread(target=self._run, name=f"traffic {number}", daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE)
            assert not thread.is_alive(), "an answer is still awaited"

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                index = self._next % len(self._references.prompts)
                self._next += 1
            try:
                answer = self._engine.submit(self._references.prompts[index]).result(PATIENCE)
            except BaseException as error:  # noqa: BLE001  # told by `check`
                self.errors.append(error)
                return
            self.answers.append((index, answer))

    def wait_answers(self, more: int) -> None:
        """Until so many more answers have come."""
        target = len(self.answers) + more
        wait_for(f"{more} more answers", lambda: len(self.answers) >= target or self.errors)

    def check(self) -> str:
        """A line about what was answered; fails where one answer is not as it should be."""
        assert not self.errors, self.errors
        assert self.answers
        for index, answer in self.answers:
            assert not far_apart(answer, self._references.cold[index]), index
        hits = sum(answer.cached_tokens > 0 for _, answer in self.answers)
        slowest = max(answer.seconds for _, answer in self.answers)
        return f"{len(self.answers)} answers, {hits} with hits, the slowest took {slowest:.1f} s"


def ask_all(engine: EngineProcess, asked: Iterable[list[int]]) -> list[Answer]:
    """Answers one by one, so that the batch is the same as for the references."""
    return [engine.generate([prompt])[0] for prompt in asked]


def results(futures: Iterable[Future[Answer]]) -> list[Answer]:
    """Answers that were asked for."""
    return [future.result(PATIENCE) for future in futures]
