"""`kvd demo-sglang` as its user runs it, with a model of two layers."""

import pytest

from tests.engine_demos import finds_known_prompts
from tests.sglang.support import TEST_SECONDS

pytestmark = pytest.mark.timeout(TEST_SECONDS)


def test_known_prompts_are_found_also_after_a_restart() -> None:
    """Cold nothing is found, warm and in a new engine every whole chunk, with the same answers."""
    finds_known_prompts("demo-sglang", TEST_SECONDS - 60)
