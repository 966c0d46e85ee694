"""Whether a registration can be served at all: asked before anything is mapped."""

from kvd.core.sessions import Engine
from kvd.errors import Refused
from kvd.state.namespaces import Namespace
from kvd_proto.errors import LayoutError
from kvd_proto.layout import compare_ranks, validate_layout
from kvd_proto.messages import ErrorCode, Register
from kvd_proto.sizes import size_pool


def check_rank(engine: Engine, message: Register) -> None:
    """The rank is free, and says of the engine what its other ranks say.

    Raises:
        Refused: with both sides' figures.
    """
    holder = engine.workers.get(message.rank)
    if holder is not None:
        raise Refused(
            ErrorCode.BAD_STATE,
            f"rank {message.rank} of engine {engine.name!r} is held by pid {holder.peer.pid};"
            " give each engine instance a name of its own",
        )
    if message.rank >= message.world_size:
        raise Refused(
            ErrorCode.BAD_LAYOUT,
            f"rank {message.rank} in a world of {message.world_size}; ranks count from 0",
        )
    if engine.workers and engine.world_size != message.world_size:
        raise Refused(
            ErrorCode.BAD_LAYOUT,
            f"rank {message.rank} says world size {message.world_size}, the engine's other"
            f" ranks say {engine.world_size}",
        )
    others = {
        worker.registration.temporary for worker in engine.workers.values() if worker.registration
    }
    if others - {message.temporary}:
        raise Refused(
            ErrorCode.BAD_LAYOUT,
            f"rank {message.rank} says temporary = {message.temporary}, the engine's other ranks"
            f" say {not message.temporary}",
        )
    if engine.fingerprint is not None and engine.fingerprint != message.fingerprint:
        raise Refused(
            ErrorCode.BAD_LAYOUT,
            f"rank {message.rank} has another fingerprint than the engine's other ranks:"
            f" {message.fingerprint} against {engine.fingerprint}",
        )


def check_leases(engine: Engine, namespace: Namespace, limit: int) -> None:
    """The engine may have one lease more.

    Raises:
        Refused: it has as many as it may.
    """
    held = namespace.table.slots.leases.held_by(engine.number)
    if held >= limit:
        raise Refused(
            ErrorCode.LIMIT,
            f"engine {engine.name!r} holds {held} leases: give them back when loads have ended, or"
            f" raise max_leases (now {limit})",
            limit="max_leases",
        )


def check_layout(engine: Engine, message: Register, budget: int | None) -> None:
    """The layout is sound, agrees with the other ranks', and a chunk fits `budget` bytes.

    A budget of None is not known yet.

    Raises:
        Refused: naming the odd figure.
    """
    if len(message.handles) != len(message.layout.storages):
        raise Refused(
            ErrorCode.BAD_LAYOUT,
            f"{len(message.handles)} handles for {len(message.layout.storages)} storages",
        )
    registrations = {
        rank: worker.registration
        for rank, worker in engine.workers.items()
        if worker.registration is not None
    } | {message.rank: message}
    try:
        validate_layout(message.layout)
        compare_ranks(
            {rank: r.layout for rank, r in registrations.items()},
            {rank: r.stage for rank, r in registrations.items()},
        )
        if budget is not None:  # refused at once, not when the last rank comes
            size_pool([message.layout] * message.world_size, budget)
    except LayoutError as error:
        raise Refused(ErrorCode.BAD_LAYOUT, str(error)) from error
