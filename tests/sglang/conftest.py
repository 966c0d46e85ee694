"""What the tests with the real SGLang share: a model, engines and linkers that are ended."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache.hybrid_cache import linker_pool_assembler

from kvd_client.sglang.linker import KvdLinker
from kvd_tools.engine_server import Completion
from kvd_tools.models import write_model
from kvd_tools.sglang_engine import SglangServer, SglangServerOptions
from tests.conftest import Daemon
from tests.engine_answers import ask_all
from tests.sglang.device_pools import Kind, make_linker
from tests.sglang.support import PATIENT, check_worth, prompts
from tests.waiting import eventually

StartEngine = Callable[[SglangServerOptions], SglangServer]
StartLinker = Callable[..., KvdLinker]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model with random weights of ordinary scale."""
    return write_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def start_engine(tmp_path: Path) -> Iterator[StartEngine]:
    """Starts engines without waiting for them, and kills what is left at the test's end."""
    engines: list[SglangServer] = []

    def start(options: SglangServerOptions) -> SglangServer:
        engines.append(SglangServer(options, tmp_path / f"engine-{len(engines)}.log"))
        return engines[-1]

    yield start
    for engine in engines:
        engine.kill()


@pytest.fixture(scope="session")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Completion]:
    """Answers of an engine without an external cache to the first prompts."""
    log = tmp_path_factory.mktemp("plain") / "engine.log"
    engine = SglangServer(SglangServerOptions(model), log)
    try:
        engine.wait_ready()
        answers = ask_all(engine, prompts(4))
        check_worth(answers)
        return answers
    finally:
        engine.kill()


@pytest.fixture
def start_linker(monkeypatch: pytest.MonkeyPatch) -> Iterator[StartLinker]:
    """Makes linkers of one rank, which are closed."""
    # What SGLang's description of pools asks the engine's settings, of which there are none.
    settings = SimpleNamespace(enable_unified_memory=False, attn_dcp_size=1)
    for name in ("get_memory", "get_parallel"):
        monkeypatch.setattr(linker_pool_assembler, name, lambda: settings)
    made: list[KvdLinker] = []

    def start(daemon: Daemon, kind: Kind, **options: Any) -> KvdLinker:
        extra = {"runtime_dir": str(daemon.runtime_dir), "required": True, **PATIENT, **options}
        linker = make_linker(kind, **extra)
        made.append(linker)
        eventually(lambda: all(c.scheduler.attached for c in linker._caches.values()))
        return linker

    yield start
    for linker in made:
        linker.close()
