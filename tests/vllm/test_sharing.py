"""Several engines on one daemon: what they share, and what they take from each other."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import vllm

from kvd_client.routes import EXPORT, STAGING, Transfer
from kvd_client.vllm.options import release
from kvd_tools.vllm_engine import VllmServer
from tests.conftest import StartDaemon
from tests.engine_answers import TEST_SECONDS, ask_all, check, check_equal
from tests.vllm.conftest import StartEngine
from tests.vllm.support import (
    CACHED_TOKENS,
    MAX_MODEL_LEN,
    References,
    Setting,
    Traffic,
    ask_found,
    check_transfer,
    chunks_of,
    compute_references,
    prompts,
    stored_chunks,
    wait_served,
    wait_stored,
    with_kvd,
)
from tests.waiting import eventually

BLOCKS_PER_CHUNK = 4

pytestmark = pytest.mark.timeout(TEST_SECONDS)


@dataclass
class Pair:
    """Two engines of one hybrid model; when they start there is no daemon.

    Attributes:
        first: exports its KV cache.
        second: copies it through staging memory.
    """

    first: VllmServer
    second: VllmServer
    known: References

    def of(self, transfer: Transfer) -> VllmServer:
        """The engine whose bytes take this way."""
        return self.first if transfer == EXPORT else self.second


@pytest.fixture(scope="module")
def pair(models: Path, module_dir: Path, start_engine: StartEngine) -> Pair:
    """They look for a daemon in `module_dir`."""
    first, second = [
        start_engine(
            with_kvd(
                Setting("hybrid").options(models),
                module_dir,
                blocks_per_chunk=BLOCKS_PER_CHUNK,
                transfer=transfer,
            )
        )
        for transfer in (EXPORT, STAGING)
    ]
    first.wait_ready()
    second.wait_ready()
    check_transfer(first, EXPORT)
    check_transfer(second, STAGING)
    return Pair(first, second, compute_references(first, 8))


def test_engines_of_one_model_share_chunks(
    pair: Pair, module_dir: Path, start_daemon: StartDaemon
) -> None:
    """What one engine stored the other loads: to the last bit what it has by itself.

    Whichever way the bytes of either take, there and back.
    """
    daemon = start_daemon(where=module_dir)
    wait_served(daemon, pair.first, pair.second)
    for writer, reader, part in (
        (pair.first, pair.second, slice(0, 4)),
        (pair.second, pair.first, slice(4, 8)),
    ):
        asked, warm = pair.known.prompts[part], pair.known.warm[part]
        cold = ask_all(writer, asked)
        check_equal(cold, pair.known.cold[part])
        assert {answer.cached_tokens for answer in cold} == {0}
        check_equal(ask_found(writer, asked), warm)
        wait_stored(daemon)
        stored = stored_chunks(daemon)
        check_equal(ask_found(reader, asked), warm)
        assert stored_chunks(daemon) == stored  # one namespace, which `stored_chunks` asserts
    eventually(
        lambda: [engine["counters"]["hit_tokens"] for engine in daemon.status()["engines"]],
        lambda hit_tokens: min(hit_tokens) >= len(pair.known.prompts) * CACHED_TOKENS,
    )


@pytest.mark.parametrize("transfer", [EXPORT, STAGING])
def test_windows_that_begin_inside_each_others_chunks_are_found(
    pair: Pair, module_dir: Path, start_daemon: StartDaemon, transfer: Transfer
) -> None:
    """A chunk stored from a window's edge on is a miss where all of it is needed."""
    engine = pair.of(transfer)
    (text,) = prompts(1, seed=3, tokens=MAX_MODEL_LEN)
    edges = [text[:length] for length in (232, 360, 488)]  # windows begin inside chunks
    asked = [text[:length] for length in (136, 264, 392, 232, 520, 360, 488, 700)]
    engine.reset()
    expected = ask_all(engine, asked)
    engine.reset()

    daemon = start_daemon(where=module_dir)
    wait_served(daemon, engine)
    # The engine's own cache has the prompts, kvd's nothing: of the windows only what is behind
    # their edges is still there to be stored.
    ask_all(engine, edges)
    wait_stored(daemon)
    clear = [*(sys.executable, "-m", "kvd", "clear", "--yes"), "--runtime-dir", str(module_dir)]
    subprocess.run(clear, check=True)
    assert [answer.cached_tokens for answer in ask_all(engine, edges)] == [224, 352, 480]
    wait_stored(daemon)

    def ask() -> list[int]:
        engine.reset()
        answers = []
        for prompt in asked:
            answers += engine.generate([prompt])
            wait_stored(daemon)  # what is replaced is not loaded any more
        check(answers, expected)
        return [answer.cached_tokens for answer in answers]

    ask()
    # Of the shorter ones that come later the engine's own cache has single blocks, too.
    eventually(ask, [128, 256, 384, 224, 512, 352, 480, 640].__eq__)
    (namespace,) = daemon.status()["namespaces"]
    counters = namespace["counters"]
    assert counters["pins_late"] == 0  # no load was planned that could not be done
    if release(vllm.__version__) == "0.32":
        assert counters["replaced"] >= len(edges)
    else:  # a chunk that lacks needed blocks is not stored at all
        assert counters["replaced"] == 0


@pytest.mark.parametrize("transfer", [EXPORT, STAGING])
def test_prompts_that_begin_alike_are_found_at_once(
    pair: Pair, module_dir: Path, start_daemon: StartDaemon, transfer: Transfer
) -> None:
    """Each loads its own windows, beside the others' loads: the answers are as without kvd."""
    engine, (prefix,) = pair.of(transfer), prompts(1, seed=5, tokens=256)
    asked = [prefix + tail for tail in prompts(6, seed=6, tokens=144)]
    engine.reset()
    expected = ask_all(engine, asked)
    daemon = start_daemon(where=module_dir)
    wait_served(daemon, engine)
    ask_found(engine, asked)
    wait_stored(daemon)
    engine.reset()
    answers = engine.generate(asked)
    check(answers, expected)
    assert {answer.cached_tokens for answer in answers} == {CACHED_TOKENS}
    eventually(lambda: not chunks_of(daemon)["pinned"])


def test_engines_that_evict_each_others_chunks_answer_as_without(
    pair: Pair, module_dir: Path, start_daemon: StartDaemon
) -> None:
    """In a pool for two prompts; what is evicted before its load is computed."""
    known = pair.known
    engines = (pair.first, pair.second)
    daemon = start_daemon(where=module_dir)
    wait_served(daemon, *engines)
    ask_found(pair.first, known.prompts[:1])
    needed = wait_stored(daemon)
    (namespace,) = daemon.status()["namespaces"]
    daemon.stop()
    two_prompts = str(2 * needed * namespace["bytes_per_chunk"])
    daemon = start_daemon(cpu_bytes=two_prompts, where=module_dir)
    wait_served(daemon, *engines)
    with Traffic(pair.first, known, at_once=2) as one, Traffic(pair.second, known) as other:
        one.wait_answers(2 * len(known.prompts))
        other.wait_answers(2 * len(known.prompts))
    print(one.check(), other.check(), sep="\n")
    assert daemon.status()["namespaces"][0]["counters"]["evicted"] > 0
    for engine in engines:  # so small a pool has few slots to lend at a time
        check_equal(ask_found(engine, known.prompts[:1]), known.warm)
