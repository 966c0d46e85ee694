"""A short run of `make tier-kills`."""

from tests.tier.kills import run


def test_what_was_acknowledged_survives_kills() -> None:
    """Eight kills of daemon and tier: no wrong byte, no kept chunk is lost, none comes back."""
    tally = run(8, seed=17)
    assert not tally.violations
    assert tally.daemon_kills + tally.tier_kills == 8
    assert tally.clears
    assert tally.found_again >= tally.acknowledged > 0
    assert tally.corrupt == 0
