"""kvd behind a real SGLang engine, for models whose cache is more than keys and values.

On a CPU their attention and their states are computed by SGLang's own Triton kernels, which
Triton's interpreter runs: slowly, so that models and prompts are small.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvd_tools.engine_server import Completion
from kvd_tools.models import write_model
from kvd_tools.sglang_engine import SglangServer, SglangServerOptions
from tests.conftest import Daemon
from tests.engine_answers import TEST_SECONDS, ask_all, check
from tests.engine_models import DEEPSEEK, FALCON_H1, LAGUNA, LFM2
from tests.sglang.conftest import StartEngine
from tests.sglang.support import check_worth, prompts, wait_served, wait_stored, with_kvd
from tests.waiting import eventually

PROMPT_TOKENS = 300
DEVICE_TOKENS = 1280  # four prompts
PROMPTS = prompts(3, tokens=PROMPT_TOKENS)
NEW = prompts(1, seed=1, tokens=50)[0]
AGAIN = [PROMPTS[0], PROMPTS[1] + NEW, PROMPTS[2][:200] + NEW]
"""What is asked when the prompts were pushed out: one as it was, one that goes on, and one that
begins like it."""
OTHERS = prompts(4, seed=1000, tokens=PROMPT_TOKENS)

pytestmark = pytest.mark.timeout(TEST_SECONDS)

HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
# SGLang's kernels for MLA know the sizes 512 + 64 and 256 + 32.
MLA = DEEPSEEK | HEADS | {"kv_lora_rank": 256, "qk_rope_head_dim": 32, "moe_layer_freq": 1}
TRITON = ("--attention-backend", "triton")
# Without SGLang's buffers beside the states, which a CPU does not support, only pages of a token
# are possible; a state is kept where a step of a prompt ends.
STATES = (
    *("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"),
    *("--max-mamba-cache-size", "24", "--max-running-requests", "4"),
)
WIDE = {"norm": 2.0}
# A state that remembers hundreds of tokens.
SLOW = {"vectors": {"A_log": -4.0, "dt_bias": -1.0, "mamba.D": 0.0}}


@dataclass(frozen=True)
class Kind:
    """One kind of model."""

    config: dict[str, Any]
    args: Sequence[str]  # of its engine
    page_size: int  # tokens
    chunked_prefill: int  # tokens
    pools: int  # of its cache, each with chunks of its own
    chunks: int  # that are stored of a prompt, at least
    cached: int  # tokens of a whole prompt that can be found again, at least
    weights: Mapping[str, Any] = field(default_factory=dict)  # see `write_model`

    def options(self, models: Path) -> SglangServerOptions:
        """Its engine, without an external cache."""
        return SglangServerOptions(
            write_model(models / self.config["model_type"], self.config, **self.weights),
            max_tokens=DEVICE_TOKENS,
            page_size=self.page_size,
            chunked_prefill=self.chunked_prefill,
            env={"TRITON_INTERPRET": "1"},
            args=self.args,
        )


KINDS = {
    "mla": Kind(MLA, TRITON, 16, 8192, pools=1, chunks=5, cached=288),
    "window": Kind(LAGUNA, TRITON, 16, 8192, pools=2, chunks=7, cached=288),
    "states": Kind(FALCON_H1, STATES, 1, 128, pools=2, chunks=8, cached=256, weights=SLOW),
    "convolutions": Kind(
        LFM2, STATES, 1, 128, pools=2, chunks=8, cached=256, weights={"norm": 2.0}
    ),
}


@dataclass(frozen=True)
class Plain:
    """An engine without an external cache, and its answers."""

    options: SglangServerOptions
    cold: list[Completion]
    again: list[Completion]  # to what is asked again, with the prompts in its own cache


# A cache with pages and one with states are asked every time; the rest at night.
EVERY_TIME = {
    ("mla", False, "export"),
    ("convolutions", False, "export"),
    ("convolutions", False, "staging"),
}
RUNS = [
    pytest.param(*run, marks=[] if run in EVERY_TIME else [pytest.mark.nightly])
    for run in product(KINDS, (False, True), ("export", "staging"))
]


@pytest.fixture(scope="module")
def plain_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Plain]:
    """What the answers must be, by the kind's name; each is asked for once."""

    @cache
    def plain(name: str) -> Plain:
        place = tmp_path_factory.mktemp("plain")
        options = KINDS[name].options(place)
        engine = SglangServer(options, place / "engine.log")
        try:
            engine.wait_ready()
            cold = ask_all(engine, PROMPTS)
            again = ask_all(engine, AGAIN)
        finally:
            engine.kill()
        check_worth([*cold, *again[1:]])
        assert [answer.cached_tokens for answer in cold] == [0] * len(PROMPTS)
        return Plain(options, cold, again)

    return plain


@pytest.mark.parametrize(("name", "layerwise", "transfer"), RUNS)
def test_what_was_pushed_out_comes_back(
    daemon: Daemon,
    start_engine: StartEngine,
    plain_engine: Callable[[str], Plain],
    name: str,
    layerwise: bool,
    transfer: str,
) -> None:
    """Answers and found tokens are those of an engine that has kept all of it by itself."""
    kind, plain = KINDS[name], plain_engine(name)
    extra = {"layerwise": layerwise, "transfer": transfer}
    engine = start_engine(with_kvd(plain.options, daemon.runtime_dir, **extra))
    engine.wait_ready()
    wait_served(daemon, kind.pools)
    check(ask_all(engine, PROMPTS), plain.cold)
    wait_stored(daemon, len(PROMPTS) * kind.chunks)
    ask_all(engine, OTHERS)
    answers = ask_all(engine, AGAIN)
    check(answers, plain.again)
    cached = [answer.cached_tokens for answer in answers]
    assert cached == [answer.cached_tokens for answer in plain.again]
    assert min(cached[:2]) >= kind.cached
    loads = kind.pools * sum(tokens > 0 for tokens in cached)
    eventually(lambda: daemon.status()["counters"]["jobs"]["load_ok"], loads.__eq__)
