"""docs/protocol.md, played to a real daemon."""

import re
import socket

from docs.generate_protocol import FILE, TOKEN
from kvd_client.memory import sealed_file
from kvd_proto.channel import close_all
from kvd_proto.codec import WIRE
from kvd_proto.jobs import CONTROL_BYTES
from kvd_proto.messages import Attached, Done, LaneUp, Message, Register, Welcome
from kvd_proto.zmtp import COMMAND, GREETING_BYTES, LONG
from tests.conftest import Daemon
from tests.waiting import PATIENCE

DIFFERS = {Welcome, LaneUp, Attached, Done}
"""Messages that tell of this daemon and its namespaces: fields differ from the page's."""


def documented_rows() -> list[tuple[str, str, bytes]]:
    """Each row of the page's connections: who sends, what, and its bytes."""
    section = FILE.read_text(encoding="utf-8").split("## A connection, byte by byte")[1]
    pattern = r"^\| (client|daemon|lane) \| (.+?) \| `([0-9a-f]+)` \|$"
    rows = re.findall(pattern, section, re.MULTILINE)
    return [(side, what, bytes.fromhex(data)) for side, what, data in rows]


def read(sock: socket.socket, nbytes: int) -> bytes:
    """So many bytes from the daemon."""
    data = b""
    while len(data) < nbytes:
        part = sock.recv(nbytes - len(data))
        assert part, "the daemon has closed the connection"
        data += part
    return data


def body_of(frame: bytes) -> bytes:
    """The message or the command in a ZMTP frame."""
    return frame[9 if frame[0] & LONG else 2 :]


def read_frame(sock: socket.socket) -> bytes:
    """A ZMTP frame."""
    head = read(sock, 2)
    if head[0] & LONG:
        head += read(sock, 7)
    return head + read(sock, int.from_bytes(head[1:], "big"))


def send(sock: socket.socket, what: str, data: bytes) -> None:
    """Send a row's bytes, a Register's with a control page and memory."""
    fds = []
    if what.startswith("Register"):
        register = WIRE.decode(body_of(data))[1]
        assert isinstance(register, Register)
        sizes = (CONTROL_BYTES, *register.layout.storages)
        fds = [sealed_file("test", size) for size in sizes]
    socket.send_fds(sock, [data], fds)
    close_all(fds)


def expect(sock: socket.socket, what: str, data: bytes) -> Message | None:
    """Read what a row says that the daemon sends; return the message that came, if it is one."""
    if what == "greeting":
        assert read(sock, GREETING_BYTES) == data
        return None
    frame = read_frame(sock)
    if data[0] & COMMAND:
        assert frame == data, what
        return None
    header, message = WIRE.decode(body_of(frame))
    documented_header, documented = WIRE.decode(body_of(data))
    assert header.request_id == documented_header.request_id
    assert type(message) is type(documented)
    assert type(message) in DIFFERS or frame == data, what
    return message


def test_the_documented_connections_are_what_a_daemon_speaks(shared_daemon: Daemon) -> None:
    """A worker's session and its lane's connection: the client's bytes are answered as documented.

    The token in Join is this daemon's.
    """
    rows = documented_rows()
    assert sum(side == "client" for side, _, _ in rows) == 7
    greetings = [row for row in rows if row[1].startswith(("greeting", "READY"))]
    token = b""
    with socket.socket(socket.AF_UNIX) as session, socket.socket(socket.AF_UNIX) as lane:
        session.settimeout(PATIENCE)
        lane.settimeout(PATIENCE)
        session.connect(str(shared_daemon.runtime_dir / "broker.sock"))
        sock = session
        for side, what, data in rows:
            if what == "Join":
                sock = lane
                lane.sendall(b"".join(data for side, _, data in greetings if side == "client"))
                for _, greeting, its_data in greetings[-2:]:
                    expect(lane, greeting, its_data)
            if side == "client":
                send(sock, what, data.replace(TOKEN, token) if token else data)
            elif isinstance(message := expect(sock, what, data), LaneUp):
                token = message.token
                lane.connect(message.endpoint.removeprefix("ipc://"))
