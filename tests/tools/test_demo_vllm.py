import importlib.util
import subprocess
import sys

import pytest


@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is not None, reason="this environment has vLLM"
)
def test_without_vllm_it_says_how_to_get_it() -> None:
    """One sentence that names the environment and the remedy, exit status 1."""
    done = subprocess.run(
        [sys.executable, "-m", "kvd", "demo-vllm"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert sys.prefix in done.stderr
    assert "make demo-vllm" in done.stderr
    assert not done.stdout
