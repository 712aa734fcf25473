"""What 8-bit attention costs on text: the benchmark, its table, the default's error bound."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from benchmarks import attention_quality as quality
from tests import oracles
from turbojax import models

# Stated in docs/numerics.md: the relative L2 error of the default's output.
BOUND = 0.07


def row(cost=0.001):
    errors = {"relative_l1": [0.03, 0.04], "relative_l2": [0.02, 0.05]}
    return {
        "cost": cost,
        "cost_standard_error": 0.0002,
        "random": {"relative_l1": 0.037, "relative_l2": 0.036},
        "by_layer": errors,
    }


def test_rows_are_all_combinations():
    names = set(quality.rows())
    assert len(names) == 1 + 3 * 3 * 2
    assert {"bfloat16", "int8-sas-64", "int8_fp8-exact-128", "fp8-sas2-64"} < names
    assert quality.rows()["int8-sas-64"] == tj.TurboConfig(mode="int8", softmax=tj.SAS())


def test_the_table_has_speed_error_and_cost(tmp_path):
    default = f"{tj.TurboConfig().mode}-exact-{tj.TurboConfig().block_kv}"
    found = {
        "device": "cpu",
        "windows": 12,
        "context": 4096,
        "modules": 6,
        "attention": {"bfloat16": row(-0.0001), "int8-sas-128": row(0.002), default: row()},
    }
    place = "prefill/llama3-8b/b2-s8192/turbo-int8-sas-128/mosaic_gpu"
    hopper = {"device": "H", "rows": [{"name": place, "status": "ok", "speedup_over_cudnn": 1.14}]}
    (tmp_path / "attention_quality_2026-01-02.json").write_text(json.dumps(found))
    (tmp_path / "hopper_2026-01-02.json").write_text(json.dumps(hopper))
    text = quality.numerics_table(tmp_path)
    assert (
        "| `int8` | SAS | 128 | 1.14x | - | 0.036 | 0.020 to 0.050 | +0.0020 ± 0.0002 |"
    ) in text
    assert f"| **`{tj.TurboConfig().mode}`** | **exact** |" in text
    assert "12 windows of 4,096 bytes, at most 2 of each of 6 modules." in text
    assert "Exact attention in bfloat16: -0.0001 ± 0.0002." in text
    assert "cpu: `attention_quality_2026-01-02.json`. H: `hopper_2026-01-02.json`." in text


@pytest.mark.fuzz
def test_the_default_keeps_its_error_bound_on_normal_tensors():
    """And the float64 softmax agrees with what it is measured against."""
    empty = tuple(jnp.zeros((0, 400, heads, 64), jnp.bfloat16) for heads in (4, 2, 2))
    tensors = quality.with_random(empty)
    want = quality.exact_attention(*(x.astype(jnp.float32) for x in tensors))
    mask = np.tril(np.ones((400, 400), bool))[None]
    plain = oracles.plain_attention(*(np.asarray(x, np.float32) for x in tensors), mask=mask)
    np.testing.assert_allclose(want, plain, atol=1e-5)
    _, l2 = quality._errors(tensors, want, attention=tj.TurboConfig())
    assert 0.01 < float(l2[0]) < BOUND


@pytest.mark.slow
@pytest.mark.optimized
def test_the_default_keeps_its_error_bound_in_every_layer_of_a_model():
    model = models.load(dtype=jnp.bfloat16)
    tokens = next(iter(quality.held_out_windows(1024, 1).values()))
    tensors = quality.layer_tensors(model, jnp.asarray(tokens[0, :-1]))
    want = quality.exact_attention(*(x.astype(jnp.float32) for x in tensors))
    _, l2 = quality._errors(tensors, want, attention=tj.TurboConfig())
    assert l2.shape == (8,)
    assert float(jax.device_get(l2).max()) < BOUND


@pytest.mark.fuzz
@pytest.mark.optimized
def test_a_quick_run(tmp_path):
    file = tmp_path / "results" / "quality.json"
    quality.main(["--quick", "--rows", "bfloat16|fp8-exact-64", "--out", str(file)])
    result = json.loads(file.read_text(encoding="utf-8"))
    assert set(result["attention"]) == {"bfloat16", "int8_fp8-exact-64", "fp8-exact-64"}
    assert result["modules"] == result["windows"] == 12
    for name, found in result["attention"].items():
        assert np.mean(found["cost_by_window"]) == pytest.approx(found["cost"], abs=1e-5)
        errors = found["by_layer"]["relative_l2"]
        assert len(errors) == 8
        assert max(errors) < (0.01 if name == "bfloat16" else 0.1)
        assert found["implementation"] == (None if name == "bfloat16" else "xla")
