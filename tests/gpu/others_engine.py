"""An engine of another user than the daemon's, in a process of its own."""

import ctypes
import os
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from tests.daemon.cuda_engine import CudaEngine, Rank
from tests.daemon.engines import keys_of

NOBODY = 65534
PR_SET_DUMPABLE = 4


class Here:
    """A rank in this process, asked as one in another."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.close = rank.close

    def ask(self, name: str, *arguments: object) -> Any:
        """Call a method, by its dotted name."""
        return attrgetter(name)(self._rank)(*arguments)


class OneProcess(CudaEngine):
    """See CudaEngine; its only rank is in this process too."""

    def add(self, rank: int) -> None:
        """Make the rank."""
        made = Rank(self.runtime_dir, self.name, rank, 1, kind=self.kind, page=self.page)
        self.ranks[rank] = Here(made)  # type: ignore[assignment]  # asked in the same way


class OthersEngine:
    """The engine, for `Asked`. The process must be root's, and is nobody's from here on.

    It keeps its group, which is the daemon's, as docs/operations.md asks for.
    """

    def __init__(self, runtime_dir: Path, kind: str) -> None:
        np.random.default_rng(0)  # imports more, which nobody may not be allowed to read
        os.setgroups([])
        os.setuid(NOBODY)
        # After a change of user the files of a process under /proc are root's; those of a program
        # that is started anew would not be.
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1)
        self._engine = OneProcess(runtime_dir, "others", world_size=1, kind=kind)

    def serve(self) -> int:
        """Register, store, load into other blocks; how many bytes are wrong there."""
        keys = keys_of("others", 6)
        self._engine.register()
        self._engine.store(keys)
        return self._engine.load(keys)

    def close(self) -> None:
        """Take the memory back from the daemon."""
        self._engine.__exit__()
