"""A broker for tests, with what surrounds it: a pool, lanes that are up, sessions."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from msgspec.structs import replace

from kvd.broker.admission import auto_size
from kvd.broker.broker import Broker
from kvd.broker.effects import Effect, OpenPool, Reply
from kvd.broker.sessions import Peer, Session
from kvd.cache.namespaces import MakeBuffer, Namespaces
from kvd.config.settings import Settings
from kvd.config.sources import Loaded
from kvd.errors import Refused
from kvd.wire.link import Imported, LaneReady
from kvd_proto.layout import GroupSpec, RankLayout, TensorRef, TensorSpec
from kvd_proto.messages import Error, Fingerprint, Hello, HostHandle, IpcHandle, Kind, Register

PAGE = 4096
CUDA = "cuda:" + "0f" * 16
_tokens = itertools.count()


def make_broker(
    cpu_bytes: int | str = 2**20,
    *,
    devices: Iterable[str] = ("host",),
    allocated: int = 2**62,
    make_buffer: MakeBuffer = lambda _name, nbytes: bytearray(nbytes),
    drop_buffers: Callable[[str], None] = lambda _name: None,
    **settings: Any,
) -> Broker:
    """Return a broker whose pool, unless its size is ``auto``, is open and allocated."""
    chosen = Settings(runtime_dir="/nowhere", cpu_bytes=cpu_bytes, **settings)
    broker = Broker(Loaded(chosen), boot_id=bytes(16), version="test", pid=1, devices=devices)
    if chosen.pool_bytes is not None:
        open_pool(broker, chosen.pool_bytes, make_buffer=make_buffer, drop_buffers=drop_buffers)
        broker.pool_allocated(allocated)
    return broker


def open_pool(
    broker: Broker,
    cpu_bytes: int,
    explanation: str = "",
    *,
    make_buffer: MakeBuffer = lambda _name, nbytes: bytearray(nbytes),
    drop_buffers: Callable[[str], None] = lambda _name: None,
) -> list[Effect]:
    """Open a pool in plain memory, as the broker's settings say."""
    namespaces = Namespaces(
        cpu_bytes,
        broker.state.settings,
        boot_id=bytes(16),
        make_buffer=make_buffer,
        drop_buffers=drop_buffers,
    )
    return broker.registration.pool_opened(namespaces, explanation)


def size_pool(
    broker: Broker, effects: list[Effect], available: int = 2**30, kept: int | None = None
) -> list[Effect]:
    """Return the effects, where they ask for a pool with what follows on a machine like this."""
    for effect in [effect for effect in effects if isinstance(effect, OpenPool)]:
        try:
            size, explanation = auto_size(broker.state.settings, effect.layouts, available, kept)
        except Refused as refusal:
            effects = effects + broker.registration.pool_refused(refusal)
        else:
            effects = effects + open_pool(broker, size, explanation)
    return effects


def lane_ready(usable_bytes: int = 2**62, **fields: Any) -> LaneReady:
    """Return what a lane says that serves."""
    ready = LaneReady(incarnation=1, pid=2, endpoint="ipc://lane", usable_bytes=usable_bytes)
    return replace(ready, **fields)


def lane_up(broker: Broker, device: str = "host", **fields: Any) -> list[Effect]:
    """Have a lane say that it serves; what the broker does then."""
    return broker.supervision.received(device, lane_ready(**fields), 0.0)


def hello(kind: Kind = "worker", engine: str = "e") -> Hello:
    """Return the first request of a session."""
    return Hello(kind=kind, engine=engine, pid=1, protocol_min=1, protocol_max=1, client="test")


def join(
    broker: Broker,
    kind: Kind = "worker",
    engine: str = "e",
    *,
    peer: Peer = Peer(1, 0, 0),  # noqa: B008  # it is frozen
    now: float = 0.0,
) -> Session:
    """Return a session that has said HELLO."""
    session, _ = broker.connected(next(_tokens).to_bytes(16), peer)
    broker.request(session, 1, hello(kind, engine), now)
    return session


def one_tensor(blocks: int = 8, page_bytes: int = PAGE) -> RankLayout:
    """Return a layout of one tensor in one storage, one block a chunk."""
    return RankLayout(
        num_blocks=blocks,
        blocks_per_chunk=1,
        hash_block_size=16,
        storages=(blocks * page_bytes,),
        tensors=(TensorSpec(storage=0, offset=0, page_bytes=page_bytes, block_stride=page_bytes),),
        groups=(GroupSpec(refs=(TensorRef(tensor=0, page_bytes=page_bytes),), block_size=16),),
    )


def register(device: str = "host", rank: int = 0, world_size: int = 1, **fields: Any) -> Register:
    """Return the registration of a rank with `one_tensor`, but for the `fields`."""
    memory = HostHandle(fd_index=1)
    ipc = IpcHandle(handle=bytes(64), allocation=8 * PAGE)
    message = Register(
        rank=rank,
        world_size=world_size,
        device=device,
        fingerprint=Fingerprint(model="m"),
        layout=one_tensor(),
        handles=(memory if device == "host" else ipc,),
    )
    return replace(message, **fields)


def mapped(
    broker: Broker, session: Session, device: str = "host", attempt: int = 0
) -> list[Effect]:
    """Have a lane say that it has mapped the session's memory; what the broker does then."""
    message = Imported(session=session.number, error="", attempt=attempt)
    return broker.supervision.received(device, message, 0.0)


def replies(effects: list[Effect]) -> list[Reply]:
    """Return the replies among the effects."""
    return [effect for effect in effects if isinstance(effect, Reply)]


def refusal(effects: list[Effect]) -> Error:
    """Return the one reply, which is a refusal."""
    (reply,) = replies(effects)
    assert isinstance(reply.message, Error)
    return reply.message
