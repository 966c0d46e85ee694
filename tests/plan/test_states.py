"""`kvd plan` of models some of whose layers keep a state in place of keys and values."""

from typing import Any

import pytest

from kvd.errors import PlanError
from tests.plan.planning import planned

QWEN = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_size": 2048,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "dtype": "bfloat16",
}
NEMOTRON = {
    "model_type": "nemotron_h",
    "num_hidden_layers": 10,
    "hybrid_override_pattern": "M-M*MEMEM*",
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_size": 2688,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "dtype": "bfloat16",
}


def test_states_are_split_over_ranks() -> None:
    """A rank has its share of the heads; keys and values stay whole where they are too few."""
    one, four = planned(QWEN), planned(QWEN, tensor_parallel=4)
    assert one.groups[1].state_bytes == 4 * (four.groups[1].state_bytes or 0)
    assert four.block_size == 272
    with pytest.raises(PlanError, match="32 state heads in 16 groups cannot be split over 3"):
        planned(QWEN | {"num_attention_heads": 48, "num_key_value_heads": 3}, tensor_parallel=3)


def test_the_layers_of_nemotron_are_those_of_its_pattern() -> None:
    """M keeps a state, * attends, the others keep nothing; states have 32 bits by default."""
    result = planned(NEMOTRON)
    assert (result.layers, result.state_layers) == (2, 5)
    assert [group.layers for group in result.groups] == [2, 2, 2, 1]
    full = 64 * 64 * 128
    assert result.groups[1].state_bytes == (64 * 64 + 2 * 8 * 128) * 3 * 2 + full * 4
    half = planned(NEMOTRON | {"mamba_ssm_cache_dtype": "bfloat16"})
    assert result.groups[1].state_bytes - (half.groups[1].state_bytes or 0) == full * 2


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (NEMOTRON | {"hybrid_override_pattern": None}, "hybrid_override_pattern = None is no text"),
        (NEMOTRON | {"hybrid_override_pattern": "M-M-"}, "2 state layers and 0 of attention"),
        (NEMOTRON | {"n_groups": None}, "no n_groups"),
        (NEMOTRON | {"mamba_ssm_cache_dtype": "int3"}, "the states' dtype 'int3'"),
        (NEMOTRON | {"model_type": "other"}, "ssm_state_size = 128: state layers"),
        (QWEN | {"layer_types": ["chunked"]}, "lists other kinds"),
        (QWEN | {"model_type": "other"}, "linear_num_value_heads = 32: state layers"),
    ],
)
def test_what_is_not_known_is_named(config: dict[str, Any], text: str) -> None:
    """Missing fields, other kinds and other families are refused with the field's name."""
    with pytest.raises(PlanError) as refusal:
        planned(config)
    assert text in str(refusal.value)


@pytest.mark.parametrize("asked", ["gpu_blocks", "block_override", "max_seq_len"])
def test_requests_of_such_models_are_not_planned(asked: str) -> None:
    """How many blocks a request holds is not known, and said so."""
    with pytest.raises(PlanError, match="leave out --gpu-blocks"):
        planned(QWEN, **{asked: 100_000})
