"""How large the pool is where ``cpu_bytes`` is ``auto``.

The first engine of which every rank asks for registration decides, by what all of its ranks
report together; in which order they came does not matter. Until then their registrations wait,
and a rank whose engine never completes decides nothing.
"""

from collections.abc import Sequence

from kvd.config.settings import Settings
from kvd.errors import Refused
from kvd_proto.capacity import auto_cpu_bytes, size_pool
from kvd_proto.errors import LayoutError
from kvd_proto.layout import RankLayout
from kvd_proto.messages import ErrorCode
from kvd_proto.sizes import format_size

KEPT_PART = 10  # a kept pool is used where its size differs by no more than one part in so many


def auto_size(
    settings: Settings, layouts: Sequence[RankLayout], available: int, kept: int | None
) -> tuple[int, str]:
    """Return the size of a pool for an engine of these ranks, in bytes, and how it came about.

    Args:
        settings: of the daemon.
        layouts: of the ranks.
        available: bytes of memory that the machine has to give.
        kept: size of the pool that the daemon before left, if it can be used.

    Raises:
        Refused: such a pool would hold no chunk.
    """
    cpu_bytes, explanation = auto_cpu_bytes(
        layouts,
        ratio=settings.host_ratio,
        available=available,
        reserve=settings.reserve_bytes,
    )
    if kept and kept != cpu_bytes and abs(kept - cpu_bytes) * KEPT_PART <= cpu_bytes:
        cpu_bytes = kept
        explanation += f"; the kept pool of {format_size(kept)} is about as large and is used"
    try:
        size_pool(layouts, cpu_bytes)
    except LayoutError as error:
        raise Refused(ErrorCode.BAD_LAYOUT, f"cpu_bytes auto: {explanation}: {error}") from error
    return cpu_bytes, explanation
