"""How many examples a state machine draws."""

from hypothesis import settings

USUAL = 60  # examples of the profile that `make test` runs


def explored(examples: int, steps: int) -> settings:
    """Settings for so many examples in `make test`, and 33 times as many in `make test-explore`."""
    drawn = examples * settings().max_examples // USUAL
    return settings(max_examples=max(1, drawn), stateful_step_count=steps)
