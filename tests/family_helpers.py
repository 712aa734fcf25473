"""`config.json` of every family: the least there must be, and what published models say."""

import math

from turbojax.rotary import Llama3Scaling, LongRopeScaling, YarnScaling

SIZES = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
}


def least(family: str, **keys) -> dict:
    """A config.json with nothing that has a default."""
    return {"architectures": [ARCHITECTURES[family]], "model_type": family, **SIZES, **keys}


def least_files(family: str) -> tuple[dict, dict]:
    """Two of them: in the second, the number of heads that share keys is left out, too."""
    other = least(family, num_attention_heads=32, hidden_size=256)
    del other["num_key_value_heads"]
    return least(family), other


# What the files of published models say, in the spellings they have it in; factors of LongRoPE are
# made up.
PUBLISHED = {
    "Llama-2-7b": (
        {
            "architectures": ["LlamaForCausalLM"],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
            "transformers_version": "4.31.0.dev0",
            "use_cache": True,
            "vocab_size": 32000,
        },
        {"head_dim": 128, "max_length": 4096, "norm_eps": 1e-5, "rope_theta": 10000.0},
        6_738_415_616,
    ),
    "Llama-3.2-1B": (
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "vocab_size": 128256,
        },
        {
            "rope_scaling": Llama3Scaling(32.0, 1.0, 4.0, 8192),
            "rope_theta": 500000.0,
            "tie_embeddings": True,
        },
        1_235_814_400,
    ),
    "Mistral-7B-v0.1": (
        {
            "architectures": ["MistralForCausalLM"],
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
            "vocab_size": 32000,
        },
        {"local_windows": (4096,) * 32, "head_dim": 128},
        7_241_732_096,
    ),
    "Qwen2.5-7B-Instruct, YaRN as its page says": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "model_type": "qwen2",
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
                "type": "yarn",
            },
            "rope_theta": 1000000.0,
            "sliding_window": 131072,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "vocab_size": 152064,
        },
        {"qkv_bias": True, "output_bias": False, "rope_scaling": YarnScaling(4.0, 32768)},
        7_615_616_512,
    ),
    "Qwen3-0.6B": (
        {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "max_position_embeddings": 40960,
            "max_window_layers": 28,
            "model_type": "qwen3",
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        {"qk_norm": True, "head_dim": 128, "qkv_bias": False},
        596_049_920,
    ),
    "Phi-4-mini": (
        {
            "architectures": ["Phi3ForCausalLM"],
            "attention_bias": False,
            "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
            "embd_pdrop": 0.0,
            "full_attn_mod": 1,
            "hidden_act": "silu",
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "model_type": "phi3",
            "num_attention_heads": 24,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "resid_pdrop": 0.0,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "long_factor": [2.0] * 48,
                "short_factor": [1.0] * 48,
                "type": "longrope",
            },
            "rope_theta": 10000.0,
            "sliding_window": 262144,
            "tie_word_embeddings": True,
            "vocab_size": 200064,
        },
        {
            "rotary_dim": 96,
            "local_windows": (262144,) * 32,
            "rope_scaling": LongRopeScaling(
                (1.0,) * 48, (2.0,) * 48, 4096, math.sqrt(1 + math.log(32) / math.log(4096))
            ),
        },
        3_836_021_760,
    ),
    "gemma-2-9b": (
        {
            "architectures": ["Gemma2ForCausalLM"],
            "attention_bias": False,
            "attn_logit_softcapping": 50.0,
            "cache_implementation": "hybrid",
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 3584,
            "intermediate_size": 14336,
            "max_position_embeddings": 8192,
            "model_type": "gemma2",
            "num_attention_heads": 16,
            "num_hidden_layers": 42,
            "num_key_value_heads": 8,
            "query_pre_attn_scalar": 224,
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "sliding_window_size": 4096,
            "vocab_size": 256000,
        },
        {
            "activation": "gelu_tanh",
            "attention_scale": 224**-0.5,
            "attention_soft_cap": 50.0,
            "final_soft_cap": 30.0,
            "embedding_scale": 3584**0.5,
            "local_windows": (4096, None) * 21,
            "norm_offset": 1.0,
            "post_norms": True,
            "tie_embeddings": True,
        },
        9_241_705_984,
    ),
}

# Keys of a file, and the window of each of two layers.
WINDOWS = [
    ("mistral", {"sliding_window": None}, ()),
    ("mistral", {"sliding_window": 9}, (9, 9)),
    ("mistral", {}, (4096, 4096)),
    ("qwen2", {"sliding_window": 9}, ()),
    ("qwen2", {"sliding_window": 9, "use_sliding_window": True}, ()),
    (
        "qwen2",
        {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1},
        (None, 9),
    ),
    (
        "qwen3",
        {
            "sliding_window": 9,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        (9, None),
    ),
    ("phi3", {}, ()),
    ("phi3", {"sliding_window": 9}, (9, 9)),
    ("gemma2", {"sliding_window": 9}, (9, None)),
    ("gemma2", {"layer_types": ["full_attention", "full_attention"]}, ()),
]
