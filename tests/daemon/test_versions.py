"""Frames of another version, and messages that never end."""

import contextlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvd_proto.codec import HEADER_BYTES, WIRE
from kvd_proto.messages import PROTOCOL_VERSION, ErrorCode, Ping, Pong, Welcome
from kvd_proto.zmtp import LONG, MORE
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import Engine, keys_of, wait_hit
from tests.processes import python
from tests.raw_client import RawClient, RawConnection, code_of, text_of
from tests.waiting import eventually

OTHERS = pytest.mark.parametrize(
    "version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1], ids=["older", "newer"]
)
CLIENT = """
import sys
import kvd_proto.messages
kvd_proto.messages.PROTOCOL_VERSION = int(sys.argv[2])
from kvd_client import Scheduler
from tests.waiting import eventually

with Scheduler(sys.argv[1], "another version") as scheduler:
    print(eventually(lambda: scheduler.wait_attached(0.1).why, lambda why: "version" in why))
    print(scheduler.lookup(b"key").name)
"""


@pytest.fixture
def client(shared_daemon: Daemon) -> Iterator[RawClient]:
    """A session that has not said HELLO."""
    with RawClient(shared_daemon.runtime_dir) as raw:
        yield raw


@OTHERS
def test_a_frame_of_another_version_is_refused_with_both_versions(
    client: RawClient, version: int
) -> None:
    """A request whose header has another version gets `bad_version`; the session goes on."""
    head = WIRE.encode(Ping(), 7)[:HEADER_BYTES]
    client.send(head[:4] + version.to_bytes(2, "little") + head[6:] + b"\x81\xa3new\x01")
    number, reply = client.reply()
    assert (number, code_of(reply)) == (7, ErrorCode.BAD_VERSION)
    assert text_of(reply) == (
        f"the other side speaks protocol version {version}, this side {PROTOCOL_VERSION}; install"
        " the same version of kvd on both"
    )
    assert isinstance(client.hello(), Welcome)


@OTHERS
def test_a_hello_without_the_daemons_version_is_refused_with_both(
    client: RawClient, version: int
) -> None:
    """A Hello that names only other versions gets `bad_version`; the daemon goes on."""
    reply = client.hello(protocol=version)
    assert code_of(reply) is ErrorCode.BAD_VERSION
    assert f"protocol {version}..{version}, this daemon {PROTOCOL_VERSION};" in text_of(reply)
    assert isinstance(client.ask(Ping()), Pong)


@OTHERS
def test_a_client_of_another_version_misses_and_says_why(
    shared_daemon: Daemon, version: int
) -> None:
    """It names the daemon's version and its own, and every lookup is a miss."""
    ended = python("-c", CLIENT, str(shared_daemon.runtime_dir), str(version))
    assert not ended.returncode, ended.stderr
    why, found = ended.stdout.splitlines()
    said = f"the other side speaks protocol version {PROTOCOL_VERSION}, this side {version};"
    assert f"refuses: {said}" in why
    assert found == "MISS"


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
