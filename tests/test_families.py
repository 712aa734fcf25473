"""What `config.json` of every family means: as transformers reads it, and what is refused."""

import dataclasses
import json
import math

import hf_helpers as hf
import pytest
import transformers

from turbojax.models import LlamaConfig
from turbojax.rotary import LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling

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


def theirs(config: dict) -> transformers.PretrainedConfig:
    config = json.loads(json.dumps(config))
    return transformers.AutoConfig.for_model(**config)


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


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(name):
    """The numbers of parameters are those of the published weights."""
    file, expected, parameters = PUBLISHED[name]
    config = LlamaConfig.from_hf(file)
    assert {key: getattr(config, key) for key in expected} == expected
    assert config.num_parameters == parameters
    assert LlamaConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_defaults_are_those_of_transformers(family):
    """What transformers fills in, written out, means the same."""
    keys = least(family)
    filled = theirs(keys).to_dict()
    assert set(filled) > set(keys)
    assert LlamaConfig.from_hf({**keys, **filled}) == LlamaConfig.from_hf(keys)
    del keys["num_key_value_heads"]
    keys["num_attention_heads"], keys["hidden_size"] = 32, 256
    filled = theirs(keys).to_dict()
    assert LlamaConfig.from_hf({**keys, **filled}) == LlamaConfig.from_hf(keys)


@pytest.mark.parametrize("name", hf.VARIANTS)
def test_what_transformers_reads_of_ours_is_what_it_wrote(tmp_path, name):
    hf.reference(name).config.save_pretrained(tmp_path)
    file = json.loads((tmp_path / "config.json").read_text())
    config = LlamaConfig.from_hf(file)
    assert config.family == theirs(file).model_type
    written = theirs(config.to_hf())
    original = theirs(file)
    names = {
        "attention_bias",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "head_dim",
        "hidden_act",
        "hidden_activation",
        "layer_types",
        "max_position_embeddings",
        "mlp_bias",
        "query_pre_attn_scalar",
        "rms_norm_eps",
        "sliding_window",
        "tie_word_embeddings",
        "use_sliding_window",
        "num_key_value_heads",
        *SIZES,
    }
    for key in names:
        assert getattr(written, key, None) == getattr(original, key, None), key
    rope, wanted = dict(written.rope_parameters), dict(original.rope_parameters)
    rope.pop("type", None)
    # Defaults, which ours writes out.
    defaults = {"beta_fast": 32.0, "beta_slow": 1.0} if wanted["rope_type"] == "yarn" else {}
    assert rope == {**defaults, **wanted}


@pytest.mark.parametrize("name", hf.VARIANTS)
def test_frequencies_are_those_of_transformers(name):
    """Including what queries and keys are multiplied with."""
    theirs = hf.reference(name)
    config = LlamaConfig.from_hf(theirs.config.to_dict())
    rotary = theirs.model.rotary_emb
    if config.rope_scaling is not None and hasattr(config.rope_scaling, "original_max_length"):
        short = dataclasses.replace(config, max_length=config.rope_scaling.original_max_length)
    else:
        short = config
    # transformers computes powers and quotients in float32.
    frequencies = rotary.original_inv_freq.numpy()
    assert short.rope.frequencies() == pytest.approx(frequencies, rel=1e-6)
    assert config.rope.amplitude == pytest.approx(rotary.attention_scaling, rel=1e-12)


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2}}, LinearScaling(2.0)),
        (
            {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2.0}},
            LinearScaling(2),
        ),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, LinearScaling(2.0)),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 77.0},
                "rope_theta": 77.0,
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            },
            LinearScaling(2.0),
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, YarnScaling(2.0, 2048)),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "finetuned": True, "beta_fast": 16}},
            YarnScaling(2.0, 2048, beta_fast=16),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}},
            YarnScaling(2.0, 2048, truncate=False),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": 1.5}},
            YarnScaling(2.0, 2048, attention_factor=1.5),
        ),
        ({"rope_scaling": None, "rope_parameters": None}, None),
        ({"rope_scaling": {}}, None),
    ],
)
def test_spellings_of_rope(keys, scaling):
    config = LlamaConfig.from_hf(least("llama", **keys))
    assert config.rope_scaling == scaling
    assert config.rope_theta == keys.get("rope_theta", 10000.0)
    assert LlamaConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


def test_yarn_with_two_scales():
    keys = {"type": "yarn", "factor": 40.0, "mscale": 0.8, "mscale_all_dim": 0.5}
    config = LlamaConfig.from_hf(least("llama", rope_scaling=keys))
    expected = (0.08 * math.log(40) + 1) / (0.05 * math.log(40) + 1)
    assert config.rope.amplitude == pytest.approx(expected, rel=1e-12)
    model = transformers.LlamaForCausalLM(theirs(least("llama", rope_scaling=keys))).model
    assert config.rope.amplitude == pytest.approx(model.rotary_emb.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_names_of_long_rope_in_phi3(kind):
    factors = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
    keys = least(
        "phi3",
        rope_scaling={"type": kind, **factors},
        original_max_position_embeddings=1024,
        max_position_embeddings=8192,
    )
    config = LlamaConfig.from_hf(keys)
    amplitude = math.sqrt(1 + math.log(8) / math.log(1024))
    assert config.rope_scaling == LongRopeScaling((1.0,) * 8, (3.0,) * 8, 1024, amplitude)
    # A shorter model of the same weights has the short factors, and is scaled as before.
    short = dataclasses.replace(config, max_length=1024)
    assert short.rope.amplitude == amplitude
    assert short.rope.frequencies()[0] == 1
    assert config.rope.frequencies()[0] == pytest.approx(1 / 3)
    file = short.to_hf()
    assert LlamaConfig.from_hf(json.loads(json.dumps(file))) == short
    assert theirs(file).rope_parameters["attention_factor"] == amplitude
    # transformers 4 takes these three keys and no others.
    assert set(config.to_hf()["rope_scaling"]) == {"type", "short_factor", "long_factor"}


@pytest.mark.parametrize(
    ("family", "keys", "windows"),
    [
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
    ],
)
def test_windows(family, keys, windows):
    config = LlamaConfig.from_hf(least(family, **keys))
    assert config.local_windows == windows
    assert LlamaConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    if family != "gemma2" or windows:
        types = getattr(theirs(config.to_hf()), "layer_types", None)
        if types is not None:
            assert [kind == "sliding_attention" for kind in types] == [
                bool(window) for window in windows or (None, None)
            ]


def test_either_name_of_the_architecture_is_enough():
    config = LlamaConfig.from_hf(least("qwen3"))
    for key in ("architectures", "model_type"):
        file = least("qwen3")
        del file[key]
        assert LlamaConfig.from_hf(file) == config


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (
            "llama",
            {"architectures": ["MixtralForCausalLM"]},
            "'MixtralForCausalLM'.* must be one of Ll",
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
            {"architectures": None, "model_type": "qwen3_moe"},
            "model_type='qwen3_moe' is not",
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
    ],
)
def test_not_supported(family, change, message):
    with pytest.raises(NotImplementedError, match=message):
        LlamaConfig.from_hf(least(family, **change))


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
        ("gemma2", {"attn_logit_softcapping": -1.0}, "logits_soft_cap=-1.0 must be positive"),
    ],
)
def test_wrong(family, change, message):
    with pytest.raises(ValueError, match=message):
        LlamaConfig.from_hf(least(family, **change))


def test_harmless_keys_are_of_no_concern():
    keys = {
        "_name_or_path": "x",
        "_attn_implementation_autoset": True,
        "attention_dropout": 0.1,
        "id2label": {"0": "LABEL_0"},
        "use_mrope": False,
        "num_experts": 0,
        "dual_chunk_attention_config": None,
        "quantization_config": {"quant_method": "other"},  # refused where the weights are read
    }
    assert LlamaConfig.from_hf(least("qwen2", **keys)) == LlamaConfig.from_hf(least("qwen2"))


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
    ],
)
def test_what_a_family_cannot_say_is_not_written(family, change, message):
    config = dataclasses.replace(LlamaConfig.from_hf(least(family)), **change)
    with pytest.raises(ValueError, match=message):
        config.to_hf()


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", {"attention_scale": 0.25}),
        ("llama", {"local_windows": (None, None)}),
        ("llama", {"rotary_dim": 16}),
        ("gemma2", {"attention_scale": None}),
        ("gemma2", {"attention_scale": 0.3}),
    ],
)
def test_the_same_said_otherwise_is_written(family, change):
    config = dataclasses.replace(LlamaConfig.from_hf(least(family, head_dim=16)), **change)
    again = LlamaConfig.from_hf(json.loads(json.dumps(config.to_hf())))
    options = [c.attention_options(0).scale or 16**-0.5 for c in (config, again)]
    assert options[0] == pytest.approx(options[1], rel=1e-12)
    assert config.rope.frequencies().tolist() == again.rope.frequencies().tolist()


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
    config = LlamaConfig.from_hf(least("llama"))
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **{field: value})
