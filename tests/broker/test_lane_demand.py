"""Lanes of CUDA devices: who gets one, and what becomes of one that cannot serve."""

import pytest
from msgspec.structs import replace

from kvd.broker.broker import Broker
from kvd.broker.demand import FAILED_SECONDS, MAX_CUDA_LANES
from kvd.broker.effects import DropLane, Effect, Event, KillLane, Reply, StartLane, ToLane
from kvd.broker.sessions import Peer, Session
from kvd.broker.status_report import status_report
from kvd.cache.namespaces import Namespaces
from kvd.config.settings import Settings
from kvd.wire.link import (
    Imported,
    LaneCounters,
    LaneFailed,
    LanePong,
    LaneReady,
    Released,
    ReleaseWorker,
)
from kvd_proto.layout import GroupSpec, RankLayout, TensorRef, TensorSpec
from kvd_proto.messages import (
    Error,
    ErrorCode,
    Fingerprint,
    Hello,
    IpcHandle,
    Message,
    Register,
    Registered,
    Unregister,
    Unregistered,
)

PAGE = 4096
BLOCKS = 8
DEVICE = "cuda:" + "0f" * 16


def make_broker() -> Broker:
    """A broker whose host lane is up and whose pool is there."""
    broker = Broker(
        Settings(runtime_dir="/nowhere", cpu_bytes=2**20),
        boot_id=bytes(16),
        version="test",
        pid=1,
        devices=["host"],
        open_namespaces=lambda n: Namespaces(n, make_buffer=lambda _, size: bytearray(size)),
        available_bytes=lambda: 2**30,
    )
    broker.state.allocated = 2**62
    ready(broker, "host", 1)
    return broker


def ready(broker: Broker, device: str, incarnation: int) -> list[Effect]:
    """A lane's process serves."""
    message = LaneReady(
        device=device, incarnation=incarnation, pid=2, endpoint="ipc://lane", usable_bytes=2**62
    )
    return broker.supervision.heard(device, message, 0.0)


def worker(broker: Broker, name: str = "e") -> Session:
    """A session of kind worker whose control page has come."""
    session, _ = broker.connected(name.encode().ljust(16), Peer(1, 0, 0))
    assert session is not None
    hello = Hello(kind="worker", engine=name, pid=1, protocol_min=1, protocol_max=1, client="test")
    broker.request(session, 1, hello, 0.0)
    broker.descriptors(session, 0, 1, 0.0)
    return session


def register(device: str = DEVICE) -> Register:
    """The only rank of an engine, with its memory on `device`."""
    return Register(
        rank=0,
        world_size=1,
        device=device,
        fingerprint=Fingerprint(model="m"),
        layout=RankLayout(
            num_blocks=BLOCKS,
            blocks_per_chunk=1,
            hash_block_size=16,
            storages=(BLOCKS * PAGE,),
            tensors=(TensorSpec(storage=0, offset=0, page_bytes=PAGE, block_stride=PAGE),),
            groups=(GroupSpec(refs=(TensorRef(tensor=0, page_bytes=PAGE),), block_size=16),),
        ),
        handles=(IpcHandle(handle=bytes(64), allocation=BLOCKS * PAGE),),
    )


def replies(effects: list[Effect]) -> list[Message]:
    """The replies among the effects."""
    return [effect.message for effect in effects if isinstance(effect, Reply)]


def refusal(effects: list[Effect]) -> Error:
    """The one reply, which is a refusal."""
    (reply,) = replies(effects)
    assert isinstance(reply, Error)
    return reply


def serve(broker: Broker, session: Session, incarnation: int = 2) -> None:
    """Register on DEVICE with a lane that starts and maps the memory."""
    effects = broker.request(session, 2, register(), 0.0)
    assert StartLane(DEVICE) in effects
    ready(broker, DEVICE, incarnation)
    done = broker.supervision.heard(DEVICE, Imported(session=session.number, error=""), 0.0)
    assert isinstance(replies(done)[0], Registered)


def test_the_first_worker_of_a_device_starts_its_lane() -> None:
    """One lane for all workers of a device; the daemon stays ready while it starts."""
    broker = make_broker()
    serve(broker, worker(broker, "one"))
    again = broker.request(worker(broker, "two"), 2, register(), 0.0)
    assert not [effect for effect in again if isinstance(effect, StartLane)]
    assert list(broker.state.lanes) == ["host", DEVICE]


def test_a_registration_that_cannot_be_served_takes_no_device_away() -> None:
    """Refused for its layout as the first of a device, it leaves the lane to who comes next."""
    broker = make_broker()
    wrong = replace(register(), layout=replace(register().layout, hash_block_size=7))
    session = worker(broker)
    assert "hash block size 7" in refusal(broker.request(session, 2, wrong, 0.0)).text
    serve(broker, session)


def test_a_starting_lane_does_not_unready_the_daemon() -> None:
    """A lane that nobody is served by yet is no reason not to be ready; a lost one is."""
    broker = make_broker()
    session = worker(broker)
    broker.request(session, 2, register(), 0.0)
    seen = [broker.state.ready]
    ready(broker, DEVICE, 2)
    broker.supervision.heard(DEVICE, Imported(session=session.number, error=""), 0.0)
    broker.supervision.lost(DEVICE, "killed by signal 9")
    seen.append(broker.state.ready)
    assert DEVICE in broker.state.lanes  # its worker waits for the next incarnation
    ready(broker, DEVICE, 3)
    assert [*seen, broker.state.ready] == [True, False, True]


@pytest.mark.parametrize("device", ["cuda:0", "gpu", "cuda", f"cuda:{'0F' * 16}", f"{DEVICE}0"])
def test_a_device_without_a_uuid_is_refused(device: str) -> None:
    """An index, or what is no device at all, is refused with the remedy."""
    broker = make_broker()
    error = refusal(broker.request(worker(broker), 2, register(device), 0.0))
    assert error.code is ErrorCode.BAD_LAYOUT
    assert repr(device) in error.text
    assert "nvidia-smi -L" in error.text
    assert list(broker.state.lanes) == ["host"]


def test_a_lane_that_cannot_start_refuses_in_its_own_words() -> None:
    """Everybody who waits is refused with the lane's sentence; who asks soon after, too."""
    broker = make_broker()
    sessions = [worker(broker, name) for name in ("one", "two")]
    for session in sessions:
        assert not replies(broker.request(session, 2, register(), 0.0))
    effects = broker.supervision.heard(DEVICE, LaneFailed(error="no such device"), 0.0)
    assert KillLane(DEVICE) in effects
    effects = broker.supervision.lost(DEVICE, "exit status 1")
    errors = [reply for reply in replies(effects) if isinstance(reply, Error)]
    assert [(e.code, e.text) for e in errors] == [(ErrorCode.BAD_LAYOUT, "no such device")] * 2
    lines = [effect.text for effect in effects if isinstance(effect, Event)]
    assert [line.partition(" (")[0] for line in lines] == ["engine one worker", "engine two worker"]
    assert effects[-1] == DropLane(DEVICE)
    assert list(broker.state.lanes) == ["host"]
    broker.descriptors(sessions[0], 0, 1, 1.0)  # counted anew
    again = refusal(broker.request(sessions[0], 3, register(), 1.0))
    assert again.text == "no such device"  # at once, without a process
    assert StartLane(DEVICE) in broker.request(sessions[0], 4, register(), FAILED_SECONDS + 1)


def test_a_lane_that_dies_at_its_start_may_be_tried_again() -> None:
    """Without a word of its own the refusal says how it ended, and that is no verdict."""
    broker = make_broker()
    broker.request(worker(broker), 2, register(), 0.0)
    error = refusal(broker.supervision.lost(DEVICE, "killed by signal 11"))
    assert error.code is ErrorCode.LANE_LOST
    assert "killed by signal 11" in error.text
    assert DEVICE not in broker.state.lanes


def test_a_lane_that_ends_without_workers_is_let_go() -> None:
    """It stays while it lives, and is not replaced; what it has done stays counted."""
    broker = make_broker()
    session = worker(broker)
    serve(broker, session)
    broker.lost(session)
    assert DEVICE in broker.state.lanes
    counters = LaneCounters(store_bytes=4096, jobs={"store ok": 1})
    pong = LanePong(sequence=1, queued_jobs=0, bytes_in_flight=0, workers=0, counters=counters)
    broker.supervision.heard(DEVICE, pong, 0.0)
    assert DropLane(DEVICE) in broker.supervision.lost(DEVICE, "exit status 0")
    totals = status_report(broker.state, 1, "test", 0.0)["counters"]
    assert (totals["store_bytes"], totals["jobs"]) == (4096, {"store ok": 1})


def test_a_release_ends_with_its_lane() -> None:
    """A worker that leaves while its lane dies is answered once, and the lane is let go."""
    broker = make_broker()
    session = worker(broker)
    serve(broker, session)
    assert not replies(broker.request(session, 3, Unregister(), 0.0))
    effects = broker.supervision.lost(DEVICE, "killed by signal 9")
    assert [type(reply) for reply in replies(effects)] == [Unregistered]
    assert effects[-1] == DropLane(DEVICE)


def test_a_release_does_not_end_with_another_lane() -> None:
    """A worker that leaves is answered when its own lane has let go of its memory."""
    broker = make_broker()
    session = worker(broker)
    serve(broker, session)
    assert not replies(broker.request(session, 3, Unregister(), 0.0))
    assert not replies(broker.supervision.lost("host", "killed by signal 9"))
    released = broker.supervision.heard(DEVICE, Released(session=session.number), 0.0)
    assert [type(reply) for reply in replies(released)] == [Unregistered]


def test_a_worker_that_leaves_while_the_next_lane_maps_its_memory_is_released_there() -> None:
    """The lane was asked to map it, so it is asked to let go, and no answer of it counts."""
    broker = make_broker()
    session = worker(broker)
    serve(broker, session)
    broker.supervision.lost(DEVICE, "killed by signal 9")
    ready(broker, DEVICE, 3)
    effects = broker.request(session, 3, Unregister(), 0.0)
    assert not replies(effects)
    assert ToLane(DEVICE, ReleaseWorker(session=session.number)) in effects
    broker.supervision.heard(DEVICE, Imported(session=session.number, error=""), 0.0)
    assert session.registration is None
    released = broker.supervision.heard(DEVICE, Released(session=session.number), 0.0)
    assert [type(reply) for reply in replies(released)] == [Unregistered]


def test_the_answer_to_a_registration_that_was_given_up_is_not_that_of_the_next() -> None:
    """A lane that maps too late maps for nobody: the memory that comes next is not there yet."""
    broker = make_broker()
    session = worker(broker)
    broker.request(session, 2, register(), 0.0)
    ready(broker, DEVICE, 2)
    assert "did not map the memory in time" in refusal(broker.tick(100.0)).text
    assert not replies(broker.request(session, 3, register(), 100.0))  # its descriptors are to come
    late = broker.supervision.heard(DEVICE, Imported(session=session.number, error=""), 100.0)
    assert not replies(late)
    assert session.registration is None


def test_workers_that_were_served_wait_for_a_lane_that_fails() -> None:
    """A lane that is lost and cannot start now is tried again for them, newcomers are refused."""
    broker = make_broker()
    serve(broker, worker(broker, "old"))
    broker.supervision.lost(DEVICE, "killed by signal 9")
    new = worker(broker, "new")
    assert not replies(broker.request(new, 2, register(), 0.0))
    broker.supervision.heard(DEVICE, LaneFailed(error="the device is lost"), 0.0)
    effects = broker.supervision.lost(DEVICE, "exit status 1")
    assert refusal(effects).text == "the device is lost"
    assert DEVICE in broker.state.lanes
    assert broker.state.lanes[DEVICE].last_error == "the device is lost"


def test_the_number_of_lanes_is_bounded() -> None:
    """A registration that would need one lane too many is refused."""
    broker = make_broker()
    for index in range(MAX_CUDA_LANES):
        device = f"cuda:{index:032x}"
        assert StartLane(device) in broker.request(
            worker(broker, f"e{index}"), 2, register(device), 0.0
        )
    error = refusal(broker.request(worker(broker, "more"), 2, register(), 0.0))
    assert error.code is ErrorCode.LIMIT
    assert DEVICE in error.text


def test_silence_counts_only_while_the_broker_listens() -> None:
    """After a pause of its own the broker kills no lane; one that stays silent it does."""
    broker = make_broker()
    timeout = broker.state.settings.lane_timeout_seconds
    effects = broker.tick(0.1) + broker.tick(100.0)
    assert not [effect for effect in effects if isinstance(effect, KillLane)]
    times = [100.0 + timeout * part / 4 for part in range(1, 9)]
    killed = [now for now in times for e in broker.tick(now) if isinstance(e, KillLane)]
    assert len(killed) == 1
    assert killed[0] > 100.0 + timeout / 2


def test_a_slow_broker_still_notices_a_silent_lane() -> None:
    """However long each turn of the broker takes, a lane that never answers is killed."""
    broker = make_broker()
    effects = [effect for turn in range(20) for effect in broker.tick(turn * 100.0)]
    assert [effect for effect in effects if isinstance(effect, KillLane)]
