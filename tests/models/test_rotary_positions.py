"""Angles far into a text, next to float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.rotary_helpers import FAR, ROTARIES
from turbojax.models import TransformerConfig

TRANSFORMS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "vmap": lambda f: lambda p: jax.vmap(lambda row: f(row[None])[0])(p),
    "scan": lambda f: (
        lambda p: jax.lax.scan(lambda carry, row: (carry, f(row[None])[0]), None, p)[1]
    ),
}


@pytest.mark.parametrize("scaling", ["Llama-2-7b", "Llama-3.2-1B", "heads of 80"])
@pytest.mark.parametrize("transform", ["eager", "jit", "vmap", "scan"])
def test_angles_next_to_float64(scaling, transform):
    """Within what float32 numbers allow, and the same bits in every transform."""
    rope = TransformerConfig.from_hf(ROTARIES[scaling]).rope
    positions = np.array([[0, 1, 700, 9_999], [FAR, FAR + 1, 2**17 - 1, 131_072]], np.int32)
    ours = np.asarray(TRANSFORMS[transform](rope.angles)(jnp.asarray(positions)))
    np.testing.assert_array_equal(ours, np.asarray(rope.angles(jnp.asarray(positions))))
    exact = positions[:, :, None, None] * rope.frequencies()
    # The exponent -2i/R is rounded to float32, which the power of theta multiplies with ln(theta);
    # then the power, its reciprocal, up to five steps of a scaling, and the product.
    unit = 2.0**-24
    relative = unit * (np.log(rope.theta) + 1 + 1 + 5 + 1)
    assert np.all(np.abs(ours - exact) <= relative * exact)
