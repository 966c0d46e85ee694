"""Builds the test driver, a test double of CUDA's `libcuda.so.1`, with the system's C compiler.

As a program: `python -m tests.fakecuda.build FOLDER` puts the library into FOLDER, for use
with `LD_LIBRARY_PATH=FOLDER`.
"""

import shutil
import subprocess
import sys
from pathlib import Path

LIBRARY = "libcuda.so.1"
SOURCES = Path(__file__).parent / "src"
FLAGS = (
    *("-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror"),
    *("-fPIC", "-shared", "-fvisibility=hidden", "-pthread"),
    # A program that has this library loaded finds it under the driver's name.
    f"-Wl,-soname,{LIBRARY}",
)


class NoCompiler(Exception):
    """There is no C compiler to build the test driver with."""


def compiler() -> str:
    """The system's C compiler.

    Raises:
        NoCompiler: none is found.
    """
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return path
    raise NoCompiler("no C compiler (cc, gcc or clang) is found; install one, e.g. gcc")


def build(folder: Path) -> Path:
    """Compile the library into a folder; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / LIBRARY
    sources = sorted(str(path) for path in SOURCES.glob("*.c"))
    command = [compiler(), *FLAGS, *sources, "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise RuntimeError(f"the test driver does not compile:\n{done.stderr}")
    return library


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
