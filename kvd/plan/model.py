"""A model's KV cache as a Hugging Face config.json describes it.

Names follow the file's. A model whose cache has parts that are not planned here (state layers of
other families, indexers, shared layers) is refused rather than planned too small.

Some layers keep a state in place of keys and values. A state's size does not depend on the number
of tokens. vLLM 0.32 gives it a page like any other, and makes blocks so large that a page of
attention is no smaller (``_align_hybrid_block_size`` in ``vllm/platforms/interface.py``). Two
families are covered: Mamba 2 as in Nemotron-H, and the gated delta rule of Qwen3-Next and Qwen3.5;
their shapes are ``mamba2_state_shape`` and ``gated_delta_net_state_shape`` in
``vllm/model_executor/layers/mamba/mamba_utils.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvd.errors import PlanError


def optional(fields: Mapping[str, Any], names: tuple[str, ...], minimum: int = 1) -> int | None:
    """Return the first of these fields that is present and not null.

    Raises:
        PlanError: its value is no whole number of at least `minimum`.
    """
    for name in names:
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise PlanError(f"{name} = {value!r} is no whole number of at least {minimum}")
        return value
    return None


def required(fields: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """Return the value of the first of these fields that is present and not null.

    Raises:
        PlanError: none is present, or the first has no whole number above 0.
    """
    value = optional(fields, names)
    if value is None:
        aliases = f" (nor {', '.join(names[1:])})" if names[1:] else ""
        raise PlanError(f"the model configuration has no {names[0]}{aliases}; is it a config.json?")
    return value


MAMBA2_FAMILIES = ("nemotron_h",)
DELTA_FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


@dataclass(frozen=True, slots=True)
class StateLayers:
    """State layers of a model.

    layers, attention_layers: numbers of layers with a state, and with attention.
    heads, head_dim, state_dim: a layer's state is heads x head_dim x state_dim elements.
    groups: of heads: the convolution has heads x head_dim + 2 x groups x state_dim channels and
        keeps the last `conv_kernel` - 1 values of each.
    repeated: whether groups are repeated if there are more ranks than groups (Mamba 2).
    dtype: of the state, None for the model's dtype, which the convolution always has.
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
        """Return the bytes of one layer's state on one rank, given the bytes of an element.

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


def read_states(fields: Mapping[str, Any]) -> StateLayers | None:
    """Return the state layers of a model of a covered family, None for any other.

    Raises:
        PlanError: a field is missing or invalid.
    """
    family = fields.get("model_type")
    if family in MAMBA2_FAMILIES:
        layers, attention = _count_nemotron_layers(fields)
        return StateLayers(
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
    if family in DELTA_FAMILIES:
        layers, attention = _count_delta_layers(fields)
        dtype = fields.get("mamba_ssm_dtype") if family != "qwen3_next" else None
        return StateLayers(
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


def _count_nemotron_layers(fields: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of Mamba layers (with a state) and of attention layers.

    Other layers keep nothing.
    """
    pattern = fields.get("hybrid_override_pattern")
    if not isinstance(pattern, str):
        raise PlanError(f"hybrid_override_pattern = {pattern!r} is no text such as 'M-M*-'")
    return _checked_counts("hybrid_override_pattern", pattern.count("M"), pattern.count("*"))


def _count_delta_layers(fields: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of linear-attention layers (with a state) and full-attention layers."""
    kinds = fields.get("layer_types")
    layers = required(fields, ("num_hidden_layers",))
    if kinds is None:  # every n-th layer attends
        attention = layers // (optional(fields, ("full_attention_interval",)) or 4)
        return _checked_counts("full_attention_interval", layers - attention, attention)
    if not isinstance(kinds, list) or {*kinds} - {"linear_attention", "full_attention"}:
        raise PlanError(f"layer_types = {kinds!r} has a kind that kvd plan does not cover")
    kinds = kinds[:layers]
    return _checked_counts(
        "layer_types", kinds.count("linear_attention"), kinds.count("full_attention")
    )


def _checked_counts(name: str, states: int, attention: int) -> tuple[int, int]:
    if not states or not attention:
        raise PlanError(
            f"by {name} there are {states} state layers and {attention} attention layers; kvd plan"
            " covers models with both"
        )
    return states, attention


Config = Mapping[str, Any]

# Fields in which a model of several parts keeps its language model's config.
_NESTED = ("thinker_config", "text_config", "language_config", "llm_config")

# Class defaults of transformers that these families' files may leave out.
_FAMILIES: dict[str, dict[str, int]] = {
    "gemma": {"head_dim": 256},
    "gemma2": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
    },
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131_072,
    },
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
}

_STATES = "state layers"
_UNPLANNED = {
    "is_encoder_decoder": "cross attention",
    "attention_chunk_size": "chunked local attention",
    "index_head_dim": "an indexer's cache beside the latent one",
    "compress_ratios": "compressed caches of several page sizes",
    "num_kv_shared_layers": "layers that use another layer's cache",
    "global_head_dim": "heads of several sizes",
    "linear_num_value_heads": _STATES,
    "mamba_d_state": _STATES,
    "mamba_d_conv": _STATES,
    "ssm_state_size": _STATES,
    "state_size": _STATES,
}

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


@dataclass(frozen=True, slots=True)
class Model:
    """The parts of a model that decide its KV cache.

    windows: sliding window of each attention layer in tokens, None for full attention.
    states: the layers that keep a state in place of keys and values, if there are any.
    kv_heads: heads whose keys and values are kept; 1 for a latent (MLA).
    head_elements: elements that one such head keeps of a token in one layer: key and value, or the
        latent and its rotary part.
    """

    name: str
    attention: Literal["mha", "gqa", "mqa", "mla"]
    windows: tuple[int | None, ...]
    query_heads: int
    kv_heads: int
    head_elements: int
    dtype: str | None
    max_positions: int | None
    states: StateLayers | None

    @property
    def replicated(self) -> bool:
        """Whether every rank holds the same bytes: a latent is not split by heads."""
        return self.attention == "mla"

    def rank_elements(self, tensor_parallel: int) -> int:
        """Return the elements of one token in one layer on one rank.

        KV heads are split over ranks; with more ranks than heads each rank holds one.

        Raises:
            PlanError: heads and ranks do not divide.
        """
        if tensor_parallel < 1 or self.query_heads % tensor_parallel:
            raise PlanError(
                f"{self.query_heads} attention heads cannot be split over {tensor_parallel} ranks;"
                " choose a tensor-parallel size that divides them"
            )
        if self.replicated:
            return self.head_elements
        if self.kv_heads % tensor_parallel and tensor_parallel % self.kv_heads:
            raise PlanError(
                f"{self.kv_heads} KV heads over {tensor_parallel} ranks: one must divide the other;"
                " choose another tensor-parallel size"
            )
        return max(1, self.kv_heads // tensor_parallel) * self.head_elements


def read_model(config: Config) -> Model:
    """Read a parsed config.json.

    Raises:
        PlanError: a field is missing or invalid, or the cache has parts that are not planned.
    """
    fields = _language_model(config)
    states = read_states(fields)
    for name, part in _UNPLANNED.items():
        if fields.get(name) and not (states and part == _STATES):
            raise PlanError(f"{name} = {fields[name]!r}: {part}, which kvd plan does not cover")
    query_heads = required(fields, _HEADS)
    if fields.get("kv_lora_rank") is not None:
        attention: Literal["mha", "gqa", "mqa", "mla"] = "mla"
        kv_heads = 1
        elements = required(fields, ("kv_lora_rank",)) + required(fields, ("qk_rope_head_dim",))
    else:
        kv_heads = _kv_heads(fields, query_heads)
        attention = "mha" if kv_heads == query_heads else "mqa" if kv_heads == 1 else "gqa"
        key = optional(fields, ("head_dim",)) or required(fields, _HIDDEN) // query_heads
        elements = key + (optional(fields, ("v_head_dim",)) or key)
    dtype = fields.get("dtype") or fields.get("torch_dtype")
    return Model(
        name=str(fields.get("model_type") or "unnamed"),
        attention=attention,
        windows=(None,) * states.attention_layers
        if states
        else _windows(fields, required(fields, _LAYERS)),
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_elements=elements,
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        max_positions=optional(fields, _POSITIONS),
        states=states,
    )


def _language_model(config: Config) -> Config:
    """Return the language model's fields, completed from the outer config, then its family."""
    fields: dict[str, Any] = dict(config)
    nested: Any = config
    while nested is not None:
        fields |= nested
        candidates = (nested[name] for name in _NESTED if isinstance(nested.get(name), dict))
        nested = next(candidates, None)
    return _FAMILIES.get(str(fields.get("model_type")), {}) | fields


def _kv_heads(fields: Config, query_heads: int) -> int:
    if fields.get("multi_query") and not fields.get("new_decoder_architecture"):
        return 1  # a flag of Falcon and GPT-BigCode
    return optional(fields, _KV_HEADS) or query_heads


def _windows(fields: Config, layers: int) -> tuple[int | None, ...]:
    """Return each layer's window: by layer_types, every n-th layer, or the first with a window."""
    kinds = fields.get("layer_types")
    if kinds is not None:
        return _listed_windows(fields, kinds, layers)
    window = optional(fields, ("sliding_window",))
    if window is None or fields.get("use_sliding_window") is False:
        return (None,) * layers
    pattern = optional(fields, ("sliding_window_pattern", "_sliding_window_pattern"))
    if pattern is not None:  # every pattern-th layer has full attention
        return tuple(None if (i + 1) % pattern == 0 else window for i in range(layers))
    first = optional(fields, ("max_window_layers",), minimum=0)
    if first is None or not fields.get("use_sliding_window"):
        first = 0
    return tuple(window if i >= first else None for i in range(layers))


def _listed_windows(fields: Config, kinds: Any, layers: int) -> tuple[int | None, ...]:
    if not isinstance(kinds, list) or len(kinds) < layers:
        raise PlanError(f"layer_types = {kinds!r} does not list {layers} layers")
    windows: list[int | None] = []
    for index, kind in enumerate(kinds[:layers]):
        if kind == "full_attention":
            windows.append(None)
        elif kind == "sliding_attention":
            windows.append(required(fields, ("sliding_window",)))
        else:
            raise PlanError(f"layer_types[{index}] = {kind!r}, which kvd plan does not cover")
    return tuple(windows)
