"""What the tests with the real engine share: models, and engines that are ended."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvd_tools.vllm_engine import VllmServer, VllmServerOptions
from tests.waiting import PATIENCE


@pytest.fixture(scope="session", autouse=True)
def patient_resets() -> Iterator[None]:
    """An engine's own cache is reset once its stores have ended, however long they take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvd_tools.vllm_engine.RESET_SECONDS", PATIENCE)
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the generated models lie."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def module_dir() -> Iterator[Path]:
    """A runtime directory for the engines of a whole module; a short path."""
    with tempfile.TemporaryDirectory(prefix="kvd-", dir="/tmp") as path:
        yield Path(path) / "run"


StartEngine = Callable[[VllmServerOptions], VllmServer]


@pytest.fixture(scope="module")
def start_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartEngine]:
    """Starts engines without waiting for them, and kills what is left at the module's end."""
    folder = tmp_path_factory.mktemp("engines")
    engines: list[VllmServer] = []

    def start(options: VllmServerOptions) -> VllmServer:
        engines.append(VllmServer(options, folder / f"engine-{len(engines)}.log"))
        return engines[-1]

    yield start
    for engine in engines:
        engine.kill()
