"""turbojax beside tokamax: the same arguments mean the same, and what is unlike is told.

tokamax wants another typeguard than kauldron does, so these tests run by themselves.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokamax
from absl import flags

import turbojax as tj
from tests.integrations.helpers import FLOAT, ROUNDING, relative_error

pytestmark = pytest.mark.integrations

flags.FLAGS(["tokamax"])  # it would read them from pytest's command line
B, T, S, N, K, H = 2, 24, 40, 4, 2, 32


def operands(value_dim=H, keys=S):
    shapes = (B, T, N, H), (B, keys, K, H), (B, keys, K, value_dim)
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "lengths": {
        "query_seq_lengths": jnp.array([24, 9]),
        "key_value_seq_lengths": jnp.array([40, 13]),
    },
    "window": {"local_window_size": (5, 0)},
    "scale": {"scale": 0.3},
    "cap": {"logits_soft_cap": 4.0},
    "bias": {"bias": jnp.cos(jnp.arange(N * T * S, dtype=jnp.float32)).reshape(1, N, T, S)},
    "values of another width": {},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_same_arguments_mean_the_same(name):
    """Output and gradient, up to sums of 40 products of order 1 in float32."""
    # tokamax' XLA has windows only for as many keys as queries.
    arrays = operands(64 if "width" in name else H, T if name == "window" else S)
    options = OPTIONS[name]
    shown = jnp.arange(T)[None] < options.get("query_seq_lengths", jnp.full(B, T))[:, None]

    def loss(attend):
        return lambda *x: (attend(*x) * jnp.where(shown, 1, 0)[:, :, None, None]).sum()

    ours = jax.jit(lambda *x: tj.turbo_attention(*x, config=FLOAT, **options))
    theirs = jax.jit(lambda *x: tokamax.dot_product_attention(*x, implementation="xla", **options))
    seen = shown[:, :, None, None]
    out, want = (jnp.where(seen, f(*arrays), 0) for f in (ours, theirs))
    np.testing.assert_allclose(out, want, rtol=0, atol=64 * ROUNDING)
    grads = [jax.grad(loss(f), argnums=(0, 1, 2))(*arrays) for f in (ours, theirs)]
    assert relative_error(*grads) < 64 * ROUNDING


def test_eight_bits_beside_theirs():
    """In 8 bits: weights and values in e4m3 are off by up to 1/16 each, the rest by less."""
    arrays = operands()
    ours = tj.turbo_attention(*arrays, is_causal=True)
    theirs = tokamax.dot_product_attention(*arrays, is_causal=True, implementation="xla")
    assert 0 < relative_error(ours, theirs) < 2 / 16


def test_names_in_common():
    """Whoever goes from one to the other renames nothing of these."""
    theirs, ours = (
        set(inspect.signature(f).parameters)
        for f in (tokamax.dot_product_attention, tj.turbo_attention)
    )
    # A mask is data, and kernels know lengths and segments; precision is the configuration's;
    # sharding follows from the arguments.
    assert theirs - ours == {"mask", "precision", "q_sharding"}
