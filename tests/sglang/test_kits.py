"""SGLang's own test kit for external caches, with kvd behind it at its default settings.

Of SGLang's kits these tests need neither a tokenizer nor a trained model. The device cache is too
small for them, so what they expect to be found comes back from the daemon.
"""

from collections.abc import Iterator
from pathlib import Path
from unittest import TestCase

import pytest
from sglang.test.kits.unified_radix_cache_kit import AccuracyTwoPassMixin, UnifiedRadixTreeTestMixin

from kvd_tools.models import LLAMA, write_model
from kvd_tools.sglang_engine import SglangServer, SglangServerOptions
from tests.daemon.serving import daemon_left_clean
from tests.sglang.support import TEST_SECONDS, prompts, wait_served, with_kvd

VOCABULARY = 32768  # the kit's tokens are below 30,001
DEVICE_TOKENS = 3072  # of the 5,000 that four conversations have in the end

pytestmark = pytest.mark.timeout(TEST_SECONDS)


class Kit(AccuracyTwoPassMixin, UnifiedRadixTreeTestMixin, TestCase):  # type: ignore[misc]  # Any
    """The kit's tests, sized for a CPU."""

    __test__ = False
    model = "random weights"
    num_groups = branches_per_group = 2
    prefix_len = 256
    max_new_tokens = 8

    def __init__(self, base_url: str, page_size: int) -> None:
        super().__init__("test_l3_prefetch_full_prefix_hit_after_flush")
        self.base_url = base_url
        self.l3_prefetch_page_size = page_size
        self.l3_prefetch_prompt_pages = 320 // page_size
        self.input_ids = prompts(4, tokens=400)


@pytest.fixture(scope="module")
def kit(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    """The kit, on an engine with pages of so many tokens."""
    place: Path = tmp_path_factory.mktemp("kit")
    model = write_model(place / "model", LLAMA | {"vocab_size": VOCABULARY})
    options = SglangServerOptions(model, DEVICE_TOKENS, page_size=request.param, threads=2)
    with daemon_left_clean() as daemon:
        engine = SglangServer(with_kvd(options, daemon.runtime_dir), place / "engine.log")
        try:
            engine.wait_ready()
            wait_served(daemon)
            yield Kit(engine.url, request.param)
        finally:
            engine.kill()


@pytest.mark.parametrize("kit", [16, pytest.param(32, marks=pytest.mark.nightly)], indirect=True)
def test_after_a_flush_all_pages_of_a_prompt_are_found(kit: Kit) -> None:
    """SGLang's kit expects all but the last page, which is never looked up."""
    kit.test_l3_prefetch_full_prefix_hit_after_flush()


@pytest.mark.parametrize("kit", [16], indirect=True)
@pytest.mark.parametrize(
    "name",
    [
        "test_multiturn_logprobs_match",
        "test_multiturn_prefill_cache_hit_branching",
        "test_multiturn_decode_cache_hit_branching",
    ],
)
def test_conversations_that_do_not_fit_the_device_are_found(kit: Kit, name: str) -> None:
    """SGLang's kit expects every page of earlier turns, and log-probabilities as computed."""
    getattr(kit, name)()
