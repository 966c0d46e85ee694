"""Configurations of small models, of which tests with real engines write random ones."""

from kvd_tools.models import COMMON, WEIGHT_SCALE

# Six layers of which every third is full: groups of two full and twice two window layers.
GEMMA = COMMON | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "hidden_activation": "gelu_pytorch_tanh",
    # Its queries and keys are normalized; this makes the scores as large as Llama's here.
    "query_pre_attn_scalar": round(COMMON["head_dim"] / WEIGHT_SCALE**4),
    "sliding_window": 128,
    "sliding_window_pattern": 3,
}
DEEPSEEK = COMMON | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    # Without YaRN, vLLM's CPU op rotates only the first token's key of a step correctly: answers
    # depend on the batch. SGLang's CPU implementation of MLA knows no other rotary embedding.
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 1.0,
        "original_max_position_embeddings": COMMON["max_position_embeddings"],
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "num_hidden_layers": 2,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    # The engine wants experts in the figures; every layer is dense all the same.
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "first_k_dense_replace": 2,
}
# Every other layer is in a window. Of its experts only the figures are asked for, as above.
LAGUNA = COMMON | {
    "architectures": ["LagunaForCausalLM"],
    "model_type": "laguna",
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "mlp_layer_types": ["dense"] * 4,
    "sliding_window": 96,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
# Attention and a Mamba state in every layer.
FALCON_H1 = COMMON | {
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "num_hidden_layers": 2,
    "hidden_act": "silu",
    "mamba_d_ssm": 128,
    "mamba_n_heads": 2,
    "mamba_d_state": 32,
    "mamba_chunk_size": 64,
}
# Every other layer is a short convolution, whose state is the last tokens.
LFM2 = COMMON | {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "layer_types": ["conv", "full_attention"] * 2,
    "conv_L_cache": 3,
    "conv_bias": False,
    "block_auto_adjust_ff_dim": False,
}
