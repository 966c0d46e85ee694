"""How large the pool is where ``cpu_bytes`` is ``auto``.

The first engine of which every rank asks for registration decides, by what all of its ranks
report together; in which order they came does not matter. Until then their registrations wait,
and a rank whose engine never completes decides nothing.
"""

from kvd.broker.effects import Effect, Event, OpenPool
from kvd.broker.sessions import Session
from kvd.broker.state import BrokerState
from kvd.config.quota import quota_contradictions
from kvd.errors import PoolError, Refused
from kvd_proto.errors import LayoutError
from kvd_proto.layout import RankLayout
from kvd_proto.messages import ErrorCode
from kvd_proto.sizes import auto_cpu_bytes, format_size, size_pool

KEPT_PART = 10  # a kept pool is used where its size differs by no more than one part in so many


def missing(session: Session) -> list[int]:
    """Ranks of a session's engine that have not come, as its pending registration counts them."""
    engine, pending = session.engine, session.pending
    if engine is None or pending is None:
        return []
    waiting = engine.waiting
    return [rank for rank in range(pending.message.world_size) if rank not in waiting]


def open_sized(state: BrokerState, layouts: list[RankLayout]) -> list[Effect]:
    """Make the pool for an engine of these ranks.

    Raises:
        Refused: it would hold no chunk, or its memory cannot be had.
    """
    size = auto_cpu_bytes(
        layouts,
        ratio=state.settings.host_ratio,
        available=state.available_bytes(),
        reserve=state.settings.reserve_bytes,
    )
    cpu_bytes, explanation = size.cpu_bytes, size.explanation
    kept = state.kept_bytes()
    if kept and kept != cpu_bytes and abs(kept - cpu_bytes) * KEPT_PART <= cpu_bytes:
        cpu_bytes = kept
        explanation += f"; the kept pool of {format_size(kept)} is about as large and is used"
    try:
        size_pool(layouts, cpu_bytes)
    except LayoutError as error:
        raise Refused(ErrorCode.BAD_LAYOUT, f"cpu_bytes auto: {explanation}: {error}") from error
    try:
        state.namespaces = state.open_namespaces(cpu_bytes)
    except PoolError as error:
        raise Refused(ErrorCode.NOT_READY, str(error)) from error
    wrong = quota_contradictions(state.settings.quotas(cpu_bytes), cpu_bytes)
    warnings = [Event(f"quota: {text}", "warning") for text in wrong]
    return [OpenPool(cpu_bytes, explanation), *warnings]
