"""Refusals: `config.json` with something that is not supported, or wrong."""

import dataclasses

import pytest

from tests.models.family_helpers import cases, least
from turbojax.models import TransformerConfig
from turbojax.rotary import LinearScaling

NOT_SUPPORTED = {
    "llama": [
        ({"architectures": ["Qwen2MoeForCausalLM"]}, "'Qwen2MoeForCausalLM'.* must be one of Ll"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "is not supported: must be"),
        ({"model_type": "mixtral"}, "model_type='mixtral' is not supported: must be 'llama'"),
        ({"architectures": None, "model_type": "qwen2_moe"}, "model_type='qwen2_moe' is not"),
        ({"architectures": None, "model_type": None}, "names no architecture.*Gemma2ForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: must be one of silu"),
        ({"hidden_act": None}, "hidden_act=None is not supported"),
        ({"num_local_experts": 8}, "num_local_experts=8 is not supported: must be left out"),
        ({"is_causal": False}, "is_causal=False is not supported: must be True"),
        ({"sliding_window": 8}, "sliding_window=8 is not supported: must be left out"),
        ({"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported: must be left out"),
        ({"new_idea": "on"}, "new_idea='on' is not supported: must be left out"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic' is not"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope_type='proportional' is not"),
        ({"rope_parameters": {"mrope_section": [1, 2]}}, r"mrope_section=\[1, 2\] is not"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3}}, "beta_fast=3 is"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported for 'll"),
    ],
    "gemma2": [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: must be 'gelu_py"),
        ({"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not"),
        ({"is_causal": None}, "is_causal=None is not supported: must be True"),
        ({"sliding_window_size": 3}, "sliding_window_size=3 is not supported"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "default"}}},
            "all layers must have the same RoPE",
        ),
    ],
    "mistral": [
        ({"attention_bias": True}, "attention_bias=True is not supported: must be left out"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types=.* for 'mistral': must be"),
    ],
    "phi3": [
        ({"full_attn_mod": 0}, "full_attn_mod=0 is not supported: must be 1"),
        ({"full_attn_mod": 2}, "full_attn_mod=2 is not supported: must be 1"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "must be one of default, longrope"),
    ],
    "gemma3_text": [
        (
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention=True is not supported: must be left out",
        ),
        (
            {"attn_logit_softcapping": 50.0},
            "attn_logit_softcapping=50.0 is not supported: must be None",
        ),
        ({"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
            "rope_parameters=.*must have objects for 'full_attention' and 'sliding_attention'",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_type='linear' is not supported for 'sliding_attention': must be 'default'",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"factor": 2.0}}},
            "RoPE's factor=2.0 is not supported for type 'default'",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic' is not"),
        (
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor=0.5 is not supported for 'gemma3_text'",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}}},
            "partial_rotary_factor=0.5 is not supported for 'gemma3_text'",
        ),
    ],
    "qwen2": [
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types=.*chunked"),
        ({"layer_types": ["full_attention"]}, "for each of 2 layers"),
    ],
    "olmo2": [
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9},
            "sliding_window=9 is not supported: must be left out",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
    ],
    "smollm3": [
        ({"partial_rotary_factor": 0.5}, "factor=0.5 is not supported for 'smollm3'"),
    ],
    "granite": [
        ({"num_local_experts": 4}, "num_local_experts=4 is not supported"),
    ],
    "cohere2": [
        ({"head_dim": 32}, "head_dim=32 is not supported for 'cohere2': must be 16"),
        ({"use_qk_norm": True}, "use_qk_norm=True is not supported: must be left out"),
        ({"layer_switch": 3}, "layer_switch=3 is not supported: must be 4"),
        ({"use_parallel_block": False}, "use_parallel_block=False is not supported"),
    ],
    "glm": [
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}},
            "rope_type='longrope' is not supported",
        ),
    ],
    "glm4": [
        ({"sliding_window": 9}, "sliding_window=9 is not supported"),
    ],
}


@pytest.mark.parametrize(("family", "change", "message"), cases(NOT_SUPPORTED))
def test_not_supported(family, change, message):
    with pytest.raises(NotImplementedError, match=message):
        TransformerConfig.from_hf(least(family, **change))


WRONG = {
    "llama": [
        ({"hidden_size": None}, "config.json lacks hidden_size"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers='2' must be an integer"),
        ({"max_position_embeddings": True}, "max_position_embeddings=True must be an int"),
        ({"num_attention_heads": 5}, "hidden_size=64 must be a multiple of num_attention_"),
        ({"rms_norm_eps": None}, "norm_eps=None must be positive"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear' must be an object"),
        ({"rope_scaling": {"type": "linear"}}, "RoPE of type 'linear' lacks factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor='2' must be a number"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor=0.5 must be finite and"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "lacks low_freq_factor, high_freq_factor",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}},
            "type='yarn' must be rope_type='linear'",
        ),
        (
            {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}},
            "gives RoPE's rope_theta twice, as 5.0 and 6.0",
        ),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' must be true or"),
        ({"attention_bias": "false"}, "attention_bias='false' must be true or false"),
        ({"mlp_bias": 1}, "mlp_bias=1 must be true or false"),
        ({"hidden_act": ["silu"]}, r"hidden_act=\['silu'\] must be a string"),
        ({"architectures": 5}, "architectures=5 must be a list of strings"),
        ({"architectures": "LlamaForCausalLM"}, "must be a list of strings"),
        ({"architectures": [["x"]]}, r"architectures=\[\['x'\]\] must be a list of str"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads='2' must be an integer"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0 must be an integer"),
        ({"head_dim": 16.0}, "head_dim=16.0 must be an integer"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6' must be positive"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": "false"}},
            "truncate='false' must be true or false",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": 0.0}},
            "attention_factor=0.0 must be positive",
        ),
    ],
    "phi3": [
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "1 LongRoPE factors must be 8",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": 1.0, "long_factor": [1.0]}},
            "short_factor=1.0 must be a list",
        ),
        ({"partial_rotary_factor": float("nan")}, "partial_rotary_factor=nan must be fin"),
        (
            {"original_max_position_embeddings": 0},
            "original_max_position_embeddings=0 must be positive",
        ),
    ],
    "qwen2": [
        ({"layer_types": ["sliding_attention"] * 2}, "must give the window that layer_types"),
        ({"use_sliding_window": "false"}, "use_sliding_window='false' must be true or"),
        ({"max_window_layers": None}, "max_window_layers=None must be an integer of at"),
    ],
    "gemma2": [
        ({"sliding_window": None}, "sliding_window=None .* must give the window"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 must be positive"),
        ({"attn_logit_softcapping": -1.0}, "attn_logit_softcapping=-1.0 must be pos"),
        ({"final_logit_softcapping": "30"}, "final_logit_softcapping='30' must be pos"),
        ({"query_pre_attn_scalar": "256"}, "query_pre_attn_scalar='256' must be pos"),
    ],
    "gemma3_text": [
        ({"sliding_window_pattern": 0}, "sliding_window_pattern=0 must be an int"),
        ({"sliding_window_pattern": None}, "sliding_window_pattern=None must be an"),
        ({"sliding_window": None}, "sliding_window=None .* must give the window"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping=0 must be pos"),
        ({"rope_local_base_freq": "1"}, "rope_local_base_freq='1' must be positive"),
        ({"rope_local_base_freq": -1.0}, "rope_local_base_freq=-1.0 must be posit"),
        (
            {
                "rope_local_base_freq": 5.0,
                "rope_parameters": {"sliding_attention": {"rope_theta": 6.0}},
            },
            "gives RoPE's rope_theta twice, as 5.0 and 6.0",
        ),
        (
            {"rope_theta": 5.0, "rope_parameters": {"full_attention": {"rope_theta": 6.0}}},
            "gives RoPE's rope_theta twice, as 5.0 and 6.0",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": "6"}}},
            "rope_theta='6' must be a number",
        ),
        ({"rope_parameters": 5}, "rope_parameters=5 must be an object"),
        ({"rope_parameters": {"full_attention": 5}}, "rope_parameters=5 must be an object"),
    ],
    "qwen3": [
        ({"layer_types": 5}, "layer_types=5 must be a list of strings"),
        ({"layer_types": [[], []]}, r"layer_types=\[\[\], \[\]\] must be a list of str"),
    ],
    "mistral": [
        ({"sliding_window": "9"}, "sliding_window='9' must be an integer of at least 1"),
        ({"sliding_window": 0}, "sliding_window=0 must be an integer of at least 1"),
    ],
    "smollm3": [
        ({"no_rope_layers": [1]}, r"no_rope_layers=\[1\] must be a list of 0 or 1 for"),
        ({"no_rope_layers": [1, 2]}, "must be a list of 0 or 1 for each of 2 layers"),
        ({"no_rope_layer_interval": 0}, "no_rope_layer_interval=0 must be an integer"),
    ],
    "granite": [
        ({"residual_multiplier": 0}, "residual_multiplier=0 must be positive"),
        ({"logits_scaling": "16"}, "logits_scaling='16' must be positive"),
    ],
    "cohere2": [
        ({"logit_scale": None}, "logit_scale=None must be positive"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps=0.0 must be positive"),
        ({"sliding_window": None}, "must give the window that layer_types name"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern=0 must be an integer"),
    ],
}


@pytest.mark.parametrize(("family", "change", "message"), cases(WRONG))
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


CANNOT_SAY = {
    "llama": [
        ({"qk_norm": True}, "a config.json of family 'llama' cannot say qk_norm=True"),
        ({"local_windows": (4, None)}, r"cannot say local_windows=\(4, None\)"),
        ({"output_bias": True}, "cannot say output_bias=True"),
        ({"nope_layers": (1,)}, r"cannot say nope_layers=\(1,\)"),
        ({"rope_interleaved": True}, "cannot say rope_interleaved=True"),
        ({"logit_scale": 0.5}, "cannot say logit_scale=0.5"),
    ],
    "mistral": [
        ({"local_windows": (4, None)}, r"cannot say local_windows=\(4, None\)"),
        ({"attention_scale": 0.3, "final_soft_cap": 3.0}, "attention_scale=0.3, final_"),
        ({"local_rope_theta": 3.0}, "cannot say local_rope_theta=3.0"),
    ],
    "qwen2": [
        ({"local_windows": (4, 5)}, r"cannot say local_windows=\(4, 5\)"),
        ({"qkv_bias": False}, "cannot say qkv_bias=False"),
    ],
    "gemma2": [
        ({"embedding_scale": None}, "cannot say embedding_scale=None"),
        ({"norm_offset": 0.0, "post_norms": False}, "norm_offset=0.0, post_norms=False"),
    ],
    "gemma3_text": [
        ({"attention_soft_cap": 3.0}, "cannot say attention_soft_cap=3.0"),
        ({"qk_norm": False}, "cannot say qk_norm=False"),
        ({"rotary_dim": 128}, "cannot say rotary_dim=128"),
        (
            {"local_rope_theta": None, "rope_scaling": LinearScaling(2.0)},
            "cannot say local_rope_theta=None",
        ),
    ],
    "olmo2": [
        ({"joint_qk_norm": False}, "cannot say joint_qk_norm=False"),
        ({"pre_norms": True}, "cannot say pre_norms=True"),
    ],
    "cohere2": [
        ({"nope_layers": (0,)}, r"cannot say nope_layers=\(0,\)"),
        ({"parallel": False}, "cannot say parallel=False"),
    ],
    "glm": [
        ({"post_norms": True}, "cannot say post_norms=True"),
    ],
}


@pytest.mark.parametrize(("family", "change", "message"), cases(CANNOT_SAY))
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
