"""`latent_attention` on a GPU: Hopper's kernel against plain JAX, and what is stored to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention.paged_helpers import place
from tests.caches import latent_cache_helpers as helpers
from tests.gpu.gpu_helpers import assert_near, normal
from turbojax import paged
from turbojax._device import needs_hopper

pytestmark = pytest.mark.gpu

LENGTHS = (1500, 65, 2, 0)
REAL = (3, 1, 2, 0)


def tokens(dtype=jnp.bfloat16):
    """Of lengths that differ by orders of magnitude; one of zeros, and some not finite."""
    latent = normal(1, (4, 1500, 512), dtype) * jnp.exp(normal(5, (4, 1500, 1), dtype))
    latent = latent.at[0, 3].set(0).at[1, 5, 7].set(jnp.nan).at[1, 9, 0].set(jnp.inf)
    return latent, normal(2, (4, 1500, 64), dtype)


def pool_of(kv_dtype, tables, latent, rope):
    pool = paged.init_latent_pages(32, 64, kv_dtype=kv_dtype, dtype=latent.dtype)
    start, new = jnp.zeros(4, jnp.int32), jnp.asarray(LENGTHS, jnp.int32)
    return paged.append_latents(pool, latent, rope, tables, start, new_lengths=new)


filled = jax.jit(pool_of, static_argnums=0)


@pytest.mark.quick(3)
@pytest.mark.parametrize("kv_dtype", helpers.FORMATS)
@pytest.mark.parametrize(("heads", "window"), [(16, None), (128, (200, 0))])
def test_the_kernel_equals_plain_jax(kv_dtype, heads, window):
    if (refusal := needs_hopper()) is not None:
        pytest.skip(refusal)
    latent, rope = (jnp.nan_to_num(x, posinf=1.0) for x in tokens())
    tables = place(LENGTHS, 64, 32)
    pool = filled(kv_dtype, tables, latent, rope)
    query = normal(3, (4, 3, heads, 512)), normal(4, (4, 3, heads, 64))
    (out, lse), (want, want_lse) = (
        helpers.attend(
            *query,
            pool,
            tables,
            jnp.asarray(LENGTHS),
            scale=0.02,
            query_seq_lengths=jnp.asarray(REAL),
            local_window_size=window,
            implementation=implementation,
            return_residual=True,
        )
        for implementation in ("mosaic_gpu", "xla")
    )
    assert_near(out, want, jnp.bfloat16, 0.01)
    assert_near(lse, want_lse, jnp.float32, 0.005)


@pytest.mark.parametrize("kv_dtype", helpers.FORMATS)
def test_the_definition_equals_the_oracle(kv_dtype):
    lengths = (300, 17, 1, 0)
    helpers.assert_matches(helpers.queries(4, 3), *helpers.filled(kv_dtype, lengths), lengths)


@pytest.mark.parametrize("kv_dtype", helpers.FORMATS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_what_is_stored_is_what_a_cpu_stores(kv_dtype, dtype):
    tables = place(LENGTHS, 64, 32)
    given = jax.device_get(tokens(dtype))
    here = filled(kv_dtype, tables, *given)
    with jax.default_device(jax.devices("cpu")[0]):
        there = filled(kv_dtype, tables, *given)
    for a, b in zip(jax.tree.leaves(here.tokens), jax.tree.leaves(there.tokens), strict=True):
        a, b = (np.asarray(x).astype(np.float32) for x in (a, b))
        np.testing.assert_array_equal(a, b)
