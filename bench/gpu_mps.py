"""NVIDIA's MPS for as long as it is needed, in a folder of its own."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
SECONDS = 15.0


def why_not() -> str:
    """Why there is no MPS on this machine; empty where there is."""
    if shutil.which(CONTROL) is None:
        return f"{CONTROL} is not installed"
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        return "CUDA_MPS_PIPE_DIRECTORY is set: this machine has an MPS of its own"
    return ""


@contextmanager
def mps() -> Iterator[Callable[[], list[int]]]:
    """Run it for this process and those that it starts from here on; they have no context yet.

    Yields:
        what asks for the pids of its servers, of which there is one once somebody uses it.

    Raises:
        RuntimeError: it does not start, or does not answer, with what it says.
    """
    with tempfile.TemporaryDirectory(prefix="kvd-mps-") as name:
        os.environ["CUDA_MPS_PIPE_DIRECTORY"] = f"{name}/pipe"
        os.environ["CUDA_MPS_LOG_DIRECTORY"] = f"{name}/log"
        for folder in ("pipe", "log"):
            (Path(name) / folder).mkdir()
        _run([CONTROL, "-d"], "")
        try:
            yield lambda: _pids(_run([CONTROL], "get_server_list\n"))
        finally:
            _run([CONTROL], "quit -t 5\n")


def _pids(said: str) -> list[int]:
    return [int(word) for word in said.split() if word.isdecimal()]


def _run(command: list[str], said: str) -> str:
    try:
        done = subprocess.run(
            command, input=said, capture_output=True, text=True, check=False, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{' '.join(command)} does not answer in {SECONDS:g} s") from None
    if done.returncode:
        words = (done.stderr + done.stdout).strip()
        raise RuntimeError(f"{' '.join(command)} fails: {words or done.returncode}")
    return done.stdout
