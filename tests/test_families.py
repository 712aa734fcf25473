"""What `config.json` of every family means: as transformers reads it."""

import dataclasses
import json
import math

import hf_helpers as hf
import pytest
import transformers
from family_helpers import ARCHITECTURES, PUBLISHED, SIZES, least

from turbojax.models import LlamaConfig
from turbojax.rotary import LinearScaling, LongRopeScaling, YarnScaling


def theirs(config: dict) -> transformers.PretrainedConfig:
    config = json.loads(json.dumps(config))
    return transformers.AutoConfig.for_model(**config)


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
