"""Registration decisions that a random walk meets too seldom."""

from kvd.core.broker import Broker
from kvd.core.effects import Effect, OpenPool, Reply
from kvd.core.sessions import Peer, Session
from kvd.link import LaneReady
from kvd.settings import Settings
from kvd.state.namespaces import Namespaces
from kvd_proto.layout import GroupSpec, RankLayout, TensorRef, TensorSpec
from kvd_proto.messages import Error, ErrorCode, Fingerprint, Hello, HostHandle, Register

PAGE = 4096
BLOCKS = 64


def make_broker(available: int) -> Broker:
    """A broker with `cpu_bytes = auto` on a machine with `available` bytes, and a lane."""
    broker = Broker(
        Settings(runtime_dir="/nowhere", cpu_bytes="auto", reserve=0),
        boot_id=bytes(16),
        version="test",
        pid=1,
        devices=["host"],
        open_namespaces=lambda n: Namespaces(n, make_buffer=lambda _, size: bytearray(size)),
        available_bytes=lambda: available,
    )
    broker.lane_message(
        "host", LaneReady(device="host", incarnation=1, pid=2, endpoint="ipc://lane"), 0.0
    )
    return broker


def worker(broker: Broker) -> Session:
    """A session of kind worker that has said HELLO."""
    session, _ = broker.connected(bytes(16), Peer(1, 0, 0))
    assert session is not None
    hello = Hello(kind="worker", engine="e", pid=1, protocol_min=1, protocol_max=1, client="test")
    broker.request(session, 1, hello, 0.0)
    return session


def register() -> Register:
    """One rank of two, 64 blocks of one page."""
    return Register(
        rank=0,
        world_size=2,
        device="host",
        fingerprint=Fingerprint(model="m"),
        layout=RankLayout(
            num_blocks=BLOCKS,
            blocks_per_chunk=1,
            hash_block_size=16,
            storages=(BLOCKS * PAGE,),
            tensors=(TensorSpec(storage=0, offset=0, page_bytes=PAGE, block_stride=PAGE),),
            groups=(GroupSpec(refs=(TensorRef(tensor=0, page_bytes=PAGE),), block_size=16),),
        ),
        handles=(HostHandle(fd_index=1),),
    )


def replies(effects: list[Effect]) -> list[Reply]:
    """The replies among the effects."""
    return [effect for effect in effects if isinstance(effect, Reply)]


def test_auto_opens_a_pool_of_ratio_times_reported_times_world_size() -> None:
    """The first registration decides the size, and the effect carries the arithmetic."""
    broker = make_broker(available=2**30)
    effects = broker.request(worker(broker), 2, register(), 0.0)
    (pool,) = [effect for effect in effects if isinstance(effect, OpenPool)]
    assert pool.cpu_bytes == 2 * BLOCKS * PAGE * 2
    assert "2 x 256 KiB GPU KV x 2 ranks = 1 MiB" in pool.explanation
    assert not replies(effects)


def test_auto_without_room_is_refused_once_and_can_be_tried_again() -> None:
    """No memory for one chunk: one ERROR with the arithmetic, and nothing stays pending."""
    broker = make_broker(available=PAGE)
    session = worker(broker)
    for request_id in (2, 3):
        (reply,) = replies(broker.request(session, request_id, register(), 0.0))
        assert isinstance(reply.message, Error)
        assert reply.message.code is ErrorCode.BAD_LAYOUT
        assert "available 4 KiB" in reply.message.text
    assert session.pending is None
    assert not replies(broker.tick(1000.0))


def test_a_registration_that_waits_too_long_is_refused_once() -> None:
    """Descriptors that never come: one ERROR at the deadline, and a late arrival does nothing."""
    broker = make_broker(available=2**30)
    session = worker(broker)
    assert not replies(broker.request(session, 2, register(), 0.0))
    (reply,) = replies(broker.tick(100.0))
    assert reply.request_id == 2
    assert isinstance(reply.message, Error)
    assert not replies(broker.descriptors(session, 0, 2, 101.0))
    assert not replies(broker.tick(200.0))
