"""The other tests compare answers: here is shown that a wrong page changes an answer."""

import mmap
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd_tools.demo_vllm.engine import EngineProcess
from kvd_tools.demo_vllm.wire import Answer, comparable
from tests.conftest import Daemon, StartDaemon
from tests.vllm.conftest import StartEngine
from tests.vllm.support import (
    CACHED_TOKENS,
    TEST_SECONDS,
    TOLERANCE,
    References,
    Setting,
    far_apart,
    wait_served,
    wait_stored,
    with_kvd,
)

PAGE = 4096  # a part of one block of one layer, at the most
TRIED = 8


def pool_of(daemon: Daemon) -> Path:
    """The file that is the daemon's pool."""
    said = daemon.log.read_text()
    (pool,) = [path for path in Path("/dev/shm").glob("kvd-*/pool") if str(path) in said]
    return pool


@pytest.mark.timeout(TEST_SECONDS)
@pytest.mark.parametrize("kind", ["dense", "hybrid", "mla"])
def test_one_flipped_page_in_the_pool_changes_the_answer(
    kind: str,
    models: Path,
    references: Callable[[Setting], References],
    start_daemon: StartDaemon,
    start_engine: StartEngine,
) -> None:
    """With its halves exchanged, wherever it is; and not when they are back in place."""
    setting = Setting(kind)  # type: ignore[arg-type]  # the three kinds are above
    known = references(setting)
    daemon = start_daemon()
    engine = start_engine(with_kvd(setting.options(models), daemon.runtime_dir, blocks_per_chunk=2))
    engine.wait_ready()
    wait_served(daemon, engine)
    engine.generate(known.prompts[:1])
    chunks = wait_stored(daemon, at_least=CACHED_TOKENS // 64)
    (namespace,) = daemon.status()["namespaces"]
    stored_bytes = chunks * namespace["bytes_per_chunk"]

    def warm(engine: EngineProcess) -> None:
        engine.reset()
        (answer,) = engine.generate(known.prompts[:1])
        assert answer.cached_tokens == CACHED_TOKENS
        answers.append(answer)

    answers: list[Answer] = []
    with pool_of(daemon).open("r+b") as file, mmap.mmap(file.fileno(), stored_bytes) as pool:
        used = [at for at in range(0, stored_bytes, PAGE) if any(pool[at : at + PAGE])]
        for at in used[:: max(1, len(used) // TRIED)]:
            page = pool[at : at + PAGE]
            pool[at : at + PAGE] = page[PAGE // 2 :] + page[: PAGE // 2]
            warm(engine)
            pool[at : at + PAGE] = page
    warm(engine)
    assert not comparable(answers[-1], known.warm[0])
    for damaged in answers[:-1]:
        assert far_apart(damaged, known.warm[0], 10 * TOLERANCE)
