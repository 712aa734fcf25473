"""Sessions, results of `turbojax serve` and logs of training hold fields of configurations.

Those of models that could be read when the first such files were written say the same today, or
the files could not be gone on from.
"""

import dataclasses
import json

import pytest

from turbojax import models
from turbojax.app.serve.run import _shape
from turbojax.finetune.log import Log
from turbojax.models import TransformerConfig

_EVER = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"),
    *("num_kv_heads", "head_dim", "max_length", "rope_theta", "norm_eps", "tie_embeddings"),
    *("family", "activation", "qkv_bias", "output_bias", "mlp_bias", "qk_norm", "rope_scaling"),
    *("rotary_dim", "attention_scale", "attention_soft_cap", "final_soft_cap", "local_windows"),
    *("embedding_scale", "norm_offset", "post_norms"),
)


@pytest.mark.parametrize("name", ["tiny", "llama-3.1-8b", "gemma-3-4b", "qwen-3-30b-a3b"])
def test_only_fields_of_old_are_told(name):
    told = models.SHAPES[name].told()
    assert tuple(told)[: len(_EVER)] == _EVER
    assert set(told) - set(_EVER) <= {"local_rope_theta", "experts"}


def test_results_go_by_the_same_words():
    assert _shape(models.SHAPES["tiny"]) == (
        "LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=96, num_layers=2, "
        "num_heads=4, num_kv_heads=2, head_dim=16, max_length=512, rope_theta=10000.0, "
        "norm_eps=1e-05, tie_embeddings=False, family='llama', activation='silu', qkv_bias=False, "
        "output_bias=False, mlp_bias=False, qk_norm=False, rope_scaling=None, rotary_dim=None, "
        "attention_scale=None, attention_soft_cap=None, final_soft_cap=None, local_windows=(), "
        "embedding_scale=None, norm_offset=0.0, post_norms=False)"
    )


def test_a_log_from_before_is_gone_on_with(tmp_path):
    """It has the two fields that were None then, and none of the later ones."""
    config = models.SHAPES["tiny"]
    before = {name: getattr(config, name) for name in (*_EVER, "local_rope_theta", "experts")}
    path = tmp_path / "log.json"
    content = {"identity": {"model": before}, "losses": [1.0], "records": [], "evaluations": []}
    path.write_text(json.dumps(content), encoding="utf-8")
    log = Log(path, {"identity": {"model": config.described()}})
    assert log.content["losses"] == [1.0]
    other = dataclasses.replace(config, attention_sinks=True)
    with pytest.raises(ValueError, match=r"model\.attention_sinks=None instead of True"):
        Log(path, {"identity": {"model": other.described()}})


def test_later_fields_are_told_where_they_say_something():
    config = dataclasses.replace(models.SHAPES["tiny"], nope_layers=(1,), residual_scale=0.5)
    assert set(config.told()) - set(_EVER) == {"nope_layers", "residual_scale"}
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert set(config.told()) < fields
