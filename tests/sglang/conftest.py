"""What the tests with the real SGLang share: a model, and engines that are ended."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvd_tools.demo_sglang.engine import EngineProcess
from kvd_tools.demo_sglang.options import EngineOptions
from kvd_tools.engine_server import Answer
from kvd_tools.models import write_model
from tests.sglang.support import ask_all, prompts

StartEngine = Callable[[EngineOptions], EngineProcess]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model with random weights of ordinary scale."""
    return write_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def start_engine(tmp_path: Path) -> Iterator[StartEngine]:
    """Starts engines without waiting for them, and kills what is left at the test's end."""
    engines: list[EngineProcess] = []

    def start(options: EngineOptions) -> EngineProcess:
        engines.append(EngineProcess(options, tmp_path / f"engine-{len(engines)}.log"))
        return engines[-1]

    yield start
    for engine in engines:
        engine.kill()


@pytest.fixture(scope="session")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """Answers of an engine without an external cache to the first prompts."""
    log = tmp_path_factory.mktemp("plain") / "engine.log"
    engine = EngineProcess(EngineOptions(model), log)
    try:
        engine.wait_ready()
        return ask_all(engine, prompts(4))
    finally:
        engine.kill()
