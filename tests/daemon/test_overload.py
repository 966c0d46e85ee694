"""Overload: stores wait, heartbeats and loads do not. Told by the order of answers alone."""

from pathlib import Path

from kvd.wire.zmtp import Incoming
from kvd_proto.blocks import JobBlocks
from kvd_proto.codec import MAX_MESSAGE_BYTES, WIRE
from kvd_proto.control import EPOCH_WORDS
from kvd_proto.messages import (
    Done,
    Job,
    JobStatus,
    Load,
    Message,
    Ping,
    Pong,
    Store,
)
from tests.conftest import StartDaemon
from tests.daemon.engines import Engine, keys_of, make_layout, wait_hit
from tests.processes import frozen
from tests.wire.raw_zmtp import connect, message

PAGE = 64 * 1024
STORES = 300
OTHER_IDS = 1_000_000


class Speaker:
    """A request socket spoken by hand."""

    def __init__(self, path: Path) -> None:
        self.sock = connect(path)
        self._incoming = Incoming(MAX_MESSAGE_BYTES)

    def say(self, frames: list[bytes]) -> None:
        """Send messages, all at once."""
        self.sock.sendall(b"".join(map(message, frames)))

    def answers(self, count: int) -> list[Message]:
        """So many messages, in the order in which they were sent."""
        found: list[Message] = []
        while len(found) < count:
            while len(found) < count and (frame := self._incoming.take()) is not None:
                found.append(WIRE.decode(frame)[1])
            if len(found) < count:
                data = self.sock.recv(65536)
                assert data, found
                self._incoming.feed(data)
        return found


def test_a_flood_of_stores_in_a_lane_delays_neither_a_ping_nor_a_load(
    start_daemon: StartDaemon,
) -> None:
    """Behind 300 stores of one worker a PING and a load are answered before most of these."""
    daemon = start_daemon("--max-queued-jobs", "1000", cpu_bytes="96MiB")
    layout = make_layout(page=PAGE)
    with Engine(daemon.runtime_dir, world_size=1, layout=layout).wait_attached() as engine:
        mine = keys_of("mine", 1)
        engine.store(mine)
        wait_hit(engine, mine)
        lease = engine.scheduler.prepare_load(mine)
        ticket = engine.begin(keys_of("flood", STORES))
        assert len(ticket.keys) == STORES
        (lane,) = daemon.status()["lanes"]
        connection = engine.workers[0]._connection
        assert connection is not None
        boot_id, token = connection.boot_id, connection.token

        def frame(number: int, request: Message) -> bytes:
            # Other ids than the worker's own: a lane serves each request of a worker once.
            return WIRE.encode(request, OTHER_IDS + number, boot_id, token)

        def job(kind: type[Job], number: int, slot: int, generation: int) -> Message:
            return kind(
                job=number,
                blocks=JobBlocks.of([1, 2], [2, 0], [0, 0], [slot], [generation]),
                after=0,
                deadline_ms=60_000,
                **({"word": EPOCH_WORDS - 1, "epoch": 0} if kind is Store else {}),
            )

        stores = zip(ticket.slots.tolist(), ticket.generations.tolist(), strict=True)
        flood = [frame(i, job(Store, i, *where)) for i, where in enumerate(stores, 1)]
        load = job(Load, 1000, int(lease.slots[0]), int(lease.generations[0]))
        path = daemon.runtime_dir / f"lane-host-{lane['incarnation']}.sock"
        speaker = Speaker(path)
        with speaker.sock:
            with frozen(lane["pid"]):
                speaker.say([*flood, frame(2000, Ping()), frame(1000, load)])
            order = speaker.answers(STORES + 2)
        done = [answer for answer in order if isinstance(answer, Done)]
        assert {answer.status for answer in done} == {JobStatus.OK}
        pong = next(i for i, answer in enumerate(order) if isinstance(answer, Pong))
        loaded = next(i for i, a in enumerate(order) if isinstance(a, Done) and a.job == 1000)
        assert pong < STORES / 2
        assert loaded < STORES / 2
