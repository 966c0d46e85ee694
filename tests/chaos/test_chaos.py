"""The chaos harness: a short run of it."""

import pytest

from tests.chaos.run import soak

SEED = 2026
SECONDS = 20.0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_promised_is_broken() -> None:
    """A short run: bytes are verified, things are injected, and no invariant is violated."""
    report = soak(SECONDS, SEED)
    print(report)
    assert report["violations"] == 0, report
    assert report["injected"]
    assert report["verified_bytes"]  # how many is a matter of the machine
