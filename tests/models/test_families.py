"""What `config.json` of every family means: as transformers reads it, as recorded."""

import ast
import dataclasses
import json
import math
from pathlib import Path

import pytest

from tests.models import hf_helpers as hf
from tests.models.family_helpers import WINDOWS, least, least_files
from tests.models.published import ARCHITECTURES, PUBLISHED
from tests.recordings import parity_recordings as recordings
from turbojax.models import TransformerConfig, families
from turbojax.rotary import LinearScaling, LongRopeScaling, YarnScaling


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(name):
    """The numbers of parameters are those of the published weights."""
    file, expected, parameters = PUBLISHED[name]
    config = TransformerConfig.from_hf(file)
    assert {key: getattr(config, key) for key in expected} == expected
    assert config.num_parameters == parameters
    assert TransformerConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_defaults_are_those_of_transformers(family):
    """What transformers fills in, written out, means the same."""
    recorded = recordings.read("models")["defaults"][family]
    for keys, filled in zip(least_files(family), recorded, strict=True):
        assert set(filled) > set(keys)
        assert TransformerConfig.from_hf({**keys, **filled}) == TransformerConfig.from_hf(keys)


@pytest.mark.parametrize("name", hf.VARIANTS)
def test_files_of_transformers_are_read_and_written(name):
    file = hf.config(name)
    config = TransformerConfig.from_hf(file)
    assert config.family == file["model_type"]
    for ours, key in {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "max_length": "max_position_embeddings",
        "norm_eps": families.FAMILIES[config.family].norm_eps_key,
        "tie_embeddings": "tie_word_embeddings",
    }.items():
        assert getattr(config, ours) == file[key], key
    assert TransformerConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.parametrize("name", hf.VARIANTS)
def test_frequencies_are_those_of_transformers(name):
    """Including what queries and keys are multiplied with."""
    recorded = recordings.facts(name)
    config = TransformerConfig.from_hf(recorded["config"])
    if config.rope_scaling is not None and hasattr(config.rope_scaling, "original_max_length"):
        short = dataclasses.replace(config, max_length=config.rope_scaling.original_max_length)
    else:
        short = config
    # transformers computes powers and quotients in float32.
    assert short.rope.frequencies() == pytest.approx(recorded["frequencies"], rel=1e-6)
    assert config.rope.amplitude == pytest.approx(recorded["amplitude"], rel=1e-12)
    ropes = [config.rope_of(i) for i, window in enumerate(config.local_windows) if window]
    if "local_frequencies" not in recorded:
        assert set(ropes) <= {config.rope, None}
        return
    assert len(ropes) > 0
    for rope in ropes:
        assert rope.frequencies() == pytest.approx(recorded["local_frequencies"], rel=1e-6)
        assert rope.amplitude == 1


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
    config = TransformerConfig.from_hf(least("llama", **keys))
    assert config.rope_scaling == scaling
    assert config.rope_theta == keys.get("rope_theta", 10000.0)
    assert TransformerConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ({}, {}, (1e6, 1e4, None)),
        (
            {"rope_theta": 5, "rope_local_base_freq": 6},
            {"full_attention": {"rope_theta": 5}, "sliding_attention": {"rope_theta": 6.0}},
            (5, 6, None),
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
            {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": None},
            (1e6, 1e4, LinearScaling(8.0)),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_local_base_freq": 9.0},
            {
                "full_attention": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 9.0},
            },
            (1e6, 9.0, YarnScaling(4.0, 131072)),
        ),
    ],
)
def test_spellings_of_two_ropes(old, new, said):
    """Of layers without a window and with one, as transformers 4 has them and as 5 does."""
    for keys in (old, {"rope_parameters": new}, {**old, "rope_parameters": new}):
        config = TransformerConfig.from_hf(least("gemma3_text", **keys))
        assert (config.rope_theta, config.local_rope_theta, config.rope_scaling) == said
        written = json.loads(json.dumps(config.to_hf()))
        assert TransformerConfig.from_hf(written) == config
        # Each spelling says it all.
        for others in (["rope_parameters"], ["rope_theta", "rope_local_base_freq", "rope_scaling"]):
            alone = {key: value for key, value in written.items() if key not in others}
            assert TransformerConfig.from_hf(alone) == config


@pytest.mark.parametrize("pattern", [1, 2, 3, 5, 7, None])
def test_the_pattern_of_layers_is_written_where_there_is_one(pattern):
    """The first versions of transformers with Gemma 3 read nothing else."""
    types = ["full_attention", "full_attention", "sliding_attention"] * 2
    says = {"layer_types": types} if pattern is None else {"sliding_window_pattern": pattern}
    config = TransformerConfig.from_hf(least("gemma3_text", num_hidden_layers=6, **says))
    written = config.to_hf()
    assert written.pop("sliding_window_pattern", None) == pattern
    assert TransformerConfig.from_hf(written) == config
    if pattern is not None:
        del written["layer_types"]
        written["sliding_window_pattern"] = pattern
        assert TransformerConfig.from_hf(written) == config


def test_yarn_with_two_scales():
    keys = {"type": "yarn", "factor": 40.0, "mscale": 0.8, "mscale_all_dim": 0.5}
    config = TransformerConfig.from_hf(least("llama", rope_scaling=keys))
    expected = (0.08 * math.log(40) + 1) / (0.05 * math.log(40) + 1)
    assert config.rope.amplitude == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_names_of_long_rope_in_phi3(kind):
    factors = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
    keys = least(
        "phi3",
        rope_scaling={"type": kind, **factors},
        original_max_position_embeddings=1024,
        max_position_embeddings=8192,
    )
    config = TransformerConfig.from_hf(keys)
    amplitude = math.sqrt(1 + math.log(8) / math.log(1024))
    assert config.rope_scaling == LongRopeScaling((1.0,) * 8, (3.0,) * 8, 1024, amplitude)
    # A shorter model of the same weights has the short factors, and is scaled as before.
    short = dataclasses.replace(config, max_length=1024)
    assert short.rope.amplitude == amplitude
    assert short.rope.frequencies()[0] == 1
    assert config.rope.frequencies()[0] == pytest.approx(1 / 3)
    file = short.to_hf()
    assert TransformerConfig.from_hf(json.loads(json.dumps(file))) == short
    # transformers 4 takes these three keys and no others.
    assert set(config.to_hf()["rope_scaling"]) == {"type", "short_factor", "long_factor"}


@pytest.mark.parametrize(("family", "keys", "windows"), WINDOWS)
def test_windows(family, keys, windows):
    config = TransformerConfig.from_hf(least(family, **keys))
    assert config.local_windows == windows
    assert TransformerConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.parametrize("family", ["glm", "glm4"])
@pytest.mark.parametrize(
    ("keys", "rotated"),
    [({}, 4), ({"partial_rotary_factor": None}, None), ({"partial_rotary_factor": 0.25}, 2)],
)
def test_share_of_a_head_that_turns(family, keys, rotated):
    """transformers has a default for a key that is missing, and none for one that is null."""
    assert TransformerConfig.from_hf(least(family, head_dim=8, **keys)).rotary_dim == rotated


def test_no_other_module_asks_which_family_a_model_is():
    """What differs stands in the family's own file; only shapes and a default name one."""
    package = Path(families.__file__).parent
    shared = {"__init__", "base", "keys", "layers", "rope", "table", "tensors"}
    own = {path for path in package.glob("*.py") if path.stem not in shared}
    allowed = {"config.py": {"llama"}, "shapes.py": set(families.FAMILIES)}
    # Tunix' own modules and the architectures of GGUF files have such names.
    own |= {package.parents[1] / "integrations/tunix.py"}
    own |= set((package.parent / "checkpoint/gguf").glob("*.py"))
    own |= {package.parent / "text/gguf_tokenizer.py"}
    for path in sorted(set(package.parents[1].rglob("*.py")) - own):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts = {x.value for x in ast.walk(tree) if isinstance(x, ast.Constant)}
        found = {name for name in families.FAMILIES if name in texts}
        if package.parent == path.parent:
            found -= allowed.get(path.name, set())
        assert not found, path


def test_either_name_of_the_architecture_is_enough():
    config = TransformerConfig.from_hf(least("qwen3"))
    for key in ("architectures", "model_type"):
        file = least("qwen3")
        del file[key]
        assert TransformerConfig.from_hf(file) == config


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", {"attention_scale": 0.25}),
        ("llama", {"local_windows": (None, None)}),
        ("llama", {"rotary_dim": 16}),
        ("gemma2", {"attention_scale": None}),
        ("gemma2", {"attention_scale": 0.3}),
        ("gemma2", {"attention_scale": 300.0}),
        ("gemma3_text", {"local_rope_theta": None}),
        ("gemma3_text", {"local_windows": (), "local_rope_theta": None}),
        ("gemma3_text", {"local_windows": (None, None), "local_rope_theta": 3.0}),
    ],
)
def test_the_same_said_otherwise_is_written(family, change):
    config = dataclasses.replace(TransformerConfig.from_hf(least(family, head_dim=16)), **change)
    again = TransformerConfig.from_hf(json.loads(json.dumps(config.to_hf())))
    options = [c.attention_options(0).scale or 16**-0.5 for c in (config, again)]
    assert options[0] == pytest.approx(options[1], rel=1e-12)
    assert config.rope.frequencies().tolist() == again.rope.frequencies().tolist()
