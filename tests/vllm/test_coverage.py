"""Kinds of models and parallelism: answers are those of an engine without kvd."""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvd_client.routes import EXPORT, STAGING, Transfer
from kvd_tools.engine_server import Completion
from kvd_tools.vllm_engine import VllmServer
from tests.conftest import Daemon, started_daemons
from tests.engine_answers import TEST_SECONDS, TOLERANCE, ask_all, check, check_equal, far_apart
from tests.vllm.conftest import StartEngine
from tests.vllm.support import (
    CACHED_TOKENS,
    References,
    Setting,
    ask_found,
    check_transfer,
    compute_references,
    prompts,
    wait_served,
    wait_stored,
    with_kvd,
)
from tests.waiting import eventually

DENSE, DENSE_TP2 = Setting("dense"), Setting("dense", tensor_parallel=2)
MLA, MLA_TP2 = Setting("mla"), Setting("mla", tensor_parallel=2)
Case = tuple[Setting, Transfer]
ASKED = 4  # prompts of each test; one more is left for the damage
PAGE = 4096  # a part of one block of one layer, at the most
TRIED = 8

pytestmark = pytest.mark.timeout(TEST_SECONDS)
only_dense = pytest.mark.parametrize("served", [(DENSE, EXPORT)], indirect=True, ids=["dense"])
one_rank = pytest.mark.parametrize(
    "served", [(DENSE, EXPORT), (MLA, EXPORT)], indirect=True, ids=["dense", "mla"]
)
nightly = pytest.mark.nightly


@dataclass
class Served:
    """An engine, the daemon that serves it, and what the answers should be."""

    setting: Setting
    engine: VllmServer
    daemon: Daemon
    known: References

    def check_warm(self, answers: list[Completion], expected: list[Completion]) -> None:
        """To the last bit, or near where the engine without kvd has no cache and computes all."""
        (check_equal if self.setting.own_cache else check)(answers, expected)


@pytest.fixture(
    scope="module",
    params=[
        (DENSE, EXPORT),
        (DENSE_TP2, EXPORT),
        (MLA, EXPORT),
        pytest.param((MLA_TP2, EXPORT), marks=nightly),
        (DENSE_TP2, STAGING),
        pytest.param((MLA, STAGING), marks=nightly),
        pytest.param((MLA_TP2, STAGING), marks=nightly),
    ],
    ids=["dense", "dense-tp2", "mla", "mla-tp2", *("dense-tp2-st", "mla-st", "mla-tp2-st")],
)
def served(
    request: pytest.FixtureRequest, models: Path, module_dir: Path, start_engine: StartEngine
) -> Iterator[Served]:
    """An engine of one kind. What it should answer is known before a daemon serves it.

    Of DENSE_TP2 the same engine says it, of the others one without a connector.
    """
    case: Case = request.param
    setting, transfer = case
    alone = setting.options(models)
    engine = start_engine(with_kvd(alone, module_dir, blocks_per_chunk=2, transfer=transfer))
    reference = engine if setting == DENSE_TP2 else start_engine(alone)
    reference.wait_ready()
    known = compute_references(reference, 2 * ASKED + 1, own_cache=setting.own_cache)
    if reference is not engine:
        reference.close()
    engine.wait_ready()
    check_transfer(engine, transfer)
    with started_daemons(module_dir) as start:
        daemon = start(cpu_bytes="256MiB")
        wait_served(daemon, engine)
        yield Served(setting, engine, daemon, known)
    engine.kill()


def pool_of(daemon: Daemon) -> Path:
    """The file that is the daemon's pool."""
    log = daemon.log.read_text()
    (pool,) = [path for path in Path("/dev/shm").glob("kvd-*/pool") if str(path) in log]
    return pool


@one_rank
def test_one_flipped_page_in_the_pool_changes_the_answer(served: Served) -> None:
    """With its halves exchanged, wherever it is; and not when they are back in place."""
    engine, prompt, reference = served.engine, served.known.prompts[-1], served.known.warm[-1]
    ask_found(engine, [prompt])
    chunks = wait_stored(served.daemon)
    (namespace,) = served.daemon.status()["namespaces"]
    stored_bytes = chunks * namespace["bytes_per_chunk"]
    damaged: list[Completion] = []
    with pool_of(served.daemon).open("r+b") as file, mmap.mmap(file.fileno(), stored_bytes) as pool:
        used = [at for at in range(0, stored_bytes, PAGE) if any(pool[at : at + PAGE])]
        for at in used[:: max(1, len(used) // TRIED)]:
            page = pool[at : at + PAGE]
            pool[at : at + PAGE] = page[PAGE // 2 :] + page[: PAGE // 2]
            damaged += ask_found(engine, [prompt])
            pool[at : at + PAGE] = page
    served.check_warm(ask_found(engine, [prompt]), [reference])
    for answer in damaged:
        assert far_apart(answer, reference) > 10 * TOLERANCE


def test_the_log_says_which_layout_the_kv_cache_has(served: Served) -> None:
    """The CPU's attention takes no blocks of all layers: vLLM warns, and kvd says who refused."""
    log = served.engine.log.read_text()
    (line,) = [line for line in log.splitlines() if ": fragments of" in line]  # of all ranks
    asked = "KV connector cache layout BLHNC does not satisfy every supported set" in log
    if served.setting.kind == "mla":
        assert not asked
        assert "KV cache layout LBNHC: fragments of 36 KiB, 2 a block" in line
    else:
        assert asked
        assert "KV cache layout LBHNC: fragments of" in line
        assert "; BLHNC was asked for, but attention backend CPU_ATTN cannot use it" in line
    assert line.rpartition(" ")[2] in {"block", "it"}  # nothing is to be done in host memory


def test_cold_and_warm_answers_are_those_without_kvd(served: Served) -> None:
    """Computed, and from kvd's pool, one by one. A hybrid model is in test_sharing."""
    engine, daemon, known = served.engine, served.daemon, served.known
    asked = known.prompts[:ASKED]
    cold = ask_all(engine, asked)
    assert [answer.cached_tokens for answer in cold] == [0] * ASKED
    check_equal(cold, known.cold)
    ask_found(engine, asked)
    stored = wait_stored(daemon)
    served.check_warm(ask_found(engine, asked), known.warm)
    (namespace,) = daemon.status()["namespaces"]
    assert namespace["chunks"]["ready"] == stored
    assert namespace["replicated"] is (served.setting == MLA_TP2)
    assert namespace["world_size"] == served.setting.tensor_parallel


def test_prompts_at_once_are_answered_as_one_by_one_without_kvd(served: Served) -> None:
    """Computed in one batch, then loaded in one."""
    engine, batch = served.engine, slice(ASKED, 2 * ASKED)
    asked, expected = served.known.prompts[batch], served.known.cold[batch]

    def ask() -> list[int]:
        engine.reset()
        answers = engine.generate(asked)
        check(answers, expected)
        return [answer.cached_tokens for answer in answers]

    def loads() -> int:
        return int(served.daemon.status()["counters"]["jobs"]["load_ok"])

    assert ask() == [0] * ASKED
    before = loads()
    eventually(ask, ([CACHED_TOKENS] * ASKED).__eq__)
    eventually(loads, (before + ASKED).__le__)


@only_dense
def test_a_request_limits_what_of_it_is_stored_and_loaded(served: Served) -> None:
    """`max_offload_tokens` and `max_load_tokens`, down to whole chunks of 64 tokens; 0: nothing."""
    engine, daemon = served.engine, served.daemon
    (known,), (new,) = served.known.prompts[:1], prompts(1, seed=1)
    ask_found(engine, [known])
    stored = wait_stored(daemon)
    for most, chunks in ((0, 0), (150, 2)):
        engine.reset()
        engine.generate([new], kv_transfer_params={"max_offload_tokens": most})
        assert wait_stored(daemon) == stored + chunks
    for most, loaded in ((0, 0), (150, 128)):
        engine.reset()
        (answer,) = engine.generate([known], kv_transfer_params={"max_load_tokens": most})
        assert answer.cached_tokens == loaded


@only_dense
def test_hints_of_requests_are_counted_and_change_no_answer(served: Served) -> None:
    """Over HTTP, through the engine to the daemon: valid ones, ignored fields, cut numbers."""
    engine, daemon = served.engine, served.daemon
    prompt, expected = served.known.prompts[0], served.known.warm[0]
    for hint in (
        {"continues": False},
        {"resume_in_s": -7},
        "later",
        {"resume_in_s": "soon", "pin": True, "one_shot": 1},
    ):
        check(engine.generate([prompt], kv_transfer_params={"kvd": hint}), [expected])

    def counted() -> list[int]:
        (engine_status,) = daemon.status()["engines"]
        return [engine_status["counters"][name] for name in ("hints", "hints_ignored", "hints_cut")]

    eventually(counted, [4, 4, 1].__eq__)
