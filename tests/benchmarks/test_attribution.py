"""The simulation behind `docs/benchmarks/real_model.md`: its formulas are the library's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.attribution import attending as rounding
from benchmarks.attribution.attending import Variant
from benchmarks.attribution.rows import GROUPS, attribution_table, caches_table, recall_table
from turbojax.quantizers import (
    dequantize_channels,
    quantize_channels,
    quantize_int8,
    round_to_e4m3,
)

_EXACT = Variant("exact", key="exact", value="exact", products=False)


def _numbers(seed: int, heads: int = 2, tokens: int = 128) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (1, tokens, heads, 64), jnp.float32)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("bits", [2, 4])
def test_prompt_codes_are_the_quantizers(bits: int) -> None:
    x = _numbers(0)
    found, _ = rounding.FORMATS["progressive"](x, bits, 128, 1)
    codes, scale = quantize_int8(rounding.in_blocks(x), axis=(2, 4))
    codes, scale = jnp.swapaxes(codes, 2, 3), scale[..., None, None]
    back = dequantize_channels(*quantize_channels(codes, bits)).astype(jnp.float32)
    wanted = rounding.joined(jnp.swapaxes(back * scale, 2, 3))
    # A scale has 16 bits in the library; now and then a code is on the other side of a tie.
    off = np.abs(np.asarray(found - wanted)) > 1e-3
    assert off.mean() < 2e-3


def test_e4m3_is_the_quantizers() -> None:
    x = 20 * _numbers(1)
    x = jnp.where(jnp.abs(x) < 0.1, 0, x)
    wanted = round_to_e4m3(x).astype(jnp.float32)
    np.testing.assert_array_equal(np.asarray(jax.jit(rounding.e4m3)(x)), np.asarray(wanted))


@pytest.mark.slow
def test_an_exact_variant_is_causal_attention() -> None:
    query, key, value = _numbers(2, heads=4), _numbers(3), _numbers(4)
    wanted = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    found, _ = _EXACT(query, key, value, jnp.ones((), bool))
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    # What the keys are moved and scaled by cancels, and so does what the values are.
    moved = dataclasses.replace(
        _EXACT, key_shift="mean", key_scale="balanced", value_shift="first", value_scale="channel"
    )
    found, _ = moved(query, key, value, jnp.ones((), bool))
    np.testing.assert_allclose(found, wanted, atol=2e-4)


@pytest.mark.fuzz
def test_what_is_rounded_shows_after_the_prompt_alone() -> None:
    query, key, value = _numbers(2, heads=4), _numbers(3), _numbers(4)
    exact, _ = _EXACT(query, key, value, jnp.ones((), bool))
    errors = {}
    for sinks in (0, 128):
        variant = Variant("4 bits", products=False, exact_buffer=True, sinks=sinks)
        found, _ = variant(query, key, value, jnp.ones((), bool))
        np.testing.assert_allclose(found[:, :64], exact[:, :64], atol=1e-6)
        errors[sinks] = float(jnp.mean(jnp.abs(found - exact)[:, 64:]))
    assert errors[128] < 1e-6
    assert 0.005 < errors[0] < 0.1


def test_table_has_the_rows_that_were_measured() -> None:
    names = [variant.name for group in GROUPS.values() for variant in group]
    assert len(set(names)) == len(names)
    row = {"cost": 0.01, "interval": None, "cost_by_text": {"prose": 0.02}}
    row |= {"divergence": 0.5, "same_choice": 0.9}
    result = {"device": "x", "jax": "y", "date": "z", "rows": {names[0]: row}}
    table = attribution_table("parts", "a.json", result)
    assert "| nothing | +0.0100 | +0.0200 | 0.5000 | 90.0% |" in table
    assert names[1] not in table
    rows = {"a": {**row, "compression": 3.456}, "b": {**row, "cost": 0.002, "compression": 2.0}}
    table = caches_table("a.json", {**result, "caches": rows})
    assert table.index("| `b` | +0.0020 | +0.0200 | 0.5000 | 90.0% | 2.00x |") < table.index(
        "| `a` |"
    )


def test_recall_is_that_of_the_longest_context() -> None:
    cells = [
        {"length": length, "depth": depth, "bits": bits, "whole": bits / 4}
        for length, depth, bits in ((1024, 0.0, 0.5), (8192, 0.0, 1.0), (8192, 1.0, 2.0))
    ]
    row = {kind: {"cells": cells} for kind in ("copy", "needle")}
    result = {"device": "x", "jax": "y", "date": "z", "recall": {"exact": row}}
    table = recall_table("a.json", result)
    assert "| 8,192 tokens | copy | sentence in a text |" in table
    assert "| `exact` | 1.50 (38%) | 1.50 (38%) |" in table
