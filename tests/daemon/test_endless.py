"""Clients that send messages without an end to the broker and to a lane."""

import contextlib
import struct
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvd_proto.zmtp import LONG, MORE
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import Engine, keys_of, wait_hit
from tests.raw_client import RawConnection, text_of
from tests.waiting import eventually

MIB = 2**20
ROOM = 64 * MIB  # for what else a process may need meanwhile


def counted(daemon: Daemon, where: str, limit: str) -> None:
    """Wait until a limit was reached, as the report has it."""

    def reached(report: dict[str, Any]) -> bool:
        (lane,) = report["lanes"]
        limits = report["broker"]["limits"] if where == "broker" else lane["counters"]["limits"]
        return bool(limits.get(limit))  # a lane's come with its first heartbeat

    eventually(daemon.status, reached)


def place(daemon: Daemon, where: str) -> tuple[Path, psutil.Process]:
    """The socket of the broker or the lane, and its process."""
    if where == "broker":
        return daemon.runtime_dir / "broker.sock", psutil.Process(daemon.process.pid)
    lane = daemon.status()["lanes"][0]
    (path,) = daemon.runtime_dir.glob(f"lane-host-{lane['incarnation']}-*.sock")
    return path, psutil.Process(lane["pid"])


def own_memory(process: psutil.Process) -> int:
    """Bytes of memory that it shares with none, as the pool is."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


@pytest.mark.parametrize("where", ["broker", "lane"])
@pytest.mark.parametrize("nbytes", [0, MIB])
def test_a_message_of_parts_costs_its_sender_the_connection(
    start_daemon: StartDaemon, where: str, nbytes: int
) -> None:
    """The first one, empty or large, does: nothing of it is kept, and others are served."""
    daemon = start_daemon()
    path, process = place(daemon, where)
    with Engine(daemon.runtime_dir, world_size=1).wait_attached() as engine:
        keys = keys_of("kept", 4)
        engine.store(keys)
        wait_hit(engine, keys)
        before = own_memory(process)
        with RawConnection(path) as endless:
            with contextlib.suppress(EOFError):
                for _ in range(200):
                    endless.send_bytes(struct.pack(">BQ", MORE | LONG, nbytes) + bytes(nbytes))
            assert "several parts" in text_of(endless.error_at_the_end())
        counted(daemon, where, "message_parts")
        assert own_memory(process) < before + ROOM
        assert engine.load(keys) == (4, 0)
