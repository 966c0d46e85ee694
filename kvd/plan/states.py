"""Layers that keep a state in place of keys and values, as far as a config.json tells them.

A state has one size however many tokens went into it. vLLM 0.32 gives it a page like any other,
and makes blocks so large that a page of attention is no smaller (``_align_hybrid_block_size`` in
``vllm/platforms/interface.py``). Two families are known here, Mamba 2 as Nemotron-H has it and
the gated delta rule of Qwen3-Next and Qwen3.5; their shapes are ``mamba2_state_shape`` and
``gated_delta_net_state_shape`` in ``vllm/model_executor/layers/mamba/mamba_utils.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvd.errors import PlanError
from kvd.plan.fields import optional, required

MAMBA2 = ("nemotron_h",)
DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


@dataclass(frozen=True, slots=True)
class States:
    """State layers of a model.

    layers: their number; attention_layers: that of the others.
    heads, head_dim, state_dim: a layer's state is heads x head_dim x state_dim elements.
    groups: what heads share: the convolution has heads x head_dim + 2 x groups x state_dim
    channels, of which it keeps the last `conv_kernel` - 1 values.
    repeated: whether groups are repeated where there are more ranks (Mamba 2).
    dtype: of the state, None for the model's own; the convolution has the model's.
    """

    layers: int
    attention_layers: int
    heads: int
    head_dim: int
    state_dim: int
    groups: int
    conv_kernel: int
    repeated: bool
    dtype: str | None

    def rank_bytes(self, tensor_parallel: int, conv_bytes: int, state_bytes: int) -> int:
        """Bytes of one layer's state on one rank, from the bytes of an element of each kind.

        Raises:
            PlanError: heads or groups cannot be split over the ranks.
        """
        groups = self.groups
        if self.repeated and groups % tensor_parallel:
            groups = tensor_parallel
        if self.heads % tensor_parallel or groups % tensor_parallel:
            raise PlanError(
                f"{self.heads} state heads in {self.groups} groups cannot be split over"
                f" {tensor_parallel} ranks; choose another tensor-parallel size"
            )
        channels = self.heads * self.head_dim + 2 * groups * self.state_dim
        conv = channels // tensor_parallel * (self.conv_kernel - 1)
        state = self.heads // tensor_parallel * self.head_dim * self.state_dim
        return conv * conv_bytes + state * state_bytes


def read_states(fields: Mapping[str, Any]) -> States | None:
    """Return the state layers of a model of a known family, None for any other.

    Raises:
        PlanError: a field is missing or makes no sense.
    """
    family = fields.get("model_type")
    if family in MAMBA2:
        layers, attention = _nemotron_layers(fields)
        return States(
            layers=layers,
            attention_layers=attention,
            heads=required(fields, ("mamba_num_heads",)),
            head_dim=required(fields, ("mamba_head_dim",)),
            state_dim=required(fields, ("ssm_state_size",)),
            groups=required(fields, ("n_groups",)),
            conv_kernel=required(fields, ("conv_kernel",)),
            repeated=True,
            dtype=str(fields.get("mamba_ssm_cache_dtype") or "float32"),
        )
    if family in DELTA:
        layers, attention = _delta_layers(fields)
        dtype = fields.get("mamba_ssm_dtype") if family != "qwen3_next" else None
        return States(
            layers=layers,
            attention_layers=attention,
            heads=required(fields, ("linear_num_value_heads",)),
            head_dim=required(fields, ("linear_value_head_dim",)),
            state_dim=required(fields, ("linear_key_head_dim",)),
            groups=required(fields, ("linear_num_key_heads",)),
            conv_kernel=required(fields, ("linear_conv_kernel_dim",)),
            repeated=False,
            dtype=None if dtype is None else str(dtype),
        )
    return None


def _nemotron_layers(fields: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of state and attention layers; the others keep nothing."""
    pattern = fields.get("hybrid_override_pattern")
    if not isinstance(pattern, str):
        raise PlanError(f"hybrid_override_pattern = {pattern!r} is no text such as 'M-M*-'")
    return _counted("hybrid_override_pattern", pattern.count("M"), pattern.count("*"))


def _delta_layers(fields: Mapping[str, Any]) -> tuple[int, int]:
    kinds = fields.get("layer_types")
    layers = required(fields, ("num_hidden_layers",))
    if kinds is None:  # every n-th layer attends
        attention = layers // (optional(fields, ("full_attention_interval",)) or 4)
        return _counted("full_attention_interval", layers - attention, attention)
    if not isinstance(kinds, list) or {*kinds} - {"linear_attention", "full_attention"}:
        raise PlanError(f"layer_types = {kinds!r} lists other kinds than kvd plan covers")
    kinds = kinds[:layers]
    return _counted("layer_types", kinds.count("linear_attention"), kinds.count("full_attention"))


def _counted(name: str, states: int, attention: int) -> tuple[int, int]:
    if not states or not attention:
        raise PlanError(
            f"by {name} there are {states} state layers and {attention} of attention; kvd plan"
            " covers models with both"
        )
    return states, attention
