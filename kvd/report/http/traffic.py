"""What HTTP itself has done, for its own metrics."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Traffic:
    """Counts of one HTTP process since its start."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Answers by route and status; unknown paths count as ``other``."""
    watchers: int = 0
    """Open event streams."""
