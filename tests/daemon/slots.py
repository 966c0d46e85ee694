"""The slots of a namespace, as its directory has them."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvd_proto.directory import FLOOR_AT, RECORD_DTYPE, DirectoryHeader, SlotState
from kvd_proto.errors import DirectoryError
from kvd_proto.messages import Attached
from tests.daemon.engines import Engine
from tests.daemon.serving import Daemon
from tests.raw_client import RawClient
from tests.waiting import eventually


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of a namespace.

    Attributes:
        namespace: its id.
        states: how many are in each state.
        loans: the numbers of the loans.
        twice: keys that are READY in two slots.
    """

    namespace: bytes
    states: dict[SlotState, int]
    loans: set[int]
    twice: list[bytes]


def slots_of(runtime_dir: Path, engine: str) -> Slots | None:
    """What the directory of an attached engine says; None where nobody is let in."""
    fd = directory_fd(runtime_dir, engine)
    if fd is None:
        return None
    try:
        return read(os.pread(fd, os.fstat(fd).st_size, 0))
    except (OSError, DirectoryError):
        return None
    finally:
        os.close(fd)


def wait_slots(
    daemon: Daemon, engine: str = "engine", *, at_hand: Sequence[Engine] = (), **states: int
) -> None:
    """Until so many slots are in these states, all others FREE, and those at hand on loan."""
    expected = {SlotState[name.upper()]: count for name, count in states.items()}

    def so(slots: Slots | None) -> bool:
        if slots is None:
            return False
        used = {state: n for state, n in slots.states.items() if n and state != SlotState.FREE}
        lent = sum(one.scheduler.reserve(0, 0.0) for one in at_hand)
        return used == expected and len(slots.loans) == lent

    eventually(lambda: slots_of(daemon.runtime_dir, engine), so)


def directory_fd(runtime_dir: Path, engine: str) -> int | None:
    """A descriptor of the directory of an attached engine; None where nobody is let in."""
    try:
        # Of a worker's session: the end of a scheduler's would give up what the engine stores.
        with RawClient(runtime_dir) as client:
            client.hello("worker", engine)
            return os.dup(client.notice(Attached)[1][0])
    except (OSError, EOFError, AssertionError):
        return None


def ready(directory: bytes) -> npt.NDArray[Any]:
    """The records of the chunks that lookups in a whole directory find as READY.

    Raises:
        DirectoryError: it is none.
    """
    table = _table(directory)
    floor = int.from_bytes(directory[FLOOR_AT : FLOOR_AT + 8], "little")
    is_ready = (table["state"] == SlotState.READY) & (table["generation"] > floor)
    records: npt.NDArray[Any] = table[is_ready & (table["key_len"] > 0)]
    return records


def _table(directory: bytes) -> npt.NDArray[Any]:
    head = DirectoryHeader.unpack(memoryview(directory))
    return np.frombuffer(directory, RECORD_DTYPE, head.num_slots, head.records_offset)


def read(directory: bytes) -> Slots:
    """What the records of a whole directory say.

    Raises:
        DirectoryError: it is none.
    """
    head, table = DirectoryHeader.unpack(memoryview(directory)), _table(directory)
    keys = Counter(bytes(row["key"])[: row["key_len"]] for row in ready(directory))
    states = Counter(table["state"].tolist())
    return Slots(
        head.namespace,
        {state: states[state] for state in SlotState},
        set(table["loan"][table["loan"] > 0].tolist()),
        [key for key, times in keys.items() if times > 1],
    )
