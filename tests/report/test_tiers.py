"""What is told of tiers is what their processes tell the broker."""

from kvd.metrics.tier_counts import ASK_OUTCOMES, GET_OUTCOMES, PUT_OUTCOMES
from kvd.outcomes import Outcome


def test_every_outcome_is_counted() -> None:
    """Each outcome of a tier's batch has a counter of its name, and no counter has another name."""
    counted = {*PUT_OUTCOMES, *GET_OUTCOMES, *ASK_OUTCOMES}
    assert counted == {outcome.name.lower() for outcome in Outcome}
