"""The chaos harness: its plan, and a short run of it."""

from itertools import islice

import pytest

from tests.chaos.injections import INJECTIONS
from tests.chaos.plan import plan
from tests.chaos.run import soak

SEED = 2026
SECONDS = 20.0
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}


def test_a_seed_is_a_plan() -> None:
    """The same seed gives the same steps, another seed others."""
    once, again = (list(islice(plan(7, WEIGHTS), 50)) for _ in range(2))
    assert once == again
    assert once != list(islice(plan(8, WEIGHTS), 50))


def test_every_kind_comes_early() -> None:
    """As many steps as there are kinds have seen all of them."""
    steps = islice(plan(3, dict.fromkeys(INJECTIONS, 1.0)), len(INJECTIONS))
    assert {action.kind for step in steps for action in step.actions} == set(INJECTIONS)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_nothing_promised_is_broken() -> None:
    """A short run: bytes are verified, things are injected, and no invariant is violated."""
    report = soak(SECONDS, SEED)
    print(report)
    assert report["violations"] == 0, report
    assert report["injected"]
    assert report["verified_bytes"]  # how many is a matter of the machine
