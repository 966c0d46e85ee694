"""Attaching an engine whose ranks are all registered to its namespace.

The namespace's id is a hash of everything that decides the meaning of a chunk's bytes: the
fingerprint that the engine states, and the layout that its registration shows. It excludes the
number of GPU blocks, strides and addresses: an engine with more GPU memory reads the same chunks.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from kvd.broker.children import Lane
from kvd.broker.effects import (
    DirectoryFd,
    Effect,
    LifelineFd,
    LogEvent,
    Notify,
    SessionFds,
    ToLane,
)
from kvd.broker.sessions import Engine, Session
from kvd.broker.state import BrokerState
from kvd.errors import KvdError
from kvd.wire.link import BindWorker, ImportWorker
from kvd_proto.capacity import size_pool, tokens_per_chunk
from kvd_proto.descriptions import record_bytes
from kvd_proto.layout import RankLayout
from kvd_proto.messages import Attached, LaneUp, Register
from kvd_proto.text import format_size


def attach(state: BrokerState, engine: Engine) -> list[Effect]:
    """Attach an engine; do nothing while ranks are missing or the pool has no size.

    1. Open its namespace.
    2. Bind the workers whose memory is mapped.
    3. Notify its sessions, if all of them are.

    Raises:
        LayoutError: the ranks' layouts make no pool.
        Refusal: the namespace cannot be opened.
    """
    if engine.missing_ranks or state.namespaces is None:
        return []
    workers = [engine.workers[rank] for rank in range(engine.world_size)]
    registrations = [w.registration for w in workers if w.registration is not None]
    layouts = [r.layout for r in registrations]
    sizes = size_pool(layouts, state.namespaces.cpu_bytes)
    shared = state.settings.share_between_users == "yes"
    ns_id = namespace_id(registrations, None if shared else engine.uid)
    if state.namespaces.get(ns_id) is None:
        state.namespaces.make_room()
    namespace = state.namespaces.open(
        ns_id,
        sizes.slot_bytes,
        world_size=engine.world_size,
        replicated=layouts[0].replicated,
        blocks_per_chunk=layouts[0].blocks_per_chunk,
        model=registrations[0].fingerprint.model,
        temporary=registrations[0].temporary,
        description_record_bytes=record_bytes(layouts[0]),
    )
    namespace.tokens_per_chunk = tokens = tokens_per_chunk(layouts[0])
    if namespace.table.curve is not None:
        keys = len(layouts[0].groups)  # of each token
        namespace.table.curve.tokens_per_key = None if tokens is None else tokens / keys
    state.namespaces.attach_engine(namespace)
    engine.namespace, engine.stepped = namespace, False
    # A worker whose lane was lost meanwhile is bound when the next lane has mapped its memory.
    return [
        *(bind(state, worker) for worker in workers if worker.imported),
        *notify_attached(state, engine),
        *_small_limits(state, engine, namespace.geometry.slot_bytes),
        LogEvent(
            f"engine {engine.name} attached to namespace {namespace.id.hex()[:8]}:"
            f" {sizes.num_chunks} chunks of {format_size(sizes.bytes_per_chunk)}",
            fields={"engine": engine.name, "namespace": namespace.id.hex()},
        ),
    ]


def _small_limits(
    state: BrokerState, engine: Engine, slot_bytes: Sequence[int]
) -> Iterator[LogEvent]:
    """Warn of settings that are smaller than a chunk of this engine.

    It is served all the same: a lone job or chunk always passes.
    """
    share, chunk = max(slot_bytes), sum(slot_bytes)
    texts = []
    if state.settings.queued_bytes < share:
        texts.append(
            f"max_queued_bytes = {state.settings.max_queued_bytes} is less than a rank's share of a"
            f" chunk, {format_size(share)}: of its stores that wait in a lane all but one are shed;"
            " set it to some hundred chunks, such as the default, 64GiB"
        )
    for tier in state.tiers:
        setting = tier.setting
        size = setting.size_bytes
        if size is not None and size < chunk:
            texts.append(
                f"tier {setting.name} has size={setting.options['size']}, a chunk"
                f" {format_size(chunk)}: it stores none; set a larger size"
            )
        elif setting.queue_bytes < chunk:
            texts.append(
                f"tier {setting.name} has queue={format_size(setting.queue_bytes)}, a chunk"
                f" {format_size(chunk)}: it is given one at a time; set a larger queue, such as"
                " queue=256MiB"
            )
    for text in texts:
        yield LogEvent(f"engine {engine.name}: {text}", "warning", fields={"engine": engine.name})


def notify_attached(state: BrokerState, engine: Engine) -> list[Effect]:
    """Notify a served engine's sessions that it is attached; do nothing if it is not served."""
    if not engine.served:
        return []
    return [attached_notice(state, engine, number) for number in engine.sessions]


def attached_notice(state: BrokerState, engine: Engine, session: int) -> Notify:
    """Return ATTACHED for a session of an attached engine."""
    namespace = engine.namespace
    if namespace is None:
        raise KvdError(f"engine {engine.name!r} is not attached")
    geometry = namespace.geometry
    is_scheduler = engine.sessions[session].kind == "scheduler"
    return Notify(
        session,
        Attached(
            namespace=namespace.id,
            world_size=engine.world_size,
            bytes_per_chunk=sum(geometry.slot_bytes),
            num_chunks=geometry.num_slots,
            reuse_threshold=namespace.reuse_threshold,
            description_bytes=namespace.table.descriptions.max_bytes,
            tiers=tuple(tier.info for tier in state.tiers)
            if namespace.directory.tiers is not None
            else (),
        ),
        DirectoryFd(namespace.id, engine.number if is_scheduler else None),
    )


def bind(state: BrokerState, worker: Session) -> ToLane:
    """Return the order that tells a worker's lane where the worker's chunks lie.

    Increments the lane's `bindings`: where the lane pins, none of the pool counts as usable until
    it has answered.
    """
    engine, registration = worker.engine, worker.registration
    if engine is None or registration is None or engine.namespace is None:
        raise KvdError(
            f"{worker.identity} cannot be bound: it has registered no memory, or its engine is not"
            " attached"
        )
    geometry = engine.namespace.geometry
    arena = 0 if registration.layout.replicated else registration.rank
    state.lanes[registration.device].bindings += 1
    return ToLane(
        registration.device,
        BindWorker(
            session=worker.number,
            namespace=engine.namespace.id,
            owner=engine.number,
            arena_base=geometry.arena_base(arena),
            num_slots=geometry.num_slots,
        ),
        DirectoryFd(engine.namespace.id),
    )


def import_worker(session: Session, registration: Register) -> ToLane:
    """Order the lane to map the worker's memory."""
    session.imported = False
    return ToLane(
        registration.device,
        ImportWorker(
            session=session.number,
            token=session.token,
            engine=session.engine.name if session.engine is not None else "?",
            pid=session.peer.pid,
            uid=session.peer.uid,
            rank=registration.rank,
            world_size=registration.world_size,
            layout=registration.layout,
            handles=registration.handles,
            attempt=session.attempt,
        ),
        SessionFds(session.number),
    )


def lane_up(session: Session, lane: Lane) -> Notify:
    """Return the notice that names the lane's process that has mapped a worker's memory."""
    message = LaneUp(
        device=lane.device,
        incarnation=lane.incarnation,
        endpoint=lane.endpoint,
        token=session.token,
    )
    return Notify(session.number, message, LifelineFd(lane.device))


def _shape(layout: RankLayout) -> list[Any]:
    return [
        layout.blocks_per_chunk,
        layout.hash_block_size,
        layout.replicated,
        layout.slot_bytes,
        layout.kinds,
        layout.pages,
        layout.contents,
    ]


def namespace_id(registrations: Sequence[Register], uid: int | None = None) -> bytes:
    """Return the 16-byte id for one engine's registrations, ordered by rank.

    With `uid`, engines of other users get other ids.
    """
    first = registrations[0]
    parts: list[Any] = [
        first.fingerprint,
        first.world_size,
        [[r.stage, _shape(r.layout)] for r in registrations],
    ]
    if first.temporary:  # shared with temporary engines only
        parts.append("temporary")
    if uid is not None:
        parts.append({"uid": uid})
    return hashlib.blake2b(msgspec.msgpack.encode(parts), digest_size=16).digest()
