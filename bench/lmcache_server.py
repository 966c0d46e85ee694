"""LMCache's multiprocess server, and the environment that it and the engines on it run in."""

import shlex
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from harness import end

ROOT = Path(__file__).parents[1]
ENVIRONMENT = ROOT / ".venv-lmcache"
RECIPE = Path(__file__).parent / "lmcache_env"
SERVER = "lmcache.v1.multiprocess.server"
MODE = "lmcache_driven"  # the server copies, as kvd does; the other is slower here
SERVER_SECONDS = 120.0
POLL_SECONDS = 0.05


def lmcache_python() -> str:
    """The Python of the environment with LMCache, which is made if it is not there or is outdated.

    It has the packages of the environment with vLLM that this process runs in.
    """
    stamp = ENVIRONMENT / ".installed"
    made = stamp.stat().st_mtime if stamp.exists() else 0.0
    if any(part.stat().st_mtime > made for part in RECIPE.iterdir() if part.is_file()):
        command = [str(RECIPE / "environment.sh"), str(ENVIRONMENT), sys.prefix]
        subprocess.run(command, check=True, stdout=sys.stderr)
        stamp.touch()
    return str(ENVIRONMENT / "bin" / "python")


def check_lmcache() -> None:
    """Make the environment, and end the program if the server cannot be imported in it."""
    command = [lmcache_python(), "-c", f"import {SERVER}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it was killed"])[-1]
        sys.exit(f"LMCache's server cannot be imported: {why}; try: {shlex.join(command)}")


class LmcacheServer:
    """The server of one context; it may be killed in it, and started again at the same port.

    Args:
        python: of the environment.
        chunk_tokens: tokens of a chunk.
        cpu_bytes: its room.
        log: a file for its output.
    """

    def __init__(self, python: str, chunk_tokens: int, cpu_bytes: int, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            self._port: int = probe.getsockname()[1]
        self._log = log
        self._command = [python, "-m", SERVER]
        self._command += ["--port", str(self._port), "--chunk-size", str(chunk_tokens)]
        self._command += ["--eviction-policy", "LRU", "--l1-size-gb", f"{cpu_bytes / 2**30:g}"]
        self._command += ["--no-l1-use-lazy", "--disable-observability"]
        self._command += ["--supported-transfer-mode", MODE]

    def transfer(self) -> dict[str, Any]:
        """VLLM's --kv-transfer-config of an engine that uses it."""
        at = {"host": "tcp://localhost", "port": self._port, "mp_transfer_mode": MODE}
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {f"lmcache.mp.{name}": v for name, v in at.items()},
        }

    def kill(self) -> None:
        """Kill it as a crash would."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        with self._log.open("a") as sink:
            self._process = subprocess.Popen(self._command, stdout=sink, stderr=sink)
        try:
            self._wait_listening()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        end(self._process)

    def _wait_listening(self) -> None:
        end_of_patience = time.monotonic() + SERVER_SECONDS
        while self._process.poll() is None and time.monotonic() < end_of_patience:
            with suppress(OSError):
                socket.create_connection(("localhost", self._port), 1).close()
                return
            time.sleep(POLL_SECONDS)
        raise RuntimeError(f"LMCache's server does not listen: {self._log.read_text()[-2000:]}")
