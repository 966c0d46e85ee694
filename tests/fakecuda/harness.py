"""How tests use the test driver: environments for processes, scenarios, switches, the call log."""

import ctypes
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tests.fakecuda.build import LIBRARY

LONGEST_LINE = 128  # bytes of the call log


@dataclass(frozen=True)
class FakeCuda:
    """The built test driver.

    library: the file; other processes find it by `environment`.
    """

    library: Path

    def environment(self, **switches: object) -> dict[str, str]:
        """This process's environment, with the test driver and these switches.

        Switches are upper case without their prefix: `environment(SEED=1)` is FAKECUDA_SEED=1.
        """
        clean = {name: text for name, text in os.environ.items() if not name.startswith("FAKECUDA")}
        clean.pop("CUDA_VISIBLE_DEVICES", None)
        paths = [str(self.library.parent), *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
        clean["LD_LIBRARY_PATH"] = ":".join(path for path in paths if path)
        return clean | {f"FAKECUDA_{name}": str(value) for name, value in switches.items()}

    def load(self) -> None:
        """Load it into this process for good, where cuda-bindings then find it by its name.

        Processes that this one starts need `environment` all the same.
        """
        ctypes.CDLL(str(self.library), mode=ctypes.RTLD_GLOBAL)

    def run(
        self, scenario: Callable[..., None], *arguments: str, **switches: object
    ) -> subprocess.CompletedProcess[str]:
        """Run a function of a module in a process of its own that has the test driver."""
        code = (
            f"import sys; from {scenario.__module__} import {scenario.__name__} as scenario;"
            " scenario(*sys.argv[1:])"
        )
        from tests.processes import python  # noqa: PLC0415  # needs psutil, which make gpu does not

        return python("-c", code, *arguments, environment=self.environment(**switches))

    def check(self, scenario: Callable[..., None], *arguments: str, **switches: object) -> str:
        """The same, and it must succeed; what it prints."""
        done = self.run(scenario, *arguments, **switches)
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout


def switch(text: str) -> None:
    """Change a switch of this process, which has the library, `key=value` as README.md says."""
    if code := ctypes.CDLL(LIBRARY).fakecuda_set(text.encode()):
        raise ValueError(f"the test driver does not take '{text}' ({code})")


def functions_named(module: ModuleType) -> set[str]:
    """Functions of the driver that a module calls, by name or as attributes of the bindings."""
    source = Path(str(module.__file__)).read_text("utf-8")
    return set(re.findall(r'(?:"|\b(?:cuda|driver)\.)(cu[A-Z]\w*)["(]', source))


def write_control(path: Path, *lines: str) -> None:
    """Change switches of the processes that have this file as FAKECUDA_CONTROL."""
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(f"{line}\n" for line in lines), encoding="ascii")
    fresh.replace(path)


def calls(log: Path, process: int | None = None, since: int = 0) -> list[str]:
    """What the call log names from a `mark` on until now, of all processes or of one.

    Others write meanwhile: of the last line only a part may be there, which is not read yet.
    """
    with log.open("rb") as file:
        file.seek(since)
        whole = file.read().rpartition(b"\n")[0]
    lines = [line.split() for line in whole.decode("ascii").splitlines()]
    return [name for pid, name in lines if process in {None, int(pid)}]


def mark(log: Path) -> int:
    """A place in the call log: the end of the last line that is there whole."""
    with log.open("rb") as file:
        begin = max(0, file.seek(0, os.SEEK_END) - LONGEST_LINE)
        file.seek(begin)
        return begin + file.read().rfind(b"\n") + 1
