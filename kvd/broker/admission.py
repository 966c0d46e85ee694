"""Checks that refuse a registration, and the size of the pool with ``cpu_bytes = auto``."""

import re
from collections.abc import Mapping, Sequence

from kvd.broker.sessions import Engine, Session
from kvd.broker.state import BrokerState
from kvd.config.settings import Settings
from kvd.errors import Refusal
from kvd_proto.capacity import auto_cpu_bytes, size_pool
from kvd_proto.errors import LayoutError
from kvd_proto.layout import RankLayout, compare_ranks, validate_layout
from kvd_proto.messages import ErrorCode, IpcHandle, Register, fd_index
from kvd_proto.text import format_size, unprintable

CUDA_DEVICE = re.compile(r"cuda:(MIG-)?[0-9a-f]{32}")
MAX_CUDA_LANES = 64
REUSE_PART = 10  # the previous pool is used if its size differs by one part in so many at most
FAILED_SECONDS = 10.0  # clients retry every 2 s: do not start a process for each try


def check_rank(engine: Engine, message: Register, others: Mapping[int, Session]) -> None:
    """Refuse a rank that is taken or that contradicts the engine's other ranks."""
    holder = others.get(message.rank)
    if holder is not None:
        raise Refusal(
            ErrorCode.BAD_STATE,
            f"rank {message.rank} of engine {engine.name!r} is held by pid {holder.peer.pid};"
            " give each engine instance a name of its own",
        )
    if message.rank >= message.world_size:
        raise Refusal(
            ErrorCode.BAD_LAYOUT,
            f"rank {message.rank} in a world of {message.world_size}; ranks count from 0",
        )
    for session in others.values():
        other = session.register_message
        if other is None:
            continue
        for field in ("world_size", "temporary", "fingerprint"):
            value, other_value = getattr(message, field), getattr(other, field)
            if value != other_value:
                raise Refusal(
                    ErrorCode.BAD_LAYOUT,
                    f"rank {message.rank} has {field} = {value}, the engine's other ranks have"
                    f" {other_value}",
                )


def check_device(state: BrokerState, device: str, now: float) -> None:
    """Refuse a device that no lane can serve, or whose lane failed to start a moment ago."""
    if device in state.lanes:
        return
    failed_at, failure = state.failed_lanes.get(device, (-FAILED_SECONDS, ""))
    if failure and now < failed_at + FAILED_SECONDS:
        raise Refusal(ErrorCode.BAD_LAYOUT, failure)
    if not CUDA_DEVICE.fullmatch(device):
        raise Refusal(
            ErrorCode.BAD_LAYOUT,
            f"device {device!r} is not served here; served: host, and CUDA devices by their UUID"
            " without dashes, cuda:<32 hex digits> or cuda:MIG-<32 hex digits>, which"
            " `nvidia-smi -L` shows",
        )
    if sum(lane.on_demand for lane in state.lanes.values()) >= MAX_CUDA_LANES:
        raise Refusal(
            ErrorCode.LIMIT,
            f"lanes of {MAX_CUDA_LANES} CUDA devices run already, {device} would be one more;"
            " those that no engine uses end after lane_idle_seconds",
            limit="cuda_lanes",
        )


def check_descriptors(message: Register, count: int) -> None:
    """Refuse a registration that came with too few descriptors.

    They are the control page's and those that handles name. A worker whose handles name none may
    send none; it has no control page then.
    """
    if not count and all(isinstance(handle, IpcHandle) for handle in message.handles):
        return
    needed = 1 + max((fd_index(handle) for handle in message.handles), default=0)
    if count < needed:
        raise Refusal(
            ErrorCode.BAD_LAYOUT,
            f"{count} descriptors came with the registration, its handles name {needed}; send it"
            " with all of them",
        )


def check_names(code: ErrorCode, names: Mapping[str, str]) -> None:
    """Refuse, with `code`, names (by field) with unprintable characters."""
    for field, name in names.items():
        if character := unprintable(name):
            raise Refusal(
                code,
                f"{field} {name!r} has a character that cannot be shown, {character}; names are"
                " letters, digits, punctuation, symbols and spaces",
            )


def names_of(message: Register) -> dict[str, str]:
    """Return every name in a registration, by its field."""
    names = {"device": message.device}
    for number, group in enumerate(message.layout.groups):
        names[f"group {number}, kind"] = group.kind
        names[f"group {number}, contents"] = group.contents
    return names | {
        f"fingerprint.{field}": getattr(message.fingerprint, field)
        for field in message.fingerprint.__struct_fields__
    }


def check_layout(message: Register, others: Mapping[int, Session], budget: int | None) -> None:
    """Refuse a layout that is unsound or contradicts `others`, or whose chunk exceeds `budget`.

    budget: the pool's size in bytes; None while it is not known.
    """
    if len(message.handles) != len(message.layout.storages):
        raise Refusal(
            ErrorCode.BAD_LAYOUT,
            f"{len(message.handles)} handles for {len(message.layout.storages)} storages",
        )
    messages = {rank: session.register_message for rank, session in others.items()}
    messages[message.rank] = message
    registrations = {rank: known for rank, known in messages.items() if known is not None}
    try:
        validate_layout(message.layout)
        compare_ranks(
            {rank: r.layout for rank, r in registrations.items()},
            {rank: r.stage for rank, r in registrations.items()},
        )
        if budget is not None:  # refused at once, not when the last rank comes
            size_pool([message.layout] * message.world_size, budget)
    except LayoutError as error:
        raise Refusal(ErrorCode.BAD_LAYOUT, str(error)) from error


def auto_size(
    settings: Settings,
    layouts: Sequence[RankLayout],
    available: int,
    previous_bytes: int | None,
    lanes: int = 0,
) -> tuple[int, str]:
    """Return the size of a pool with ``cpu_bytes = auto``, in bytes, and the explanation.

    The first engine whose ranks have all asked for registration decides the size, by the layouts
    of all its ranks. Registrations wait until then; an engine that never completes decides nothing.

    Args:
        settings: of the daemon.
        layouts: of the ranks.
        available: bytes of the largest pool that fits, beside the memory that pinning it takes.
        previous_bytes: size of the pool that the previous daemon left, if it can be used.
        lanes: how many times the pool is pinned, see `pinning_lanes`.

    Raises:
        Refusal: such a pool would hold no chunk.
    """
    cpu_bytes, explanation = auto_cpu_bytes(
        layouts,
        ratio=settings.host_ratio,
        available=available,
        reserve=settings.reserve_bytes,
        lanes=lanes,
    )
    difference = abs(previous_bytes - cpu_bytes) if previous_bytes else 0
    if previous_bytes and 0 < difference * REUSE_PART <= cpu_bytes:
        cpu_bytes = previous_bytes
        explanation += (
            f"; the kept pool of {format_size(previous_bytes)} is about as large and is used"
        )
    try:
        size_pool(layouts, cpu_bytes)
    except LayoutError as error:
        raise Refusal(ErrorCode.BAD_LAYOUT, f"cpu_bytes auto: {explanation}: {error}") from error
    return cpu_bytes, explanation
