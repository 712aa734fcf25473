"""Refusals: `config.json` with something that is not supported, or wrong."""

import dataclasses

import pytest

from tests.models.family_helpers import least
from turbojax.models import TransformerConfig
from turbojax.rotary import LinearScaling


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (
            "llama",
            {"architectures": ["Qwen2MoeForCausalLM"]},
            "'Qwen2MoeForCausalLM'.* must be one of Ll",
        ),
        (
            "llama",
            {"architectures": ["LlamaForSequenceClassification"]},
            "is not supported: must be",
        ),
        (
            "llama",
            {"model_type": "mixtral"},
            "model_type='mixtral' is not supported: must be 'llama'",
        ),
        (
            "llama",
            {"architectures": None, "model_type": "qwen2_moe"},
            "model_type='qwen2_moe' is not",
        ),
        (
            "llama",
            {"architectures": None, "model_type": None},
            "names no architecture.*Gemma2ForCausalLM",
        ),
        (
            "llama",
            {"hidden_act": "gelu"},
            "hidden_act='gelu' is not supported: must be one of silu",
        ),
        ("llama", {"hidden_act": None}, "hidden_act=None is not supported"),
        ("gemma2", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: must be 'gelu_py"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported"),
        (
            "gemma2",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention=True is not",
        ),
        (
            "mistral",
            {"attention_bias": True},
            "attention_bias=True is not supported: must be left out",
        ),
        (
            "llama",
            {"num_local_experts": 8},
            "num_local_experts=8 is not supported: must be left out",
        ),
        ("llama", {"is_causal": False}, "is_causal=False is not supported: must be True"),
        ("gemma2", {"is_causal": None}, "is_causal=None is not supported: must be True"),
        ("phi3", {"full_attn_mod": 0}, "full_attn_mod=0 is not supported: must be 1"),
        ("llama", {"sliding_window": 8}, "sliding_window=8 is not supported: must be left out"),
        ("llama", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported: must be left out"),
        ("llama", {"new_idea": "on"}, "new_idea='on' is not supported: must be left out"),
        ("phi3", {"full_attn_mod": 2}, "full_attn_mod=2 is not supported: must be 1"),
        ("gemma2", {"sliding_window_size": 3}, "sliding_window_size=3 is not supported"),
        (
            "llama",
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_type='dynamic' is not",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "proportional"}},
            "rope_type='proportional' is not",
        ),
        (
            "phi3",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "must be one of default, longrope",
        ),
        ("llama", {"rope_parameters": {"mrope_section": [1, 2]}}, r"mrope_section=\[1, 2\] is not"),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3}},
            "beta_fast=3 is",
        ),
        (
            "llama",
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor=0.5 is not supported for 'll",
        ),
        (
            "gemma2",
            {"rope_parameters": {"sliding_attention": {"rope_type": "default"}}},
            "all layers must have the same RoPE",
        ),
        (
            "gemma3_text",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention=True is not supported: must be left out",
        ),
        (
            "gemma3_text",
            {"attn_logit_softcapping": 50.0},
            "attn_logit_softcapping=50.0 is not supported: must be None",
        ),
        ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported"),
        (
            "gemma3_text",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
            "rope_parameters=.*must have objects for 'full_attention' and 'sliding_attention'",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_type='linear' is not supported for 'sliding_attention': must be 'default'",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"factor": 2.0}}},
            "RoPE's factor=2.0 is not supported for type 'default'",
        ),
        (
            "gemma3_text",
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_type='dynamic' is not",
        ),
        (
            "gemma3_text",
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor=0.5 is not supported for 'gemma3_text'",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}}},
            "partial_rotary_factor=0.5 is not supported for 'gemma3_text'",
        ),
        (
            "qwen2",
            {"layer_types": ["full_attention", "chunked_attention"]},
            "layer_types=.*chunked",
        ),
        ("qwen2", {"layer_types": ["full_attention"]}, "for each of 2 layers"),
        (
            "mistral",
            {"layer_types": ["full_attention"] * 2},
            "layer_types=.* for 'mistral': must be",
        ),
        (
            "olmo2",
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9},
            "sliding_window=9 is not supported: must be left out",
        ),
        ("olmo2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ("smollm3", {"partial_rotary_factor": 0.5}, "factor=0.5 is not supported for 'smollm3'"),
        ("granite", {"num_local_experts": 4}, "num_local_experts=4 is not supported"),
        ("cohere2", {"head_dim": 32}, "head_dim=32 is not supported for 'cohere2': must be 16"),
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm=True is not supported: must be left out"),
        ("cohere2", {"layer_switch": 3}, "layer_switch=3 is not supported: must be 4"),
        ("cohere2", {"use_parallel_block": False}, "use_parallel_block=False is not supported"),
        (
            "glm",
            {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}},
            "rope_type='longrope' is not supported",
        ),
        ("glm4", {"sliding_window": 9}, "sliding_window=9 is not supported"),
    ],
)
def test_not_supported(family, change, message):
    with pytest.raises(NotImplementedError, match=message):
        TransformerConfig.from_hf(least(family, **change))


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", {"hidden_size": None}, "config.json lacks hidden_size"),
        ("llama", {"num_hidden_layers": "2"}, "num_hidden_layers='2' must be an integer"),
        ("llama", {"max_position_embeddings": True}, "max_position_embeddings=True must be an int"),
        (
            "llama",
            {"num_attention_heads": 5},
            "hidden_size=64 must be a multiple of num_attention_",
        ),
        ("llama", {"rms_norm_eps": None}, "norm_eps=None must be positive"),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling='linear' must be an object"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "RoPE of type 'linear' lacks factor"),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": "2"}},
            "factor='2' must be a number",
        ),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 0.5}},
            "factor=0.5 must be finite and",
        ),
        (
            "llama",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "lacks low_freq_factor, high_freq_factor",
        ),
        (
            "llama",
            {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}},
            "type='yarn' must be rope_type='linear'",
        ),
        (
            "llama",
            {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}},
            "gives RoPE's rope_theta twice, as 5.0 and 6.0",
        ),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "1 LongRoPE factors must be 8",
        ),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope", "short_factor": 1.0, "long_factor": [1.0]}},
            "short_factor=1.0 must be a list",
        ),
        (
            "qwen2",
            {"layer_types": ["sliding_attention"] * 2},
            "must give the window that layer_types",
        ),
        ("gemma2", {"sliding_window": None}, "sliding_window=None .* must give the window"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 must be positive"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping=-1.0 must be pos"),
        ("gemma2", {"final_logit_softcapping": "30"}, "final_logit_softcapping='30' must be pos"),
        ("gemma2", {"query_pre_attn_scalar": "256"}, "query_pre_attn_scalar='256' must be pos"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern=0 must be an int"),
        ("gemma3_text", {"sliding_window_pattern": None}, "sliding_window_pattern=None must be an"),
        ("gemma3_text", {"sliding_window": None}, "sliding_window=None .* must give the window"),
        ("gemma3_text", {"final_logit_softcapping": 0}, "final_logit_softcapping=0 must be pos"),
        ("gemma3_text", {"rope_local_base_freq": "1"}, "rope_local_base_freq='1' must be positive"),
        ("gemma3_text", {"rope_local_base_freq": -1.0}, "rope_local_base_freq=-1.0 must be posit"),
        (
            "gemma3_text",
            {
                "rope_local_base_freq": 5.0,
                "rope_parameters": {"sliding_attention": {"rope_theta": 6.0}},
            },
            "gives RoPE's rope_theta twice, as 5.0 and 6.0",
        ),
        (
            "gemma3_text",
            {"rope_theta": 5.0, "rope_parameters": {"full_attention": {"rope_theta": 6.0}}},
            "gives RoPE's rope_theta twice, as 5.0 and 6.0",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {"rope_theta": "6"}}},
            "rope_theta='6' must be a number",
        ),
        ("gemma3_text", {"rope_parameters": 5}, "rope_parameters=5 must be an object"),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": 5}},
            "rope_parameters=5 must be an object",
        ),
        ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings='false' must be true or"),
        ("llama", {"attention_bias": "false"}, "attention_bias='false' must be true or false"),
        ("llama", {"mlp_bias": 1}, "mlp_bias=1 must be true or false"),
        ("qwen2", {"use_sliding_window": "false"}, "use_sliding_window='false' must be true or"),
        ("llama", {"hidden_act": ["silu"]}, r"hidden_act=\['silu'\] must be a string"),
        ("llama", {"architectures": 5}, "architectures=5 must be a list of strings"),
        ("llama", {"architectures": "LlamaForCausalLM"}, "must be a list of strings"),
        ("llama", {"architectures": [["x"]]}, r"architectures=\[\['x'\]\] must be a list of str"),
        ("qwen3", {"layer_types": 5}, "layer_types=5 must be a list of strings"),
        ("qwen3", {"layer_types": [[], []]}, r"layer_types=\[\[\], \[\]\] must be a list of str"),
        ("qwen2", {"max_window_layers": None}, "max_window_layers=None must be an integer of at"),
        ("mistral", {"sliding_window": "9"}, "sliding_window='9' must be an integer of at least 1"),
        ("mistral", {"sliding_window": 0}, "sliding_window=0 must be an integer of at least 1"),
        ("llama", {"num_key_value_heads": "2"}, "num_key_value_heads='2' must be an integer"),
        ("llama", {"num_key_value_heads": 0}, "num_key_value_heads=0 must be an integer"),
        ("llama", {"head_dim": 16.0}, "head_dim=16.0 must be an integer"),
        ("llama", {"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6' must be positive"),
        (
            "phi3",
            {"partial_rotary_factor": float("nan")},
            "partial_rotary_factor=nan must be fin",
        ),
        (
            "phi3",
            {"original_max_position_embeddings": 0},
            "original_max_position_embeddings=0 must be positive",
        ),
        (
            "llama",
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": "false"}},
            "truncate='false' must be true or false",
        ),
        (
            "llama",
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": 0.0}},
            "attention_factor=0.0 must be positive",
        ),
        ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers=\[1\] must be a list of 0 or 1 for"),
        ("smollm3", {"no_rope_layers": [1, 2]}, "must be a list of 0 or 1 for each of 2 layers"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval=0 must be an integer"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier=0 must be positive"),
        ("granite", {"logits_scaling": "16"}, "logits_scaling='16' must be positive"),
        ("cohere2", {"logit_scale": None}, "logit_scale=None must be positive"),
        ("cohere2", {"layer_norm_eps": 0.0}, "layer_norm_eps=0.0 must be positive"),
        ("cohere2", {"sliding_window": None}, "must give the window that layer_types name"),
        ("cohere2", {"sliding_window_pattern": 0}, "sliding_window_pattern=0 must be an integer"),
    ],
)
def test_wrong(family, change, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig.from_hf(least(family, **change))


def test_harmless_keys_are_of_no_concern():
    keys = {
        "_name_or_path": "x",
        "_attn_implementation_autoset": True,
        "attention_dropout": 0.1,
        "id2label": {"0": "LABEL_0"},
        "is_causal": True,
        "is_llama_config": True,
        "use_mrope": False,
        "num_experts": 0,
        "dual_chunk_attention_config": None,
        "quantization_config": {"quant_method": "other"},  # refused where the weights are read
    }
    assert TransformerConfig.from_hf(least("qwen2", **keys)) == TransformerConfig.from_hf(
        least("qwen2")
    )


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", {"qk_norm": True}, "a config.json of family 'llama' cannot say qk_norm=True"),
        ("llama", {"local_windows": (4, None)}, r"cannot say local_windows=\(4, None\)"),
        ("llama", {"output_bias": True}, "cannot say output_bias=True"),
        ("mistral", {"local_windows": (4, None)}, r"cannot say local_windows=\(4, None\)"),
        ("qwen2", {"local_windows": (4, 5)}, r"cannot say local_windows=\(4, 5\)"),
        ("qwen2", {"qkv_bias": False}, "cannot say qkv_bias=False"),
        ("gemma2", {"embedding_scale": None}, "cannot say embedding_scale=None"),
        ("gemma2", {"norm_offset": 0.0, "post_norms": False}, "norm_offset=0.0, post_norms=False"),
        ("mistral", {"attention_scale": 0.3, "final_soft_cap": 3.0}, "attention_scale=0.3, final_"),
        ("mistral", {"local_rope_theta": 3.0}, "cannot say local_rope_theta=3.0"),
        ("gemma3_text", {"attention_soft_cap": 3.0}, "cannot say attention_soft_cap=3.0"),
        ("gemma3_text", {"qk_norm": False}, "cannot say qk_norm=False"),
        ("gemma3_text", {"rotary_dim": 128}, "cannot say rotary_dim=128"),
        (
            "gemma3_text",
            {"local_rope_theta": None, "rope_scaling": LinearScaling(2.0)},
            "cannot say local_rope_theta=None",
        ),
        ("llama", {"nope_layers": (1,)}, r"cannot say nope_layers=\(1,\)"),
        ("llama", {"rope_interleaved": True}, "cannot say rope_interleaved=True"),
        ("llama", {"logit_scale": 0.5}, "cannot say logit_scale=0.5"),
        ("olmo2", {"joint_qk_norm": False}, "cannot say joint_qk_norm=False"),
        ("olmo2", {"pre_norms": True}, "cannot say pre_norms=True"),
        ("cohere2", {"nope_layers": (0,)}, r"cannot say nope_layers=\(0,\)"),
        ("cohere2", {"parallel": False}, "cannot say parallel=False"),
        ("glm", {"post_norms": True}, "cannot say post_norms=True"),
    ],
)
def test_what_a_family_cannot_say_is_not_written(family, change, message):
    config = dataclasses.replace(TransformerConfig.from_hf(least(family)), **change)
    with pytest.raises(ValueError, match=message):
        config.to_hf()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("family", "gpt2", "family='gpt2' must be one of llama, mistral"),
        ("activation", "relu", "activation='relu' must be one of"),
        ("local_windows", (3,), "local_windows has 1 entries, must have num_layers=2"),
        ("final_soft_cap", 0.0, "final_soft_cap=0.0 must be positive"),
        ("embedding_scale", -1.0, "embedding_scale=-1.0 must be positive"),
        ("rotary_dim", 5, "rotary_dim=5 must be even"),
        ("rotary_dim", 18, "rotary_dim=18 must be 2 to head_dim=16"),
    ],
)
def test_bad_fields(field, value, message):
    config = TransformerConfig.from_hf(least("llama"))
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **{field: value})
