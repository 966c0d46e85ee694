"""The engines of a run, and the keys that they use."""

from dataclasses import dataclass

from kvd_client import RankLayout
from tests.daemon.engines import keys_of, make_layout

KEYS = 160
BATCH = 10
BLOCKS = 96
GROUPS = 2


@dataclass(frozen=True, slots=True)
class Spec:
    """One engine.

    Attributes:
        name: the engine's.
        model: engines of one model share chunks.
        ranks: how many.
        page: bytes of a page.
        replicated: every rank holds the same bytes.
    """

    name: str
    model: str
    ranks: int
    page: int = 4096
    replicated: bool = False

    @property
    def layout(self) -> RankLayout:
        """Of each of its ranks."""
        return make_layout(blocks=BLOCKS, page=self.page, replicated=self.replicated)

    def keys(self, group: int) -> list[bytes]:
        """Those of one group, the same for all engines of the model."""
        return keys_of(f"{self.model}{group}", KEYS)


SPECS = {
    spec.name: spec
    for spec in (
        Spec("one", "split", 2),
        Spec("two", "split", 2),
        Spec("alike", "alike", 2, page=8192, replicated=True),
    )
}
"""By name. The first two share their chunks; the third has chunks of another size."""
