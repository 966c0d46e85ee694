"""Says to instrumented code which statement is deleted, and notes which statements ran.

Instrumented modules guard a statement with `if live[ID]:`. Environment variables, because daemons
and lanes that a test starts inherit them:

- `KVD_MUTANT`: the ID of the statement that does not run. Without it all run.
- `KVD_MUTANTS_SEEN`: a file of one byte a statement; a statement that runs sets its byte to 1.
"""

import mmap
import os

NUM_STATEMENTS = int(os.environ.get("KVD_MUTANTS", "0"))


class _Recorder:
    """Every statement runs, and sets its byte in a shared file."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:  # noqa: PTH123  # no import that the product may not have
            self._seen = mmap.mmap(file.fileno(), NUM_STATEMENTS)

    def __getitem__(self, statement: int) -> bool:
        self._seen[statement] = 1
        return True


def _live() -> "bytearray | _Recorder":
    path = os.environ.get("KVD_MUTANTS_SEEN")
    if path:
        return _Recorder(path)
    statements = bytearray(b"\1" * NUM_STATEMENTS)
    if "KVD_MUTANT" in os.environ:
        statements[int(os.environ["KVD_MUTANT"])] = 0
    return statements


live = _live()
