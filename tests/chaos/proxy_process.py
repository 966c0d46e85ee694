"""A way to the daemon that may lose its way: a runtime directory that forwards to another.

    python -m tests.chaos.proxy_process FOLDER REAL_RUNTIME_DIR OWN_RUNTIME_DIR SEED

Control socket, request socket and lanes' sockets are there under the same names. While word 0 of
the file `faults` is set, messages are delayed, duplicated, truncated, reordered and lost;
the words after it count how many.
"""

import contextlib
import heapq
import itertools
import os
import random
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Container
from pathlib import Path

import msgspec
import zmq

from kvd_proto.codec import WIRE
from kvd_proto.errors import DecodeError
from kvd_proto.messages import LaneUp
from tests.chaos.faults import CHANCE, Fault, mangle
from tests.chaos.shared import Phase, Words, phase_word, words

LARGEST_DATAGRAM = 2**20
MOST_FDS = 250
MOST_PEERS = 64
MOST_RELAYS = 6
NAP_MS = 50
DOOR_CHANCE = CHANCE / 4
SEND_SECONDS = 2.0


class Wire:
    """Frames on their way, and whether something happens to them."""

    def __init__(self, words: Words, seed: int) -> None:
        self._words = words
        self.chance = random.Random(seed)
        self._due: list[tuple[float, int, bytes, Callable[[bytes], None]]] = []
        self._order = itertools.count()

    @property
    def bad(self) -> bool:
        """Whether messages come to harm now."""
        return bool(self._words[0])

    def count(self, fault: Fault) -> None:
        """One more."""
        self._words[1 + fault] += 1

    def carry(self, frame: bytes, send: Callable[[bytes], None]) -> None:
        """Send the frame on, now or later, whole or not."""
        if not self.bad:
            self._push(0.0, frame, send)
            return
        fault, sendings = mangle(frame, self.chance)
        if fault is not None:
            self.count(fault)
        for delay, part in sendings:
            self._push(delay, part, send)

    def _push(self, delay: float, frame: bytes, send: Callable[[bytes], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + delay, next(self._order), frame, send))

    def deliver(self) -> None:
        """Send what is due."""
        while self._due and self._due[0][0] <= time.monotonic():
            _, _, frame, send = heapq.heappop(self._due)
            with contextlib.suppress(zmq.ZMQError):  # gone, or reads nothing
                send(frame)

    @property
    def patience_ms(self) -> int:
        """Until something is due."""
        if not self._due:
            return NAP_MS
        return max(0, min(NAP_MS, int((self._due[0][0] - time.monotonic()) * 1000) + 1))


class Relay:
    """One request socket: a connection to the daemon for each that comes here."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", own: Path, real: Path) -> None:
        self._context = context
        self._real = real
        own.unlink(missing_ok=True)
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.socket.bind(f"ipc://{own}")
        self.peers: OrderedDict[bytes, zmq.Socket[bytes]] = OrderedDict()

    def forward(self, wire: Wire, ready: Container[object]) -> None:
        """Everything that has come, both ways; only those are asked that have something.

        Each client that came has left a peer here: to ask them all takes longer with each.
        """
        if self.socket in ready:
            with contextlib.suppress(zmq.Again):
                while True:
                    parts = self.socket.recv_multipart(zmq.NOBLOCK)
                    if len(parts) == 2:
                        wire.carry(parts[1], self._to_daemon(parts[0]))
        for identity, peer in list(self.peers.items()):
            if peer in ready:
                with contextlib.suppress(zmq.Again):
                    while True:
                        wire.carry(peer.recv(zmq.NOBLOCK), self._to_client(identity))

    def _to_daemon(self, identity: bytes) -> Callable[[bytes], None]:
        def send(frame: bytes) -> None:
            peer = self.peers.get(identity)
            if peer is None:
                peer = self.peers[identity] = self._context.socket(zmq.DEALER)
                peer.linger = 0
                peer.connect(f"ipc://{self._real}")
                if len(self.peers) > MOST_PEERS:
                    self.peers.popitem(last=False)[1].close(0)
            self.peers.move_to_end(identity)
            peer.send(frame, zmq.NOBLOCK)

        return send

    def _to_client(self, identity: bytes) -> Callable[[bytes], None]:
        def send(frame: bytes) -> None:
            self.socket.send_multipart([identity, frame], zmq.NOBLOCK)

        return send

    def close(self) -> None:
        """Close everything."""
        for sock in (self.socket, *self.peers.values()):
            sock.close(0)


class Proxy:
    """Control sockets and relays of one runtime directory."""

    def __init__(self, folder: Path, real: Path, own: Path, seed: int) -> None:
        own.mkdir(exist_ok=True)
        self._real, self._own = real, own
        self._phase = phase_word(folder)
        self._wire = Wire(words(folder / "faults", 1 + len(Fault)), seed)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._relays: OrderedDict[str, Relay] = OrderedDict()
        self._relay("broker.sock")
        control_socket = own / "control.sock"
        control_socket.unlink(missing_ok=True)
        self._control_socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control_socket.bind(str(control_socket))
        self._control_socket.listen(64)
        self._control_socket.setblocking(False)  # the socket API's own form
        self._other: dict[int, tuple[socket.socket, socket.socket, bool]] = {}

    def run(self) -> None:
        """Until the run ends."""
        while self._phase[0] != Phase.END:
            poller = zmq.Poller()
            poller.register(self._control_socket.fileno(), zmq.POLLIN)
            for fd in self._other:
                poller.register(fd, zmq.POLLIN)
            for relay in self._relays.values():
                for sock in (relay.socket, *relay.peers.values()):
                    poller.register(sock, zmq.POLLIN)
            ready = dict(poller.poll(self._wire.patience_ms))
            if self._control_socket.fileno() in ready:
                self._let_in()
            for fd in [fd for fd in self._other if fd in ready]:
                if fd in self._other:
                    self._datagram(fd)
            for relay in list(self._relays.values()):
                relay.forward(self._wire, ready)
            self._wire.deliver()

    def _relay(self, name: str) -> None:
        if name in self._relays:
            self._relays.move_to_end(name)
            return
        self._relays[name] = Relay(self._context, self._own / name, self._real / name)
        if len(self._relays) > MOST_RELAYS:
            oldest = next(key for key in self._relays if key != "broker.sock")
            self._relays.pop(oldest).close()

    # ----------------------------------------------------------------- control sockets

    def _let_in(self) -> None:
        client, _ = self._control_socket.accept()
        daemon = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            daemon.settimeout(SEND_SECONDS)
            daemon.connect(str(self._real / "control.sock"))
        except OSError:
            client.close()
            daemon.close()
            return
        client.settimeout(SEND_SECONDS)
        self._other[client.fileno()] = (client, daemon, False)
        self._other[daemon.fileno()] = (daemon, client, True)

    def _datagram(self, fd: int) -> None:
        here, there, from_daemon = self._other[fd]
        fds: list[int] = []
        try:
            frame, fds, _, _ = socket.recv_fds(here, LARGEST_DATAGRAM, MOST_FDS)
            if frame:
                socket.send_fds(there, [self._harm(frame, from_daemon)], fds)
        except OSError:
            frame = b""
        finally:
            for each in fds:
                os.close(each)
        if not frame:
            for sock in (here, there):
                del self._other[sock.fileno()]
                sock.close()

    def _harm(self, frame: bytes, from_daemon: bool) -> bytes:
        wire = self._wire
        if from_daemon:
            frame = self._redirected(frame)
        if wire.bad and wire.chance.random() < DOOR_CHANCE:
            wire.count(Fault.TRUNCATED)
            return frame[: wire.chance.randint(1, len(frame))]
        return frame

    def _redirected(self, frame: bytes) -> bytes:
        """A notice of a lane names the socket here that leads to the lane's."""
        try:
            header, message = WIRE.decode(frame)
        except DecodeError:
            return frame
        if not isinstance(message, LaneUp):
            return frame
        name = Path(message.endpoint).name
        self._relay(name)
        here = msgspec.structs.replace(message, endpoint=f"ipc://{self._own / name}")
        return WIRE.encode(here, header.request_id, header.boot_id, header.session)


def main() -> None:
    """The command line."""
    folder, real, own, seed = sys.argv[1:]
    Proxy(Path(folder), Path(real), Path(own), int(seed)).run()


if __name__ == "__main__":
    main()
