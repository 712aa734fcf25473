"""What the tests of attention share: operands, and comparison within a derived tolerance."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import turbojax as tj
from tests.contracts.implementations import interpreted

MODES = ("int8", "int8_fp8", "fp8", "float")
EXACT = "exact"
SAS_E = tj.SAS()
SAS_2 = tj.SAS(base="2")
FLOAT = tj.TurboConfig(mode="float", softmax=EXACT)

attend = jax.jit(
    tj.turbo_attention,
    static_argnames=(
        "config",
        "scale",
        "is_causal",
        "local_window_size",
        "logits_soft_cap",
        "output_dtype",
        "implementation",
        "return_residual",
    ),
)
BATCH, TOKENS = 3, 150


def tensors(seed, batch, tokens, size, heads, kv_heads, head_dim, dtype=jnp.float32):
    """Query, key and value; keys with outlier channels, as real ones have."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(batch, tokens, heads, head_dim))
    k = rng.normal(size=(batch, size, kv_heads, head_dim))
    v = rng.normal(size=(batch, size, kv_heads, head_dim)) + 0.25
    k = k * np.where(rng.random(head_dim) < 0.05, 3.0, 1.0)
    return tuple(jnp.asarray(x, dtype) for x in (q, k, v))


@functools.cache
def standard(seed=10):
    """One shape for all properties, so that they share what is compiled; in numpy."""
    return tuple(np.asarray(x) for x in tensors(seed, BATCH, TOKENS, TOKENS, 4, 2, 64))


def attend_standard(
    q, k, v, mode, implementation="xla", lengths=(TOKENS,) * BATCH, softmax=SAS_E, **options
):
    """Output and residual of causal attention, as numpy arrays."""
    with interpreted(implementation):
        result = attend(
            q,
            k,
            v,
            config=tj.TurboConfig(mode=mode, softmax=softmax),
            key_value_seq_lengths=np.asarray(lengths, np.int32),
            implementation=implementation,
            return_residual=True,
            **({"is_causal": True} | options),
        )
    return tuple(np.asarray(x) for x in result)


def changed(x, index, value):
    """A copy of a numpy array with another value somewhere."""
    x = x.copy()
    x[index] = value
    return x


def oracle_softmax(softmax):
    return softmax if softmax == EXACT else (softmax.threshold, softmax.base)


def assert_close(got, want, tolerance):
    """Equal within the tolerance of each element; infinities and NaN where the oracle has them."""
    got = np.asarray(got, np.float64)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    error = np.abs(np.where(finite, got, 0) - np.where(finite, want, 0))
    excess = (error - np.where(finite, tolerance, 0)).max()
    assert excess <= 0, f"beyond the derived tolerance by {excess}, error {error.max()}"


def assert_agrees(out, residual, want, value):
    """Output and residual are the oracle's `want`, whose tolerance is checked to be a small one."""
    assert residual.dtype == jnp.float32
    own = 0 if out.dtype == jnp.float32 else float(jnp.finfo(out.dtype).eps)
    assert_close(out, want.out, want.out_tolerance + own * np.abs(want.out) + own * 1e-3)
    assert_close(residual, want.residual, want.residual_tolerance)
    # The tolerance is that of rounding, not a licence: typically a few parts in a million.
    finite = np.isfinite(want.out)
    assert np.median(want.out_tolerance[finite]) < 1e-4 * np.nanmax(np.abs(np.asarray(value)))
