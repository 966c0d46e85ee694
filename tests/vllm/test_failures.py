"""One engine, whose daemon is small or fails in every way: it goes on, and finds hits again."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
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
    ask_found,
    chunks_of,
    compute_references,
    core_pid,
    far_apart,
    lane_pid,
    numbers,
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


@pytest.mark.parametrize("during", ["stores", "loads"])
def test_an_engine_serves_through_the_death_of_the_broker(
    during: str,
    engine: VllmServer,
    known: References,
    new_daemon: Callable[..., Daemon],
    tmp_path: Path,
    thaw: list[int],
) -> None:
    """Killed while stores or loads are in flight; back after a while: hits again."""
    daemon = new_daemon("--config", str(patient(tmp_path)))
    engine.reset()
    if during == "loads":
        store_all(engine, known)
    lane = lane_pid(daemon)
    freeze(lane, thaw)  # it does not finish what it is given
    with Traffic(engine, known) as traffic:
        state = "writing" if during == "stores" else "pinned"
        eventually(lambda: chunks_of(daemon).get(state))
        daemon.process.kill()
        go_on(lane)
        traffic.wait_answers(6)
        daemon = new_daemon()
        traffic.wait_answers(len(known.prompts))
    print(traffic.check())
    check_hits(engine, daemon, known)


@pytest.mark.parametrize("fate", [pytest.param("killed", marks=pytest.mark.nightly), "frozen"])
def test_an_engine_serves_through_the_loss_of_a_lane(
    fate: str,
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
        if fate == "killed":
            os.kill(lane, signal.SIGKILL)
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


def test_blocks_that_preemption_takes_from_a_store_do_not_spoil_it(
    engine: VllmServer, new_daemon: Callable[..., Daemon], tmp_path: Path, thaw: list[int]
) -> None:
    """Preempted with stores in flight: the stores are done or void, never of the new contents."""
    asked, tokens = prompts(4, seed=4), 160  # with its answer a prompt needs 18 of 63 blocks
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


def test_a_dead_engine_leaves_nothing_and_its_successor_hits(
    engine: VllmServer,
    known: References,
    models: Path,
    new_daemon: Callable[..., Daemon],
    start_engine: StartEngine,
    module_dir: Path,
    tmp_path: Path,
    thaw: list[int],
) -> None:
    """Killed with stores in flight: its slots and leases are free, its stored chunks are found.

    The last test of this module, whose engine it is.
    """
    daemon = new_daemon("--config", str(patient(tmp_path)))
    kept, others = known.prompts[:5], known.prompts[5:7]
    ask_found(engine, kept)
    ready = wait_stored(daemon)
    lane = lane_pid(daemon)
    freeze(lane, thaw)
    for prompt in others:
        engine.submit(prompt)
    eventually(lambda: chunks_of(daemon).get("writing"))
    os.kill(core_pid(engine), signal.SIGKILL)
    go_on(lane)
    eventually(lambda: not daemon.status()["engines"])
    left = eventually(
        lambda: chunks_of(daemon), lambda c: not c["writing"] + c["draining"] + c["pinned"]
    )
    assert left["ready"] >= ready
    stored = stored_chunks(daemon)
    successor = start_engine(with_kvd(DENSE.options(models), module_dir, blocks_per_chunk=2))
    successor.wait_ready()
    wait_served(daemon, successor)
    for answer, warm in zip(ask_found(successor, kept), known.warm, strict=False):
        assert numbers(answer) == numbers(warm)
    assert stored_chunks(daemon) == stored
