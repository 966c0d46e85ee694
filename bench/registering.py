"""What the largest registration that is allowed costs the broker, step by step: milliseconds.

Each step is in a turn of the broker's loop of its own: REGISTER arrives, its layout is looked at
and handed to the lane, the lane has mapped the memory. An engine of one rank, and the last one of
64, with which the engine is attached. Processor time, for other programs may be running.
"""

import time

import msgspec
from harness import Figures, layout, median

from kvd.broker.broker import Broker
from kvd.broker.effects import Effect, ToLane
from kvd.broker.sessions import RegisterStep
from kvd.cache.namespaces import Namespaces
from kvd.client_names import Peer
from kvd.config.settings import Settings
from kvd.config.sources import LoadedSettings
from kvd.wire.link import LINK, Imported, LaneReady
from kvd_proto.codec import WIRE
from kvd_proto.layout import GroupSpec
from kvd_proto.messages import (
    PROTOCOL_VERSION,
    Fingerprint,
    Hello,
    HostHandle,
    Register,
)

GROUPS, TENSORS, PAGE, BLOCKS = 1024, 8192, 4096, 16
RANKS = 64
ROUNDS = 5


def largest(rank: int, world_size: int) -> Register:
    """As many groups, tensors and references as there may be, all tensors in one storage."""
    shape = layout(TENSORS, PAGE, BLOCKS)
    each, refs = TENSORS // GROUPS, shape.groups[0].refs
    starts = range(0, TENSORS, each)
    groups = tuple(GroupSpec(refs=refs[at : at + each], block_size=16) for at in starts)
    return Register(
        rank=rank,
        world_size=world_size,
        device="host",
        fingerprint=Fingerprint(model="bench-registering"),
        layout=msgspec.structs.replace(shape, groups=groups),
        handles=(HostHandle(fd_index=1),),
    )


def measure() -> Figures:
    """Milliseconds of each step, medians of the rounds."""
    figures: Figures = {}
    for ranks in (1, RANKS):
        rounds = [_steps(ranks) for _ in range(ROUNDS)]
        for name in rounds[0]:
            figures[f"{name}_{ranks}_ms"] = median(each[name] for each in rounds)
    return figures


def _steps(ranks: int) -> dict[str, float]:
    """Milliseconds of each step for the last of `ranks` ranks."""
    settings = Settings(runtime_dir="/nowhere", cpu_bytes=2**33)
    broker = Broker(
        LoadedSettings(settings), boot_id=bytes(16), version="bench", pid=1, devices=["host"]
    )
    broker.registration.pool_opened(
        Namespaces(2**33, settings, boot_id=bytes(16), make_buffer=lambda _, size: bytearray(size))
    )
    ready = LaneReady(incarnation=1, pid=2, endpoint="ipc://lane", usable_bytes=2**62)
    broker.supervision.received("host", ready, 0.0)
    took: dict[str, float] = {}
    for rank in range(ranks):
        session = broker.connected(rank.to_bytes(16), Peer(1, 0, 0))
        hello = Hello(
            kind="worker",
            engine="e",
            pid=1,
            protocol_min=PROTOCOL_VERSION,
            protocol_max=PROTOCOL_VERSION,
            client="bench",
        )
        broker.request(session, 1, hello, 0.0)
        frame = WIRE.encode(largest(rank, ranks))
        started = time.process_time()
        _, message = WIRE.decode(frame)
        broker.request(session, 2, message, 0.0, 2)
        arrived = time.process_time()
        _write(broker.background.work())
        looked_at = time.process_time()
        if session.pending is None or session.pending.step is not RegisterStep.IMPORTING:
            raise RuntimeError(f"not under way: {session!r}")
        answer = Imported(session=session.number, error="")
        _write(broker.supervision.received("host", answer, 0.0))
        imported = time.process_time()
        if session.registration is None:
            raise RuntimeError("not registered")
        took = {
            "arrives": (arrived - started) * 1e3,
            "is_looked_at": (looked_at - arrived) * 1e3,
            "is_mapped": (imported - looked_at) * 1e3,
        }
    if session is None or session.engine is None or not session.engine.attached:
        raise RuntimeError("the engine is not attached")
    return took


def _write(effects: list[Effect]) -> None:
    """As the service does for a lane."""
    for effect in effects:
        if isinstance(effect, ToLane):
            LINK.encode(effect.message)


if __name__ == "__main__":
    print({name: round(value, 2) for name, value in measure().items()})
