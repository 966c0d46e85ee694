from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lane.support import Lane

POOL_BYTES = 8 * 2**20


@pytest.fixture
def lane(tmp_path: Path) -> Iterator[Lane]:
    """A real lane process with an 8 MiB pool."""
    with Lane(tmp_path, POOL_BYTES) as running:
        yield running
