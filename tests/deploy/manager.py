"""A service manager's end of NOTIFY_SOCKET, for tests."""

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_CREDENTIALS = struct.Struct("3i")


@dataclass
class Manager:
    """Receives what a service says, as systemd would."""

    address: str
    socket: socket.socket
    pids: set[int] = field(default_factory=set)

    def receive(self, seconds: float) -> list[str]:
        """The lines of the next message; none when nothing comes within `seconds`."""
        self.socket.settimeout(seconds)
        try:
            data, control, _, _ = self.socket.recvmsg(4096, socket.CMSG_SPACE(_CREDENTIALS.size))
        except TimeoutError:
            return []
        for _, _, value in control:
            self.pids.add(_CREDENTIALS.unpack(value)[0])
        return data.decode().splitlines()

    def until(self, line: str, seconds: float = 60.0) -> list[str]:
        """Every line up to the message that holds `line` (a beginning suffices)."""
        seen: list[str] = []
        while not any(each.startswith(line) for each in seen):
            message = self.receive(seconds)
            assert message, f"{line} did not come; {seen}"
            seen += message
        return seen

    def drain(self) -> None:
        """Forget what waits to be read."""
        while self.receive(0.01):
            pass


@contextmanager
def listening(address: str) -> Iterator[Manager]:
    """A manager at `address`: a path, or @ and a name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        sock.bind("\0" + address[1:] if address.startswith("@") else address)
        yield Manager(address, sock)
