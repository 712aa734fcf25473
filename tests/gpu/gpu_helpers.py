"""What the GPU tests of kernels share: inputs, caches and how results are compared."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests.attention.attention_helpers import EXACT, SAS_2, SAS_E
from turbojax._device import needs_hopper
from turbojax.caches.progressive.update import store_prompt

on_hopper = pytest.mark.skipif(needs_hopper() is not None, reason=str(needs_hopper()))
# Of implementations with a kernel, those that run here.
KERNELS = ["triton", pytest.param("mosaic_gpu", marks=on_hopper)]
MODES = ("int8", "int8_fp8", "fp8", "float")
SOFTMAXES = {"exact": "exact", "sas": tj.SAS(), "sas-2": tj.SAS(base="2")}
STATIC = ("scale", "local_window_size", "logits_soft_cap", "implementation", "return_residual")
decode = jax.jit(tj.decode, static_argnames=STATIC)


def normal(seed, shape, dtype=jnp.bfloat16):
    """Sampled in float32: bfloat16 samples have a mean and few distinct values."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def assert_near(got, want, dtype, relative, largest=0.03):
    """Relative L2 distance, the same NaN and infinities, and no element off by `largest`."""
    got, want = (np.asarray(x.astype(jnp.float32), np.float64) for x in (got, want))
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    difference = got[finite] - want[finite]
    scale = np.linalg.norm(want[finite]) or 1.0
    allowed = relative + float(jnp.finfo(dtype).eps)
    assert np.linalg.norm(difference) <= allowed * scale
    assert np.abs(difference).max(initial=0) <= largest * max(1.0, np.abs(want[finite]).max())


def assert_equal(got, want):
    """To the bit. Not as bfloat16, whose NaN are not equal."""
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def assert_same_nan(got, want):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))


def both(call, *args, kernel="triton", **options):
    """The result of `kernel` twice, equal to the bit, and XLA's."""
    run = functools.partial(call, *args, return_residual=True, **options)
    first, second = run(implementation=kernel), run(implementation=kernel)
    assert_equal(first, second)
    return first, run(implementation="xla")


# XLA may multiply e4m3 operands in a unit that accumulates coarsely; see `test_fp8_is_exact`.
RELATIVE = {"int8": 1e-4, "int8_fp8": 3e-4, "fp8": 5e-3, "float": 1e-3}


@functools.lru_cache(maxsize=8)
def filled(heads, head_dim, config, lengths, appended=3, dtype=jnp.bfloat16):
    """A cache of prompts of these lengths and a few tokens each, with which nothing is attended."""
    batch, size = len(lengths), max(lengths)
    shape = (batch, size, heads, head_dim)
    cache = tj.init_cache(batch, size + appended, heads, head_dim, config=config, dtype=dtype)
    prompt = normal(1, shape, dtype), normal(2, shape, dtype)
    cache = jax.jit(store_prompt)(cache, *prompt, jnp.asarray(lengths, jnp.int32))
    for t in range(appended):
        new = (batch, 1, heads, head_dim)
        cache = tj.append(cache, normal(3 + t, new, dtype), normal(30 + t, new, dtype))
    return cache


EIGHT_BIT_MODES = ("int8", "int8_fp8", "fp8")
# Every feature, head dim and odd length; modes and softmaxes rotate through them.
CASES = {
    "one query": {"shape": (2, 1, 200, 4, 2, 64)},
    "one token": {"shape": (1, 1, 1, 2, 2, 32)},
    "seven, causal": {"shape": (1, 7, 7, 6, 2, 80), "is_causal": True},
    "ragged and causal": {
        "shape": (3, 330, 200, 2, 1, 96),
        "is_causal": True,
        "key_value_seq_lengths": (200, 77, 0),
    },
    "window": {"shape": (1, 330, 330, 2, 2, 128), "local_window_size": (90, 3)},
    "causal window, lengths": {
        "shape": (2, 300, 400, 4, 2, 64),
        "is_causal": True,
        "local_window_size": 150,
        "key_value_seq_lengths": (328, 65),
    },
    "soft cap and scale": {"shape": (2, 70, 100, 2, 2, 256), "logits_soft_cap": 5.0, "scale": 0.2},
    "negative scale": {"shape": (1, 200, 200, 4, 1, 48), "scale": -0.1},
}
PAIRS = [(m, s) for s in (EXACT, SAS_E, SAS_2) for m in EIGHT_BIT_MODES]
GRID = [
    pytest.param(case, *pair, id="-".join(map(str, (case, *pair))))
    for i, case in enumerate(CASES)
    for pair in [PAIRS[(2 * i + 4 * j) % len(PAIRS)] for j in range(3)]
]


def error(got, exact):
    """Root mean square, over what is finite in both."""
    got, exact = np.asarray(got, np.float64), np.asarray(exact, np.float64)
    assert np.array_equal(np.isfinite(got), np.isfinite(exact))
    finite = np.isfinite(exact)
    return np.sqrt(np.mean(np.square(got[finite] - exact[finite]))) if finite.any() else 0.0
