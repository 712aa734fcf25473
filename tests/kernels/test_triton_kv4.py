"""What is the Triton kernel of `fireq.decode`'s own: launches, refusals, lowering.

Numerics that every implementation shares are in `test_kv4_decode.py`.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.attention.test_kv4_decode import INIT, assert_matches, filled, normal
from tests.kernels.kernel_helpers import lower_for_cuda
from turbojax._device import interpret_kernels
from turbojax.ops.kv4_attention import api, triton
from turbojax.ops.options import Options
from turbojax.state import kv4


@pytest.fixture(autouse=True)
def _interpreted():
    with interpret_kernels():
        yield


@pytest.mark.slow
def test_splits_do_not_matter(monkeypatch):
    """A program's tiles, few or many: weights are rounded relative to other maxima."""
    query, cache = normal(11, (2, 1, 4, 32)), filled("kv4", 2, 32, (200, 90))
    for programs in (1, 8, 1000):
        monkeypatch.setattr(triton, "_ENOUGH_PROGRAMS", programs)
        triton._decode.clear_cache()
        call = functools.partial(api.decode, implementation="triton")
        assert_matches("triton", query, cache, call)
    triton._decode.clear_cache()


REFUSED = {
    "rows": ((1, 5, 13, 8), "5 query tokens times 13 heads per KV head must be at most 64"),
    "head dim": ((1, 1, 1, 264), "head_dim=264 must be at most 256"),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", REFUSED)
def test_refusals_in_words(name):
    """And what is asked for without a name runs in plain JAX."""
    shape, message = REFUSED[name]
    cache = kv4.init_cache(1, 10, 1, shape[3], dtype=jnp.float32)
    with pytest.raises(NotImplementedError, match=message):
        api.decode(jnp.zeros(shape), cache, implementation="triton")
    assert api.decode(jnp.zeros(shape), cache).shape == shape


LOWERED = {
    "Llama-3-8B": ((16, 1, 32, 128), {}),
    "several, window": ((2, 3, 8, 64), {"window": (100, 0)}),
    "head dim 96, soft cap": ((2, 2, 4, 96), {"cap": 5.0}),
    "head dim 96, window, soft cap": ((2, 2, 4, 96), {"window": (100, 0), "cap": 5.0}),
    "head dim 256": ((1, 1, 16, 256), {}),
    "head dim 8": ((3, 8, 16, 8), {}),
    "head dim 8, window": ((3, 8, 16, 8), {"window": (5, 5)}),
}


@pytest.mark.quick(first=4)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("kv4", "Llama-3-8B"),
        ("kv4", "several, window"),
        ("k8v4", "Llama-3-8B"),
        ("k8v4", "head dim 96, window, soft cap"),
        ("k8v4", "head dim 256"),
        ("k8v4", "head dim 8"),
        pytest.param("kv4", "head dim 96, soft cap", marks=pytest.mark.fuzz),
        pytest.param("kv4", "head dim 256", marks=pytest.mark.fuzz),
        pytest.param("kv4", "head dim 8, window", marks=pytest.mark.fuzz),
    ],
)
def test_lowers_for_cuda(kind, name):
    (batch, tokens, heads, dim), given = LOWERED[name]
    cache = jax.eval_shape(lambda: INIT[kind](batch, 4000, 2, dim))
    call = functools.partial(
        triton._decode,
        options=Options(True, given.get("window"), scale=0.1, logits_soft_cap=given.get("cap")),
        interpret=False,
    )
    query = jax.ShapeDtypeStruct((batch, tokens, heads, dim), jnp.bfloat16)
    text = lower_for_cuda(call, query, cache, jax.ShapeDtypeStruct((batch,), jnp.int32))
    assert "turbojax_kv4_decode" in text
    assert "turbojax_decode_merge" in text
