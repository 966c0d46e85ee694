"""docs/protocol.md, played to a real daemon."""

import os
import re
import socket
import stat

import pytest

from docs.generate_protocol import BOOT_ID, FILE, REQUEST_ID, TOKEN
from kvd_proto.codec import WIRE
from kvd_proto.descriptions import MAGIC as DESCRIPTIONS_MAGIC
from kvd_proto.directory_header import MAGIC as DIRECTORY_MAGIC
from kvd_proto.messages import Attached, Error, Greeting, Welcome
from tests.conftest import Daemon
from tests.daemon.engines import Engine
from tests.daemon.raw_client import RawClient
from tests.waiting import PATIENCE


def documented_bytes() -> list[tuple[str, str, bytes]]:
    """Each row of the page's connection: who sends, what, and its bytes."""
    section = FILE.read_text(encoding="utf-8").split("## A connection, byte by byte")[1]
    rows = re.findall(r"^\| (client|daemon) \| (.+?) \| `([0-9a-f]+)` \|$", section, re.MULTILINE)
    return [(side, what, bytes.fromhex(data)) for side, what, data in rows]


def received(connection: socket.socket, nbytes: int) -> bytes:
    """So many bytes from the daemon."""
    data = b""
    while len(data) < nbytes:
        part = connection.recv(nbytes - len(data))
        assert part, "the daemon has closed the connection"
        data += part
    return data


def test_the_documented_connection_is_what_a_daemon_speaks(shared_daemon: Daemon) -> None:
    """Played with this session's ids, the client's bytes are answered as the page has it."""
    rows = documented_bytes()
    assert [side for side, _, _ in rows].count("daemon") == 4
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection,
    ):
        for sock, name in ((control, "control.sock"), (connection, "broker.sock")):
            sock.settimeout(PATIENCE)
            sock.connect(str(shared_daemon.runtime_dir / name))
        header, greeting = WIRE.decode(control.recv(65536))
        assert isinstance(greeting, Greeting)
        for side, what, data in rows:
            if side == "client":
                own = data.replace(TOKEN, header.session).replace(BOOT_ID, header.boot_id)
                connection.sendall(own)
            elif what != "Welcome":
                assert received(connection, len(data)) == data, what
            else:
                flags, size = received(connection, 2)
                assert (flags, data[0]) == (0, 0)
                reply_header, welcome = WIRE.decode(received(connection, size))
                assert isinstance(welcome, Welcome)
                assert (reply_header.request_id, reply_header.session) == (
                    REQUEST_ID,
                    header.session,
                )
            if what.startswith("Step"):
                assert data[0] == 2
                flags, size = received(connection, 2)
                assert isinstance(WIRE.decode(received(connection, size))[1], Error)  # a worker


@pytest.mark.parametrize(
    ("kind", "more"), [("worker", []), ("scheduler", ["descriptions", "pipe"])]
)
def test_attached_brings_the_documented_descriptors(
    shared_daemon: Daemon, label: str, kind: str, more: list[str]
) -> None:
    """A worker gets the directory; a scheduler the descriptions and the pipe's read end besides."""
    with Engine(shared_daemon.runtime_dir, label, 1, label).wait_attached() as engine:
        engine.scheduler.close()
        client = RawClient(shared_daemon.runtime_dir)
        assert isinstance(client.hello(kind, label), Welcome)
        frame, fds, _, _ = socket.recv_fds(client.control_socket, 65536, 8)
        try:
            attached = WIRE.decode(frame)[1]
            assert isinstance(attached, Attached)
            assert attached.description_bytes
            starts = {
                DIRECTORY_MAGIC: "directory",
                DESCRIPTIONS_MAGIC: "descriptions",
            }
            found = [
                "pipe" if stat.S_ISFIFO(os.fstat(fd).st_mode) else starts[os.pread(fd, 8, 0)]
                for fd in fds
            ]
            assert found == ["directory", *more]
        finally:
            for fd in fds:
                os.close(fd)
            client.close()
