"""Overload: stores wait, heartbeats and loads do not. Told by the order of answers alone."""

from msgspec.structs import replace

from kvd_client.memory import sealed_file
from kvd_proto.codec import WIRE
from kvd_proto.jobs import CONTROL_BYTES, JobBlocks
from kvd_proto.messages import (
    Done,
    Job,
    JobStatus,
    LaneUp,
    Load,
    Ping,
    Pong,
    Registered,
    Store,
)
from kvd_proto.zmtp import frame_header
from tests.conftest import StartDaemon
from tests.daemon.engines import Engine, keys_of, make_layout, wait_hit
from tests.processes import frozen
from tests.raw_client import RawClient, registration

PAGE = 64 * 1024
STORES = 300


def job(kind: type[Job], number: int, slot: int, generation: int) -> Job:
    """One chunk of blocks 1 and 2."""
    blocks = JobBlocks.of([1, 2], [2, 0], [0, 0], [slot], [generation])
    return kind(job=number, blocks=blocks, after=0, deadline_ms=60_000)


def test_a_flood_of_stores_in_a_lane_delays_neither_a_ping_nor_a_load(
    start_daemon: StartDaemon,
) -> None:
    """Behind 300 stores of one worker a PING and a load are answered before most of these."""
    daemon = start_daemon("--max-queued-jobs", "1000", cpu_bytes="96MiB")
    layout = make_layout(page=PAGE)
    with (
        Engine(daemon.runtime_dir, world_size=1, ranks=(), layout=layout) as engine,
        RawClient(daemon.runtime_dir) as worker,
    ):
        worker.hello("worker", "engine")
        fds = [sealed_file("test", size) for size in (CONTROL_BYTES, *layout.storages)]
        reply = worker.register(replace(registration(), layout=layout), fds)
        assert isinstance(reply, Registered)
        engine.wait_attached()
        mine = keys_of("mine", 1)
        ticket = engine.begin([*mine, *keys_of("flood", STORES)])
        assert len(ticket.keys) == 1 + STORES
        slots = list(zip(ticket.slots.tolist(), ticket.generations.tolist(), strict=True))
        (status,) = daemon.status()["lanes"]
        with worker.join_lane(worker.notice(LaneUp)[0]) as lane:
            stored = lane.ask(job(Store, 0, *slots[0]))
            assert isinstance(stored, Done)
            assert stored.status is JobStatus.OK, stored
            wait_hit(engine, mine)
            engine.scheduler.prepare_load(mine)
            flood = [job(Store, number, *slots[number]) for number in range(1, 1 + STORES)]
            requests = [*flood, Ping(), job(Load, 1000, *slots[0])]
            frames = [WIRE.encode(request, at) for at, request in enumerate(requests, 1)]
            with frozen(status["pid"]):
                lane.send_bytes(b"".join(frame_header(len(frame)) + frame for frame in frames))
            replies = [lane.reply()[1] for _ in requests]
        assert {reply.status for reply in replies if isinstance(reply, Done)} == {JobStatus.OK}
        assert replies.index(Pong(pid=status["pid"])) < STORES / 2
        loaded = next(
            i for i, one in enumerate(replies) if isinstance(one, Done) and one.job == 1000
        )
        assert loaded < STORES / 2
