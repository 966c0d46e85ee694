"""One engine, whose daemon is small or fails in every way: it goes on, and finds hits again."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from kvd_client.routes import EXPORT, STAGING, Transfer
from kvd_client.vllm.metrics import LOAD_FAILURES
from kvd_tools.vllm_engine import VllmServer
from tests.conftest import Daemon, StartDaemon
from tests.engine_answers import TEST_SECONDS, check, check_equal
from tests.vllm.conftest import StartEngine
from tests.vllm.support import (
    BLOCK,
    CACHED_TOKENS,
    SHORT,
    References,
    Setting,
    Traffic,
    ask_found,
    check_transfer,
    chunks_of,
    compute_references,
    prompts,
    results,
    stored_chunks,
    wait_served,
    wait_stored,
    with_kvd,
)
from tests.waiting import eventually

DENSE = Setting("dense")
LOAD_TIMEOUT, PREEMPTION_TIMEOUT = 10.0, 2.0  # of lanes that stand still
ROUNDS = 10  # of asking the same prompts
LOADS, WAITING = "vllm:kv_offload_load_size_count", "vllm:num_requests_waiting"

pytestmark = pytest.mark.timeout(TEST_SECONDS)
rarely_staged = pytest.mark.parametrize(
    "transfer", [EXPORT, pytest.param(STAGING, marks=pytest.mark.nightly)], indirect=True
)


@pytest.fixture(scope="module", params=[EXPORT, STAGING])
def transfer(request: pytest.FixtureRequest) -> Transfer:
    """The way of the engine's bytes."""
    way: Transfer = request.param
    return way


@pytest.fixture(scope="module")
def engine(
    transfer: Transfer, models: Path, module_dir: Path, start_engine: StartEngine
) -> Iterator[VllmServer]:
    """One engine for all these failures; when it starts there is no daemon."""
    options = with_kvd(
        DENSE.options(models),
        module_dir,
        blocks_per_chunk=2,
        load_timeout=LOAD_TIMEOUT,
        preemption_timeout=PREEMPTION_TIMEOUT,
        transfer=transfer,
    )
    engine = start_engine(options)
    engine.wait_ready()
    check_transfer(engine, transfer)
    yield engine
    engine.kill()


@pytest.fixture(scope="module")
def known(engine: VllmServer) -> References:
    """What the answers should be: asked before the first daemon starts."""
    return compute_references(engine, 10)


class Served:
    """The engine, and a daemon whose lane can be frozen.

    Attributes:
        daemon: the latest one.
    """

    def __init__(
        self, engine: VllmServer, known: References, start: Callable[[], Daemon], config: Path
    ) -> None:
        self.engine, self.known = engine, known
        self._start, self._config = start, config
        self._frozen = list[int]()
        self.set_lane_timeout(120.0)
        self.start_daemon()

    def start_daemon(self) -> None:
        """Start a daemon where the engine looks for it, and wait until it serves the engine."""
        self.daemon = self._start()
        wait_served(self.daemon, self.engine)

    def set_lane_timeout(self, seconds: float) -> None:
        """How long a daemon that reads its settings leaves a frozen lane alone."""
        self._config.write_text(f"lane_timeout_seconds = {seconds}\n")

    def lane_pid(self) -> int:
        """The process of the host lane."""
        lanes = self.daemon.status()["lanes"]
        (pid,) = [lane["pid"] for lane in lanes if lane["device"] == "host"]
        return int(pid)

    def freeze_lane(self) -> int:
        """Stop the lane's process."""
        pid = self.lane_pid()
        self._frozen.append(pid)
        os.kill(pid, signal.SIGSTOP)
        return pid

    def thaw(self) -> None:
        """Let lanes go on that are still there: a lane ends with its broker."""
        for pid in self._frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def wait_chunks(self, state: str) -> None:
        """Until there are chunks in this state."""
        eventually(lambda: chunks_of(self.daemon)[state])

    def store_all(self) -> None:
        """Every prompt's chunks into the pool, and off the GPU."""
        ask_found(self.engine, self.known.prompts)
        self.engine.reset()

    def check_hits(self) -> None:
        """What is stored from now on is found, and is right to the last bit."""
        wait_served(self.daemon, self.engine)
        check_equal(ask_found(self.engine, self.known.prompts), self.known.warm)


@pytest.fixture
def served(
    engine: VllmServer,
    known: References,
    module_dir: Path,
    start_daemon: StartDaemon,
    tmp_path: Path,
) -> Iterator[Served]:
    """The engine with a daemon of this test's own."""
    config = tmp_path / "kvd.toml"

    def start() -> Daemon:
        return start_daemon("--config", str(config), cpu_bytes="64MiB", where=module_dir)

    served = Served(engine, known, start, config)
    yield served
    served.thaw()


@pytest.mark.parametrize("during", ["stores", "loads"])
def test_an_engine_serves_through_the_death_of_the_broker(served: Served, during: str) -> None:
    """Killed while stores or loads are in flight; back after a while: hits again."""
    served.engine.reset()
    if during == "loads":
        served.store_all()
    served.freeze_lane()  # it does not finish what it is given
    with Traffic(served.engine, served.known) as traffic:
        served.wait_chunks("writing" if during == "stores" else "pinned")
        served.daemon.process.kill()
        served.thaw()
        traffic.wait_answers(6)
        served.start_daemon()
        traffic.wait_answers(len(served.known.prompts))
    print(traffic.check())
    served.check_hits()


@pytest.mark.parametrize("fate", [pytest.param("killed", marks=pytest.mark.nightly), "frozen"])
def test_an_engine_serves_through_the_loss_of_a_lane(served: Served, fate: str) -> None:
    """A lane that is killed or hangs with loads in flight: they are computed, a new lane comes."""
    served.store_all()
    before = served.engine.metric(LOAD_FAILURES)
    with Traffic(served.engine, served.known) as traffic:
        lane = served.freeze_lane()
        # Chunks are pinned before the rank is given the load, and stay so when it has ended, until
        # the scheduler knows. After the steps of one more answer only what the lane keeps is
        # pinned, or what came meanwhile; and after those of another one the rank has that, too.
        for _ in range(2):
            served.wait_chunks("pinned")
            served.engine.generate([SHORT])
        if fate == "killed":
            os.kill(lane, signal.SIGKILL)
        else:  # from now on it is one that hangs
            served.set_lane_timeout(5.0)
            served.daemon.process.send_signal(signal.SIGHUP)
        eventually(lambda: served.lane_pid() not in {lane, 0})
        traffic.wait_answers(len(served.known.prompts))
    print(traffic.check())
    assert served.engine.metric(LOAD_FAILURES) > before
    served.check_hits()


@rarely_staged
def test_a_load_that_takes_too_long_is_computed(served: Served, transfer: Transfer) -> None:
    """After load_timeout the load is stopped, and its request is computed.

    Once the lane has answered, if it writes to the engine's blocks; at once with staging.
    """
    engine, known = served.engine, served.known
    served.store_all()
    before = engine.metric(LOAD_FAILURES)

    def stops() -> int:
        """How often the engine has said that it stops a load."""
        return engine.log.read_text(errors="replace").count("load_timeout")

    # The engine says that it stops the load before it asks the lane to, and nothing tells when
    # the lane has been asked: one that has not when it goes on loads, and then the next is tried.
    for prompt, cold, warm in zip(known.prompts, known.cold, known.warm, strict=True):
        served.freeze_lane()
        stops_before = stops()
        late = engine.submit(prompt)
        eventually(stops, stops_before.__lt__)
        if transfer == STAGING:
            results([late])
        assert late.done() == (transfer == STAGING)
        engine.generate([SHORT])
        assert stops() == stops_before + 1
        served.thaw()
        (answer,) = results([late])
        check_equal([answer], [warm if answer.cached_tokens else cold])
        if not answer.cached_tokens:
            break
    assert answer.cached_tokens == 0
    assert engine.metric(LOAD_FAILURES) == before + 1
    served.check_hits()


def test_blocks_that_preemption_takes_from_a_store_do_not_spoil_it(served: Served) -> None:
    """Preempted with stores in flight: the stores are done or void, never of the new contents."""
    engine, daemon = served.engine, served.daemon
    asked, tokens = prompts(4, seed=4), 160  # with its answer a prompt needs 18 of 63 blocks
    engine.reset()
    skip = {"max_offload_tokens": 0, "max_load_tokens": 0}
    expected = [
        answer
        for prompt in asked
        for answer in engine.generate([prompt], tokens, kv_transfer_params=skip)
    ]
    engine.reset()
    preemptions = engine.metric("vllm:num_preemptions")

    def is_preempted() -> bool:  # vLLM counts it with the next token of the request
        return engine.metric("vllm:num_preemptions") > preemptions

    def is_over() -> bool:
        return is_preempted() or all(request.done() for request in running)

    served.freeze_lane()
    for _ in range(ROUNDS):  # requests that the server takes late need no preemption
        running = [engine.submit(prompt, tokens) for prompt in asked]
        served.wait_chunks("writing")
        eventually(is_over)
        if is_preempted():
            break
        check(results(running), expected)
    assert is_preempted()
    served.thaw()
    check(results(running), expected)

    wait_served(daemon, engine)
    eventually(lambda: not chunks_of(daemon)["writing"])
    for _ in range(ROUNDS):  # what is in the pool now, and in the end all of it
        engine.reset()
        answers = [engine.generate([prompt], tokens)[0] for prompt in asked]
        check(answers, expected)
        if {answer.cached_tokens for answer in answers} == {CACHED_TOKENS}:
            return
    pytest.fail(f"not all of it is stored: {[answer.cached_tokens for answer in answers]}")


@pytest.mark.parametrize("lane", ["works", "killed"])
def test_requests_with_one_prefix_share_a_load(served: Served, lane: str) -> None:
    """All that come at once find the prefix by one load; if it fails, they are answered as well."""
    engine, daemon = served.engine, served.daemon
    (prefix,) = prompts(1, seed=5, tokens=8 * BLOCK)
    asked = [prefix + tail for tail in prompts(16, seed=6, tokens=8)]
    skip = {"max_offload_tokens": 0, "max_load_tokens": 0}
    engine.reset()
    expected = [engine.generate([prompt], kv_transfer_params=skip)[0] for prompt in asked]
    ask_found(engine, asked[:1], len(prefix))
    wait_stored(daemon)
    engine.reset()
    loads, failures = engine.metric(LOADS), engine.metric(LOAD_FAILURES)

    pid = served.freeze_lane()
    running = [engine.submit(prompt) for prompt in asked]
    eventually(lambda: engine.metric(WAITING), float(len(asked)).__eq__)
    served.wait_chunks("pinned")
    if lane == "killed":
        os.kill(pid, signal.SIGKILL)
    served.thaw()
    answers = results(running)
    check(answers, expected)
    if lane == "works":
        assert {answer.cached_tokens for answer in answers} == {len(prefix)}
        assert engine.metric(LOADS) == loads + 1
    assert engine.metric(LOAD_FAILURES) - failures == (lane == "killed")
    eventually(lambda: not chunks_of(daemon)["pinned"])


def core_pid(engine: VllmServer) -> int:
    """The process of an engine's core."""
    for process in psutil.Process(engine.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if " ".join(process.cmdline()).startswith("VLLM::EngineCore"):
                return process.pid
    raise AssertionError("no process is the engine's core")


@rarely_staged
def test_a_dead_engine_leaves_nothing_and_its_successor_hits(
    served: Served, models: Path, start_engine: StartEngine, module_dir: Path
) -> None:
    """Killed with stores in flight: its slots and leases are free, its stored chunks are found.

    The last test of this module, whose engine it is.
    """
    engine, daemon, known = served.engine, served.daemon, served.known
    ask_found(engine, known.prompts[:5])
    ready = wait_stored(daemon)
    served.freeze_lane()
    for prompt in known.prompts[5:7]:
        engine.submit(prompt)
    served.wait_chunks("writing")
    os.kill(core_pid(engine), signal.SIGKILL)
    served.thaw()
    eventually(lambda: not daemon.status()["engines"])
    chunks = eventually(
        lambda: chunks_of(daemon), lambda c: not c["writing"] + c["draining"] + c["pinned"]
    )
    assert chunks["ready"] >= ready
    stored = stored_chunks(daemon)
    successor = start_engine(with_kvd(DENSE.options(models), module_dir, blocks_per_chunk=2))
    successor.wait_ready()
    wait_served(daemon, successor)
    check_equal(ask_found(successor, known.prompts[:5]), known.warm)
    assert stored_chunks(daemon) == stored
    successor.kill()
