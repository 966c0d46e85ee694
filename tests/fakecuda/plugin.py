"""The fixture `fakecuda`: the test driver, built once for a run of the tests."""

import importlib.util

import pytest

from tests.fakecuda.build import NoCompiler, build
from tests.fakecuda.harness import FakeCuda


@pytest.fixture(scope="session")
def fakecuda(tmp_path_factory: pytest.TempPathFactory) -> FakeCuda:
    """The test driver; tests are skipped where it cannot be built or used, and say why."""
    if not importlib.util.find_spec("cuda"):
        pytest.skip("cuda-bindings is not installed: pip install 'kvd-offload[cuda]'")
    try:
        return FakeCuda(build(tmp_path_factory.mktemp("fakecuda")))
    except NoCompiler as missing:
        pytest.skip(str(missing))
