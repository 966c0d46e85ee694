"""Whether a registration can be served at all: asked before anything is mapped."""

from collections.abc import Mapping

from kvd.broker.effects import Effect, Event
from kvd.broker.sessions import Engine, Session
from kvd.cache.namespaces import Namespace
from kvd.errors import Refused
from kvd_proto.errors import LayoutError
from kvd_proto.layout import compare_ranks, validate_layout
from kvd_proto.messages import ErrorCode, Register, fd_index
from kvd_proto.printable import unprintable
from kvd_proto.sizes import size_pool


def check_rank(engine: Engine, message: Register, others: Mapping[int, Session]) -> None:
    """The rank is free, and says of the engine what its other ranks say.

    Args:
        engine: which it belongs to.
        message: what it says.
        others: sessions of the engine's ranks that it is held against.

    Raises:
        Refused: with both sides' figures.
    """
    holder = others.get(message.rank)
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
    for session in others.values():
        other = session.said
        if other is None:
            continue
        if other.world_size != message.world_size:
            raise Refused(
                ErrorCode.BAD_LAYOUT,
                f"rank {message.rank} says world size {message.world_size}, the engine's other"
                f" ranks say {other.world_size}",
            )
        if other.temporary != message.temporary:
            raise Refused(
                ErrorCode.BAD_LAYOUT,
                f"rank {message.rank} says temporary = {message.temporary}, the engine's other"
                f" ranks say {other.temporary}",
            )
        if other.fingerprint != message.fingerprint:
            raise Refused(
                ErrorCode.BAD_LAYOUT,
                f"rank {message.rank} has another fingerprint than the engine's other ranks:"
                f" {message.fingerprint} against {other.fingerprint}",
            )


def check_descriptors(message: Register, count: int) -> None:
    """Every descriptor that the handles name, and the control page, came with the registration.

    Raises:
        Refused: some did not.
    """
    needed = 1 + max((fd_index(handle) for handle in message.handles), default=0)
    if count < needed:
        raise Refused(
            ErrorCode.BAD_LAYOUT,
            f"{count} descriptors came with the registration, its handles name {needed}; send it"
            " over the control socket, with them",
        )


def check_names(code: ErrorCode, names: Mapping[str, str]) -> None:
    """Whatever a client calls itself can be shown anywhere: `names` by the field they stand in.

    Raises:
        Refused: with `code`, naming the field, its value and the character.
    """
    for field, name in names.items():
        if found := unprintable(name):
            raise Refused(
                code,
                f"{field} {name!r} has a character that cannot be shown, {found}; names are"
                " letters, digits, punctuation, symbols and spaces",
            )


def refused(session: Session, message: Register, text: str) -> list[Effect]:
    """What the log says of a registration that is refused: one line, however often it is tried."""
    if session.refusal == text:
        return []
    session.refusal = text
    what = f"rank {message.rank} on {message.device!r} is refused: {text}"
    return [Event(f"{session.who}: {what}", "warning", session.who.fields)]


def names_of(message: Register) -> dict[str, str]:
    """Every name in a registration, by its field."""
    names = {"device": message.device}
    names |= {f"group {i}, kind": group.kind for i, group in enumerate(message.layout.groups)}
    return names | {
        f"fingerprint.{field}": getattr(message.fingerprint, field)
        for field in message.fingerprint.__struct_fields__
    }


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


def check_layout(message: Register, others: Mapping[int, Session], budget: int | None) -> None:
    """The layout is sound, agrees with those of `others`, and a chunk fits `budget` bytes.

    A budget of None is not known yet.

    Raises:
        Refused: naming the odd figure.
    """
    if len(message.handles) != len(message.layout.storages):
        raise Refused(
            ErrorCode.BAD_LAYOUT,
            f"{len(message.handles)} handles for {len(message.layout.storages)} storages",
        )
    said = {rank: session.said for rank, session in others.items()} | {message.rank: message}
    registrations = {rank: each for rank, each in said.items() if each is not None}
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
