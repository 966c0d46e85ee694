"""Clients of pyzmq, struct and msgpack alone: a tool, and an engine in CUDA memory.

`PlainConnection` and what calls it are written from docs/protocol.md and share no code with kvd.
"""

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from tests.asked import Asked
from tests.conftest import Daemon, StartDaemon
from tests.fakecuda import cudatensor
from tests.waiting import PATIENCE, eventually

HEADER = struct.Struct("<4sHHQ")
VERSION = 4
HELLO, WELCOME, REGISTER, REGISTERED, STEP, STEPPED = 0x01, 0x02, 0x03, 0x04, 0x10, 0x11
STORE, LOAD, DONE, JOIN, STATUS, STATUS_REPORT = 0x20, 0x21, 0x22, 0x27, 0x32, 0x33
OK, ERROR, ATTACHED, LANE_UP = 0x3E, 0x3F, 0x41, 0x43
NEVER_MS = 2**31 - 1

PAGE, BLOCKS, BLOCKS_PER_CHUNK = 4096, 16, 2
CHUNK_BYTES = PAGE * BLOCKS_PER_CHUNK
STORED_AT, LOADED_AT, CHUNKS = 2, 10, 3
NUM_BLOCKS_MOVED = CHUNKS * BLOCKS_PER_CHUNK

Connect = Callable[[str], "PlainConnection"]


class PlainConnection:
    """One DEALER: requests with their replies, and the notices that come between."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.reconnect_ivl = NEVER_MS
        self.socket.connect(endpoint)
        self.version = VERSION
        self.request_id = 0
        self.notices: list[tuple[int, dict[str, Any]]] = []

    def ask(self, tag: int, reply_tag: int, **fields: Any) -> Any:
        """The fields of a request's reply, which has this tag."""
        self.request_id += 1
        header = HEADER.pack(b"kvd\0", self.version, tag, self.request_id)
        self.socket.send(header + msgpack.packb(fields))
        while True:
            tag, request_id, reply = self._receive()
            if request_id == self.request_id:
                assert tag == reply_tag, reply
                return reply
            self.notices.append((tag, reply))

    def notice(self, expected: int) -> Any:
        """The fields of the next notice with this tag; those before it are passed over."""
        while True:
            while self.notices:
                tag, fields = self.notices.pop(0)
                if tag == expected:
                    return fields
            tag, request_id, fields = self._receive()
            assert request_id == 0
            self.notices.append((tag, fields))

    def hello(self, kind: str, engine: str) -> Any:
        """Begin a session; the daemon's Welcome."""
        versions = {"protocol_min": VERSION, "protocol_max": VERSION}
        return self.ask(HELLO, WELCOME, kind=kind, engine=engine, pid=1, client="pyzmq", **versions)

    def _receive(self) -> tuple[int, int, dict[str, Any]]:
        assert self.socket.poll(int(PATIENCE * 1000)), "nothing comes"
        frame = self.socket.recv()
        magic, version, tag, request_id = HEADER.unpack_from(frame)
        assert (magic, version) == (b"kvd\0", VERSION)
        return tag, request_id, msgpack.unpackb(frame[HEADER.size :])


def ints(dtype: str, values: Any) -> list[Any]:
    """An integer array of the wire."""
    code = {"u2": "H", "u4": "I", "u8": "Q"}[dtype]
    return [dtype, struct.pack(f"<{len(values)}{code}", *values)]


class WorkerMemory:
    """Device memory in a process of its own, for `Asked`: handles do not open at home."""

    def __init__(self) -> None:
        cudatensor.use_device()
        self._memory = cudatensor.DeviceMemory(BLOCKS * PAGE)

    def registration(self) -> dict[str, Any]:
        """The fields of a Register of one rank, whose memory is one tensor in one allocation."""
        handle = {"handle": self._memory.handle(), "allocation": self._memory.nbytes}
        tensor = {"storage": 0, "offset": 0, "page_bytes": PAGE, "block_stride": PAGE}
        group = {"refs": [{"tensor": 0, "page_bytes": PAGE}], "block_size": 16}
        return {
            "rank": 0,
            "world_size": 1,
            "device": f"cuda:{bytes(cudatensor.call('cuDeviceGetUuid', 0).bytes).hex()}",
            "fingerprint": {"model": "plain"},
            "layout": {
                "num_blocks": BLOCKS,
                "blocks_per_chunk": BLOCKS_PER_CHUNK,
                "hash_block_size": 16,
                "storages": [BLOCKS * PAGE],
                "tensors": [tensor],
                "groups": [group],
            },
            "handles": [{"type": "ipc", **handle}],
        }

    def write(self, block: int, data: bytes) -> None:
        """Write from this block on."""
        self._memory.write(data, block * PAGE)
        cudatensor.call("cuStreamSynchronize", 0)

    def read(self, block: int, nbytes: int) -> bytes:
        """Read from this block on."""
        return self._memory.read(nbytes, block * PAGE)

    def close(self) -> None:
        """Give the memory back."""
        self._memory.free()


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes connections to endpoints, which are closed in the end."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    connections: list[PlainConnection] = []

    def make(endpoint: str) -> PlainConnection:
        connections.append(PlainConnection(context, endpoint))
        return connections[-1]

    yield make
    context.destroy(0)


def test_a_tool_asks_for_the_status(shared_daemon: Daemon, connect: Connect) -> None:
    """Hello, Status, whose report is a map, and the refusal of another version."""
    tool = connect(f"ipc://{shared_daemon.runtime_dir}/broker.sock")
    assert tool.hello("tool", "tool-1")["protocol"] == VERSION
    assert tool.ask(STATUS, STATUS_REPORT)["status"]["ready"]
    tool.version = VERSION - 1
    assert tool.ask(STATUS, ERROR)["code"] == "bad_version"


@pytest.mark.fakecuda
def test_an_engine_without_descriptors_stores_and_loads(
    start_daemon: StartDaemon,
    fakecuda_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    connect: Connect,
) -> None:
    """Its scheduler lives from slots on loan, its worker registers without a control page."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fakecuda_folder))
    monkeypatch.setenv("FAKECUDA_SEED", "3")
    monkeypatch.delenv("FAKECUDA_LOG", raising=False)
    daemon = start_daemon()
    endpoint = f"ipc://{daemon.runtime_dir}/broker.sock"
    scheduler, worker = connect(endpoint), connect(endpoint)
    memory = Asked(WorkerMemory)
    try:
        scheduler.hello("scheduler", "plain")
        worker.hello("worker", "plain")
        registered = worker.ask(REGISTER, REGISTERED, **memory.ask("registration"))
        assert registered["missing_ranks"] == []
        lane_up = worker.notice(LANE_UP)
        lane = connect(lane_up["endpoint"])
        lane.ask(JOIN, OK, token=lane_up["token"])
        assert scheduler.notice(ATTACHED)["world_size"] == 1
        slots, generations = loans(scheduler)

        def job(tag: int, number: int, first_block: int, after: int = 0) -> tuple[str, str]:
            """How a job on all chunks ends: its status and text."""
            blocks = {
                "block_ids": ints("u4", range(first_block, first_block + NUM_BLOCKS_MOVED)),
                "group_sizes": ints("u4", [NUM_BLOCKS_MOVED]),
                "block_indices": ints("u4", [0]),
                "slots": ints("u4", slots),
                "generations": ints("u8", generations),
            }
            done = lane.ask(tag, DONE, job=number, blocks=blocks, after=after, deadline_ms=60_000)
            assert done["job"] == number
            return done["status"], done["text"]

        content = bytes(range(1, 241)) * (CHUNKS * CHUNK_BYTES // 240 + 1)
        content = content[: CHUNKS * CHUNK_BYTES]
        memory.ask("write", STORED_AT, content)
        keys = [b"chunk-%d" % number for number in range(CHUNKS)]
        chunks = {"slots": ints("u4", slots), "generations": ints("u8", generations)}
        scheduler.ask(STEP, STEPPED, keys=keys, **chunks)
        assert job(STORE, 1, STORED_AT) == ("ok", "")
        pin = {"lease": 1, "lease_ms": 60_000, **chunks}
        eventually(lambda: pinned(scheduler, daemon, pin))
        status, text = job(LOAD, 2, LOADED_AT, after=5)
        assert status == "refused"
        assert "without a control page" in text
        assert job(LOAD, 3, LOADED_AT) == ("ok", "")
        assert memory.ask("read", LOADED_AT, len(content)) == content
        scheduler.ask(STEP, STEPPED, unpinned=[pin["lease"]])
        assert daemon.status()["leases"] == 0
    finally:
        memory.close()


def loans(scheduler: PlainConnection) -> tuple[list[int], list[int]]:
    """Slots for all chunks, with the generations under which they are lent."""
    slots: list[int] = []
    generations: list[int] = []
    while len(slots) < CHUNKS:
        stepped = scheduler.ask(STEP, STEPPED, wanted=CHUNKS)
        slots += memoryview(stepped["slots"][1]).cast("I")
        generations += memoryview(stepped["generations"][1]).cast("Q")
    return slots[:CHUNKS], generations[:CHUNKS]


def pinned(scheduler: PlainConnection, daemon: Daemon, pin: dict[str, Any]) -> bool:
    """Lease the chunks; whether they were READY, which the lane reports after its Done."""
    scheduler.ask(STEP, STEPPED, unpinned=[pin["lease"]])
    scheduler.ask(STEP, STEPPED, pins=[pin])
    return bool(daemon.status()["namespaces"][0]["chunks"]["pinned"] == CHUNKS)
