"""The two trees that lane.py compares, and a process of lane_load.py on each of them."""

import contextlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import IO, Any, Self

from harness import end
from lane_timers import FILE_BYTES

from tests.fakecuda.harness import FakeCuda

ROOT = Path(__file__).resolve().parent.parent
PINNED = "a1e1e60"  # what figures called before_* are of
PACKAGES = ("kvd", "client/kvd_client", "proto/kvd_proto", "bench", "tests")


class NoTree(Exception):
    """The pinned commit cannot be had."""


def unpack(folder: Path, commit: str = PINNED) -> Path:
    """Put a commit's packages into a folder; where they are.

    Raises:
        NoTree: there is no git, no repository, or no such commit in it.
    """
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", commit, "--", *PACKAGES]
    archive = folder / "tree.tar"
    try:
        with archive.open("wb") as out:
            subprocess.run(command, stdout=out, stderr=subprocess.PIPE, check=True)
    except OSError as error:
        raise NoTree(f"git cannot be run ({error})") from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip()
        raise NoTree(f"git has no commit {commit} ({said})") from error
    with tarfile.open(archive) as tar:
        tar.extractall(folder / commit, filter="data")
    archive.unlink()
    return folder / commit


def commit() -> str:
    """Of this tree, with + where it was changed since; empty where git does not say."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        words = [
            subprocess.run(
                ["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=True
            ).stdout.strip()
            for command in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "-uno"])
        ]
        return words[0] + ("+" if words[1] else "")
    return ""


class Side:
    """lane_load.py with one tree's packages; ended with the context.

    Args:
        tree: where they are.
        driver: the test driver, for both trees the same.
        folder: for the driver's switches and the daemon's lines.
        options: of lane_load.py, by name.
        timed: whether the lane has the timers of lane_timers.

    Raises:
        RuntimeError: it does not start, or ends before its time.
    """

    def __init__(
        self,
        tree: Path,
        driver: FakeCuda,
        folder: Path,
        options: dict[str, int],
        *,
        timed: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        control = folder / "control"
        self._log = folder / "log"
        bench = Path(__file__).parent
        # lane_timers is this tree's.
        paths = [tree, tree / "client", tree / "proto", tree / "bench", bench, bench / "stages"]
        # Neither this tree's packages that are installed, nor those of where it is started.
        variables = driver.environment(CONTROL=control, ELSEWHERE=0) | {
            "PYTHONPATH": ":".join(map(str, paths)),
            "PYTHONSAFEPATH": "1",
            "LANE_CUDA": "kernel=0,order=any",  # of the pinned commit: as this tree
        }
        command = [sys.executable, str(bench / "lane_load.py")]
        command += ["--control", str(control), "--log", str(self._log)]
        for name, value in options.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        if timed:
            stages = folder / "stages"
            stages.write_bytes(bytes(FILE_BYTES))
            command += ["--stages", str(stages)]
            variables["LANE_STAGES"] = str(stages)
        self._process = subprocess.Popen(
            command,
            cwd=tree,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> Self:
        return self

    def ready(self) -> None:
        """Wait until it has its engines, and let its driver's work end at once."""
        self._read()
        self.ask(control=["copies=instant"])

    def ask(self, **order: object) -> dict[str, Any]:
        """What it answers to an order; see lane_load.py."""
        pipe = self._pipe(self._process.stdin)
        with contextlib.suppress(BrokenPipeError):
            pipe.write(json.dumps(order).encode() + b"\n")
            pipe.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        line = self._pipe(self._process.stdout).readline()
        if not line:
            said = self._log.read_text("utf-8", "replace") if self._log.exists() else ""
            raise RuntimeError(
                f"lane_load.py ended with exit status {self._process.wait()}; its daemon said:\n"
                + said[-2000:]
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    @staticmethod
    def _pipe(pipe: "IO[bytes] | None") -> "IO[bytes]":
        if pipe is None:
            raise RuntimeError("lane_load.py was started without pipes")
        return pipe

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._pipe(self._process.stdin).close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        if self._process.poll() is None:
            end(self._process)
        self._pipe(self._process.stdout).close()


def machine() -> dict[str, Any]:
    """What figures depend on."""
    model = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "cpu": model,
        "cpus": os.cpu_count(),
        "linux": os.uname().release,
        "python": ".".join(map(str, sys.version_info[:3])),
        "load_average": round(os.getloadavg()[0], 2),
    }
