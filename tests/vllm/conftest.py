"""What the tests with the real engine share: models, and engines that are ended."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvd_tools.demo_vllm.engine import EngineProcess
from kvd_tools.demo_vllm.options import EngineOptions


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the generated models lie."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def module_dir() -> Iterator[Path]:
    """A runtime directory for the engines of a whole module; a short path."""
    with tempfile.TemporaryDirectory(prefix="kvd-", dir="/tmp") as path:
        yield Path(path) / "run"


StartEngine = Callable[[EngineOptions], EngineProcess]


def _engines(folder: Path) -> Iterator[StartEngine]:
    engines: list[EngineProcess] = []

    def start(options: EngineOptions) -> EngineProcess:
        engine = EngineProcess(options, folder / f"engine-{len(engines)}.log")
        engines.append(engine)
        engine.start()
        return engine

    yield start
    for engine in engines:
        engine.kill()


@pytest.fixture
def start_engine(tmp_path: Path) -> Iterator[StartEngine]:
    """Starts engines without waiting for them, and kills what is left at the end of the test."""
    yield from _engines(tmp_path)


@pytest.fixture(scope="module")
def start_module_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartEngine]:
    """The same for the engines of a whole module."""
    yield from _engines(tmp_path_factory.mktemp("engines"))
