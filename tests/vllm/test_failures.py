"""One engine, whose daemon is small or fails in every way: it goes on, and finds hits again."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvd_client.vllm.metrics import LOAD_FAILURES
from kvd_tools.vllm_engine import VllmServer
from tests.conftest import Daemon, StartDaemon
from tests.vllm.conftest import StartEngine
from tests.vllm.support import (
    CACHED_TOKENS,
    SHORT,
    TEST_SECONDS,
    References,
    Setting,
    Traffic,
    ask_all,
    ask_found,
    chunks_of,
    compute_references,
    far_apart,
    lane_pid,
    numbers,
    pid_of,
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
CHUNK_TOKENS, CHUNK_BYTES = 64, 128 * 1024  # of two blocks, in four layers of two heads of 32
HOT_CHUNKS, COLD_CHUNKS, POOL_CHUNKS = 10, 5, 32

pytestmark = pytest.mark.timeout(TEST_SECONDS)


@pytest.fixture(scope="module")
def engine(models: Path, module_dir: Path, start_engine: StartEngine) -> VllmServer:
    """One engine for all these failures; when it starts there is no daemon."""
    options = with_kvd(
        DENSE.options(models),
        module_dir,
        blocks_per_chunk=2,
        load_timeout=LOAD_TIMEOUT,
        preemption_timeout=PREEMPTION_TIMEOUT,
    )
    engine = start_engine(options)
    engine.wait_ready()
    return engine


@pytest.fixture(scope="module")
def known(engine: VllmServer) -> References:
    """What the answers should be: asked before the first daemon starts."""
    return compute_references(engine, 10)


@pytest.fixture
def new_daemon(
    module_dir: Path, start_daemon: StartDaemon, engine: VllmServer, known: References
) -> Callable[..., Daemon]:
    """Starts a daemon where the engine looks for it, and waits until it serves the engine."""
    del known  # which is asked for first

    def start(*extra: str, cpu_bytes: str = "64MiB") -> Daemon:
        daemon = start_daemon(*extra, cpu_bytes=cpu_bytes, where=module_dir)
        wait_served(daemon, engine)
        return daemon

    return start


@pytest.fixture
def thaw() -> Iterator[list[int]]:
    """Processes in this list go on at the end of the test, if it did not come so far."""
    frozen: list[int] = []
    yield frozen
    for pid in frozen:
        go_on(pid)


def freeze(pid: int, thaw: list[int]) -> None:
    """Stop a process."""
    thaw.append(pid)
    os.kill(pid, signal.SIGSTOP)


def go_on(pid: int) -> None:
    """Let a process go on, if it is still there: a lane ends with its broker."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def patient(folder: Path, lane_timeout: float = 120.0) -> Path:
    """Settings of a daemon that leaves a frozen lane alone, for so long."""
    config = folder / "kvd.toml"
    config.write_text(f"lane_timeout_seconds = {lane_timeout}\n")
    return config


def store_all(engine: VllmServer, known: References) -> None:
    """Every prompt's chunks into the pool, and off the GPU."""
    ask_found(engine, known.prompts)
    engine.reset()


def check_hits(engine: VllmServer, daemon: Daemon, known: References) -> None:
    """What is stored from now on is found, and is right to the last bit."""
    wait_served(daemon, engine)
    warm = ask_found(engine, known.prompts)
    for answer, reference in zip(warm, known.warm, strict=True):
        assert numbers(answer) == numbers(reference)


def test_a_prefix_that_the_engines_own_cache_serves_stays(
    engine: VllmServer, new_daemon: Callable[..., Daemon]
) -> None:
    """Asked again and again among others it is stored once, and the others make room."""
    (hot,) = prompts(1, seed=1, tokens=HOT_CHUNKS * CHUNK_TOKENS + 8)
    asked = [hot]
    for cold in prompts(6, seed=2, tokens=COLD_CHUNKS * CHUNK_TOKENS + 8):
        asked += [cold, hot]
    daemon = new_daemon(cpu_bytes=str(POOL_CHUNKS * CHUNK_BYTES))
    engine.reset()
    hits = []
    for prompt in asked:
        (answer,) = engine.generate([prompt])
        hits.append(answer.cached_tokens)
        wait_stored(daemon)  # only what is there can be used again
    assert hits == [0] + 6 * [0, HOT_CHUNKS * CHUNK_TOKENS]
    ask_found(engine, [hot], HOT_CHUNKS * CHUNK_TOKENS)
    (namespace,) = daemon.status()["namespaces"]
    assert namespace["num_chunks"] == POOL_CHUNKS
    assert namespace["counters"]["evicted"] > 0
    assert namespace["counters"]["stored"] <= HOT_CHUNKS + 6 * COLD_CHUNKS


@pytest.mark.parametrize(("during", "outage"), [("stores", 1), ("loads", 1), ("nothing", 10)])
def test_an_engine_serves_through_the_death_of_the_broker(
    during: str,
    outage: int,
    engine: VllmServer,
    known: References,
    new_daemon: Callable[..., Daemon],
    tmp_path: Path,
    thaw: list[int],
) -> None:
    """Killed while stores or loads are in flight, or idle; back after a while: hits again."""
    daemon = new_daemon("--config", str(patient(tmp_path)))
    engine.reset()
    if during == "loads":
        store_all(engine, known)
    lane = lane_pid(daemon)
    if during != "nothing":
        freeze(lane, thaw)  # it does not finish what it is given
    with Traffic(engine, known) as traffic:
        if during == "nothing":
            traffic.wait_answers(1)
        else:
            state = "writing" if during == "stores" else "pinned"
            eventually(lambda: chunks_of(daemon).get(state))
        daemon.process.kill()
        go_on(lane)
        end = time.monotonic() + outage
        traffic.wait_answers(3)
        time.sleep(max(0.0, end - time.monotonic()))  # the outage itself
        traffic.wait_answers(3)
        daemon = new_daemon()
        traffic.wait_answers(len(known.prompts))
    print(traffic.check())
    check_hits(engine, daemon, known)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_an_engine_serves_through_the_loss_of_a_lane(
    number: signal.Signals,
    engine: VllmServer,
    known: References,
    new_daemon: Callable[..., Daemon],
    tmp_path: Path,
    thaw: list[int],
) -> None:
    """A lane that is killed or hangs with loads in flight: they are computed, a new lane comes."""
    daemon = new_daemon("--config", str(patient(tmp_path)))
    store_all(engine, known)
    before = engine.metric(LOAD_FAILURES)
    lane = lane_pid(daemon)
    with Traffic(engine, known) as traffic:
        freeze(lane, thaw)
        # Chunks are pinned before the rank is given the load, and stay so when it has ended, until
        # the scheduler knows. After the steps of one more answer only what the lane keeps is
        # pinned, or what came meanwhile; and after those of another one the rank has that, too.
        for _ in range(2):
            eventually(lambda: chunks_of(daemon).get("pinned"))
            engine.generate([SHORT])
        if number == signal.SIGKILL:
            os.kill(lane, number)
        else:  # from now on it is one that hangs
            patient(tmp_path, lane_timeout=5.0)
            daemon.process.send_signal(signal.SIGHUP)
        eventually(lambda: lane_pid(daemon) not in {lane, 0})
        traffic.wait_answers(len(known.prompts))
    print(traffic.check())
    assert engine.metric(LOAD_FAILURES) > before
    check_hits(engine, daemon, known)


def test_a_load_that_takes_too_long_is_computed(
    engine: VllmServer,
    known: References,
    new_daemon: Callable[..., Daemon],
    tmp_path: Path,
    thaw: list[int],
) -> None:
    """After load_timeout the load is stopped, and its request is computed."""
    daemon = new_daemon("--config", str(patient(tmp_path)))
    store_all(engine, known)
    before = engine.metric(LOAD_FAILURES)
    lane = lane_pid(daemon)
    # The engine says that it stops the load before it asks the lane to, and nothing tells when
    # the lane has been asked: one that has not when it goes on loads, and then the next is tried.
    for prompt, cold, warm in zip(known.prompts, known.cold, known.warm, strict=True):
        freeze(lane, thaw)
        said = engine.log.read_text(errors="replace").count("load_timeout")
        late = engine.submit(prompt)

        def stops(said: int = said) -> bool:
            return engine.log.read_text(errors="replace").count("load_timeout") > said

        eventually(stops)
        assert not late.done()  # the lane could still write
        go_on(lane)
        (answer,) = results([late])
        assert numbers(answer) == numbers(warm if answer.cached_tokens else cold)
        if not answer.cached_tokens:
            break
    assert answer.cached_tokens == 0
    assert engine.metric(LOAD_FAILURES) == before + 1
    check_hits(engine, daemon, known)


def test_a_dead_engine_leaves_nothing_and_its_successor_hits(
    known: References,
    models: Path,
    start_daemon: StartDaemon,
    start_engine: StartEngine,
    tmp_path: Path,
    thaw: list[int],
) -> None:
    """Killed with stores in flight: its slots and leases are free, its stored chunks are found.

    Its worker is killed, and then the scheduler of its successor.
    """
    daemon = start_daemon("--config", str(patient(tmp_path)))
    options = with_kvd(DENSE.options(models), daemon.runtime_dir, blocks_per_chunk=2)
    lane = lane_pid(daemon)
    kept, stored = known.prompts[:5], 0
    for victim, others in (("worker", known.prompts[5:7]), ("core", known.prompts[7:])):
        engine = start_engine(replace(options))
        engine.wait_ready()
        wait_served(daemon, engine)
        if victim == "worker":
            for answer, cold in zip(ask_all(engine, kept), known.cold, strict=False):
                assert answer.cached_tokens == 0
                assert numbers(answer) == numbers(cold)
        for answer, warm in zip(ask_found(engine, kept), known.warm, strict=False):
            assert numbers(answer) == numbers(warm)
        ready = wait_stored(daemon)
        if victim == "core":
            assert stored_chunks(daemon) == stored  # by the engine before
        titles = ("VLLM::EngineCore",) if victim == "core" else ("VLLM::Worker", "VLLM::EngineCore")
        pid = pid_of(engine, *titles)  # an only worker may be inside the core
        freeze(lane, thaw)
        for prompt in others:
            engine.submit(prompt)
        eventually(lambda: chunks_of(daemon).get("writing"))
        os.kill(pid, signal.SIGKILL)
        go_on(lane)
        eventually(lambda: not daemon.status()["engines"])
        left = eventually(
            lambda: chunks_of(daemon), lambda c: not c["writing"] + c["draining"] + c["pinned"]
        )
        assert left["ready"] >= ready
        stored = stored_chunks(daemon)
        engine.kill()


def test_blocks_that_preemption_takes_from_a_store_do_not_spoil_it(
    engine: VllmServer, new_daemon: Callable[..., Daemon], tmp_path: Path, thaw: list[int]
) -> None:
    """Preempted with stores in flight: the stores are done or void, never of the new contents."""
    asked, tokens = prompts(6, seed=4), 160  # with its answer a prompt needs 18 of 63 blocks
    engine.reset()
    expected = [engine.generate([prompt], tokens)[0] for prompt in asked]
    engine.reset()
    preemptions = engine.metric("vllm:num_preemptions")

    daemon = new_daemon("--config", str(patient(tmp_path)))
    lane = lane_pid(daemon)
    freeze(lane, thaw)
    running = [engine.submit(prompt, tokens) for prompt in asked]
    eventually(lambda: chunks_of(daemon).get("writing"))
    while engine.metric("vllm:num_preemptions") == preemptions:  # as long as it generates
        generated = engine.metric("vllm:generation_tokens")
        eventually(lambda: engine.metric("vllm:generation_tokens"), generated.__lt__)
    go_on(lane)
    for answer, reference in zip(results(running), expected, strict=True):
        assert not far_apart(answer, reference)

    wait_served(daemon, engine)
    eventually(lambda: not chunks_of(daemon)["writing"])
    for _ in range(ROUNDS):  # what is in the pool now, and in the end all of it
        engine.reset()
        answers = [engine.generate([prompt], tokens)[0] for prompt in asked]
        for answer, reference in zip(answers, expected, strict=True):
            assert not far_apart(answer, reference)
        if {answer.cached_tokens for answer in answers} == {CACHED_TOKENS}:
            return
    pytest.fail(f"not all of it is stored: {[answer.cached_tokens for answer in answers]}")
