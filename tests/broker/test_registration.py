"""Registration decisions that a random walk meets too seldom."""

from typing import Any

import pytest
from msgspec.structs import replace

from kvd.broker.admission import auto_size, check_layout
from kvd.broker.attachment import namespace_id
from kvd.broker.broker import Broker
from kvd.broker.effects import Effect, LogEvent, OpenPool, ToLane
from kvd.broker.registration import MAX_CHECKED_AT_ONCE
from kvd.errors import Refusal
from kvd.wire.link import ImportWorker
from kvd_proto.layout import TensorSpec
from kvd_proto.messages import Error, ErrorCode, Fingerprint, Register
from tests.broker import brokers
from tests.broker.brokers import (
    CUDA,
    PAGE,
    join,
    lane_up,
    make_broker,
    open_pool,
    refusal,
    replies,
)
from tests.layouts import flat_layout

BLOCKS = 64


def unsized() -> Broker:
    """A broker with `cpu_bytes = auto` and a lane that serves."""
    broker = make_broker("auto", reserve=0)
    lane_up(broker)
    return broker


def register(rank: int = 0, world_size: int = 2, layers: int = 1) -> Register:
    """One rank, 64 blocks of one page in each of its layers."""
    layout = flat_layout(layers * PAGE, blocks=BLOCKS)
    return brokers.register("host", rank, world_size, stage=rank, layout=layout)


def opened(effects: list[Effect]) -> list[OpenPool]:
    """The pools that the effects open."""
    return [effect for effect in effects if isinstance(effect, OpenPool)]


def size_pool(broker: Broker, effects: list[Effect], available: int = 2**30) -> list[Effect]:
    """What follows where effects open a pool on a machine with so much memory."""
    (effect,) = opened(effects)
    try:
        size, explanation = auto_size(broker.state.settings, effect.layouts, available, None)
    except Refusal as refusal:
        return broker.registration.pool_refused(refusal)
    return open_pool(broker, size, explanation)


def imports(effects: list[Effect]) -> list[int]:
    """The sessions whose memory a lane is to map."""
    orders = [effect.message for effect in effects if isinstance(effect, ToLane)]
    return [order.session for order in orders if isinstance(order, ImportWorker)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_auto_opens_a_pool_for_all_ranks_of_an_engine(order: tuple[int, int]) -> None:
    """Stages of one and three layers make one size, decided with the last rank; both go on."""
    broker = unsized()
    sessions = [join(broker), join(broker)]
    early, last = (
        broker.request(sessions[i], 2, register(rank=rank, layers=1 + 2 * rank), 0.0, 2)
        for i, rank in enumerate(order)
    )
    assert [len(opened(effects)) for effects in (early, last)] == [0, 1]
    assert not imports(early)
    after = size_pool(broker, last)
    assert broker.state.pool_bytes == 2 * BLOCKS * PAGE * 4
    assert any(isinstance(effect, LogEvent) and "GPU KV" in effect.text for effect in after)
    assert not replies([*early, *after])
    assert imports(after) == [session.number for session in sessions]


def test_a_rank_whose_engine_never_completes_decides_nothing() -> None:
    """It is refused for now, with the ranks that lack; another engine's ranks decide."""
    broker = unsized()
    alone = join(broker, "worker", "alone")
    assert not opened(broker.request(alone, 2, register(layers=50), 0.0, 2))
    assert not opened(broker.request(join(broker, "worker", "other"), 2, register(rank=1), 0.0, 2))
    (late, _) = replies(broker.tick(30.0))
    assert isinstance(late.message, Error)
    assert late.message.code is ErrorCode.NOT_READY
    assert "missing: [1]" in late.message.text
    assert broker.state.namespaces is None
    whole = join(broker, "worker", "whole")
    size_pool(broker, broker.request(whole, 2, register(world_size=1), 31.0, 2))
    assert broker.state.pool_bytes == 2 * BLOCKS * PAGE
    broker.state.check_integrity()


def test_ranks_that_contradict_each_other_do_not_size_the_pool() -> None:
    """While they wait, too, the odd one is refused with both figures, and a rank that is taken."""
    broker = unsized()
    broker.request(join(broker), 2, register(), 0.0, 2)
    for message, text in (
        (register(rank=1, world_size=3), "world_size = 3"),
        (register(), "rank 0 of engine 'e' is held by pid 1"),
    ):
        assert text in refusal(broker.request(join(broker), 2, message, 0.0, 2)).text
    assert broker.state.namespaces is None
    assert opened(broker.request(join(broker), 2, register(rank=1), 0.0, 2))


def test_auto_without_room_is_refused_once_and_can_be_tried_again() -> None:
    """No memory for one chunk: every rank gets the arithmetic, and nothing stays pending."""
    broker = unsized()
    sessions = (join(broker), join(broker))
    for request_id in (2, 3):
        assert not replies(broker.request(sessions[0], request_id, register(), 0.0, 2))
        asked = broker.request(sessions[1], request_id, register(rank=1), 0.0, 2)
        first, second = replies(size_pool(broker, asked, available=PAGE))
        assert [first.session, second.session] == [session.number for session in sessions]
        assert isinstance(first.message, Error)
        assert first.message == second.message
        assert first.message.code is ErrorCode.BAD_LAYOUT
        assert "available 4 KiB" in first.message.text
    assert not any(session.pending for session in sessions)
    assert not replies(broker.tick(1000.0))


def large(rank: int = 0, world_size: int = 1, **changes: Any) -> Register:
    """A rank with so many tensors that its layout is checked in a turn of its own."""
    many, message = MAX_CHECKED_AT_ONCE, register(rank, world_size)
    tensors = tuple(TensorSpec(0, number * PAGE, PAGE, many * PAGE) for number in range(many))
    storages = (BLOCKS * PAGE * many,)
    layout = replace(message.layout, storages=storages, tensors=tensors, **changes)
    return replace(message, layout=layout)


def test_a_large_registration_takes_a_turn_for_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One to decode it, one to look at it and hand it on; a second one waits for the next."""
    looks: list[int] = []

    def watched(message: Register, *rest: Any) -> None:
        looks.append(message.rank)
        check_layout(message, *rest)

    monkeypatch.setattr("kvd.broker.registration.check_layout", watched)
    broker = unsized()
    open_pool(broker, 2**30)
    sessions = [join(broker), join(broker)]
    for rank, session in enumerate(sessions):
        assert not imports(broker.request(session, 2, large(rank, 2), 0.0, 2))
    assert not looks
    for rank, session in enumerate(sessions):
        assert broker.background.busy
        assert imports(broker.background.work()) == [session.number]
        assert looks == list(range(rank + 1))


def test_a_large_registration_that_cannot_be_served_is_refused_in_its_turn() -> None:
    """With the reason, once; one whose session has gone meanwhile is forgotten."""
    broker = unsized()
    gone, session = join(broker, "worker", "gone"), join(broker)
    for worker in (gone, session):
        assert not replies(broker.request(worker, 2, large(hash_block_size=7), 0.0, 2))
    broker.lost(gone)
    error = refusal(broker.background.work())
    assert "no multiple of the hash block size 7" in error.text
    assert session.pending is None
    while broker.background.busy:
        assert not broker.background.work()
    broker.request(session, 3, large(), 0.0, 2)
    assert broker.state.namespaces is None
    assert opened(broker.background.work())


def test_engines_that_do_not_share_have_namespaces_of_their_own() -> None:
    """Model, shape, contents and world size count, being temporary, and users who do not share."""
    lasting = register()
    ordered = replace(lasting.layout.groups[0], contents="layer 1, layer 0")
    others = [
        lasting,
        replace(lasting, temporary=True),
        replace(lasting, fingerprint=Fingerprint(model="another")),
        replace(lasting, layout=replace(lasting.layout, blocks_per_chunk=4)),
        replace(lasting, layout=replace(lasting.layout, groups=(ordered,))),
        register(layers=2),
        register(world_size=1),
    ]
    ids = {namespace_id([message], uid) for message in others for uid in (None, 5, 6)}
    assert len(ids) == 3 * len(others)
    assert namespace_id([lasting], 5) in ids
    more_blocks = replace(lasting, layout=flat_layout(PAGE, blocks=2 * BLOCKS))
    assert namespace_id([more_blocks]) in ids


DEVICES = ("cuda:0", "gpu", "cuda", f"cuda:{'0F' * 16}", f"{CUDA}0")


@pytest.mark.parametrize(
    ("message", "code", "texts"),
    [
        (replace(register(), temporary=True), ErrorCode.BAD_STATE, ["cpu_bytes is auto"]),
        *(
            (replace(register(), device=device), ErrorCode.BAD_LAYOUT, [repr(device), "smi -L"])
            for device in DEVICES
        ),
    ],
)
def test_a_registration_that_cannot_be_served_is_refused(
    message: Register, code: ErrorCode, texts: list[str]
) -> None:
    """A temporary engine before the pool has a size, and devices without a UUID; no lane starts."""
    broker = unsized()
    error = refusal(broker.request(join(broker), 2, message, 0.0, 2))
    assert error.code is code
    for text in texts:
        assert text in error.text
    assert list(broker.state.lanes) == ["host"]
    assert broker.state.namespaces is None


@pytest.mark.parametrize(("device", "served"), [("host", False), (CUDA, True)])
def test_only_a_worker_whose_handles_name_no_descriptor_may_send_none(
    device: str, served: bool
) -> None:
    """It has no control page; memory that a descriptor names is refused without."""
    broker = make_broker(devices=[device])
    lane_up(broker, device)
    session = join(broker)
    effects = broker.request(session, 2, brokers.register(device), 0.0, 0)
    if served:
        assert imports(effects) == [session.number]
    else:
        error = refusal(effects)
        assert error.code is ErrorCode.BAD_LAYOUT
        assert "0 descriptors came with the registration, its handles name 2" in error.text


@pytest.mark.parametrize("name", ["a\x1b[2J", "nul\0", "left\u202eright", "two\nlines"])
@pytest.mark.parametrize("field", ["model", "revision", "label"])
def test_a_name_that_cannot_be_shown_is_refused(field: str, name: str) -> None:
    """A registration with an escape in a name gets one ERROR that names field and character."""
    broker = unsized()
    message = replace(register(), fingerprint=replace(Fingerprint(model="m"), **{field: name}))
    error = refusal(broker.request(join(broker), 2, message, 0.0, 2))
    assert error.code is ErrorCode.BAD_LAYOUT
    (character,) = (character for character in name if not character.isprintable())
    assert f"fingerprint.{field} {name!r}" in error.text
    assert f"U+{ord(character):04X}" in error.text
    assert error.text.isprintable()
