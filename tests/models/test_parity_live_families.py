"""What `config.json` of every family means: as transformers reads it."""

import dataclasses
import json
import math

import pytest

from tests.models import hf_helpers as hf
from tests.models.family_helpers import SIZES, WINDOWS, least
from turbojax.models import TransformerConfig

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def theirs():
    """What transformers reads: imported here, because it may not be installed."""
    from tests.models import torch_helpers

    return torch_helpers


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", hf.VARIANTS)
def test_what_transformers_reads_of_ours_is_what_it_wrote(theirs, tmp_path, name):
    theirs.reference(name).config.save_pretrained(tmp_path)
    file = json.loads((tmp_path / "config.json").read_text())
    config = TransformerConfig.from_hf(file)
    assert config.family == theirs.config(file).model_type
    written = theirs.config(config.to_hf())
    original = theirs.config(file)
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
    ropes = by_kind(written.rope_parameters)
    assert len(ropes) == 1 + name.startswith("gemma3")
    for kind, wanted in by_kind(original.rope_parameters).items():
        ropes[kind].pop("type", None)
        # Defaults, which ours writes out.
        defaults = {"beta_fast": 32.0, "beta_slow": 1.0} if wanted["rope_type"] == "yarn" else {}
        assert ropes[kind] == {**defaults, **wanted}


def by_kind(parameters) -> dict[str, dict]:
    """Those of each kind of layer, or of all."""
    if "rope_type" in parameters:
        return {"all": dict(parameters)}
    return {kind: dict(rope) for kind, rope in parameters.items()}


@pytest.mark.parametrize("name", ["gemma3", "gemma3-odd"])
def test_transformers_reads_both_spellings_of_two_ropes(theirs, name):
    file = TransformerConfig.from_hf(hf.config(name)).to_hf()
    old = {key: x for key, x in file.items() if key not in ("rope_parameters", "layer_types")}
    new = {key: x for key, x in file.items() if not key.startswith(("rope_", "sliding_window_p"))}
    new["rope_parameters"] = file["rope_parameters"]
    expected = by_kind(theirs.config(hf.config(name)).rope_parameters)
    for keys in (old, new):
        found = by_kind(theirs.config(keys).rope_parameters)
        for kind, rope in expected.items():
            assert {key: found[kind][key] for key in rope} == rope
    if "sliding_window_pattern" in file:
        assert theirs.config(old).layer_types == theirs.config(new).layer_types


def test_yarn_with_two_scales(theirs):
    keys = {"type": "yarn", "factor": 40.0, "mscale": 0.8, "mscale_all_dim": 0.5}
    file = least("llama", rope_scaling=keys)
    amplitude = theirs.amplitude(file)
    assert TransformerConfig.from_hf(file).rope.amplitude == pytest.approx(amplitude, rel=1e-12)


def test_scale_of_long_rope(theirs):
    """It is written out, so that a file for shorter texts scales as the one for long ones."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
    keys = least(
        "phi3",
        rope_scaling={"type": "longrope", **factors},
        original_max_position_embeddings=1024,
        max_position_embeddings=8192,
    )
    amplitude = math.sqrt(1 + math.log(8) / math.log(1024))
    short = dataclasses.replace(TransformerConfig.from_hf(keys), max_length=1024)
    assert theirs.config(short.to_hf()).rope_parameters["attention_factor"] == amplitude


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(("family", "keys", "windows"), WINDOWS)
def test_windows(theirs, family, keys, windows):
    config = TransformerConfig.from_hf(least(family, **keys))
    types = getattr(theirs.config(config.to_hf()), "layer_types", None)
    if types is not None and (not family.startswith("gemma") or windows):
        assert [kind == "sliding_attention" for kind in types] == [
            bool(window) for window in windows or (None, None)
        ]
