"""`paged.append` of codes compiled on a GPU: the kernel's bits are those of plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic.hopper.paged import append as hopper
from pallas_kernels.triton import paged_append as kernel
from tests.attention.paged_helpers import filled, normal
from tests.caches.cache_helpers import assert_same_bits
from tests.caches.paged_append_helpers import (
    MIXES,
    TABLES,
    as_bits,
    assert_stores_the_same,
    check_dropped,
    check_format,
    check_ragged,
    compiled,
    integers,
    new,
    strange,
    tokens,
)
from tests.gpu.gpu_helpers import KERNELS, on_hopper
from turbojax import polar
from turbojax._device import needs_hopper
from turbojax.attention.options import Options
from turbojax.caches.paged import formats, mosaic_gpu
from turbojax.caches.paged import pool as paged

pytestmark = pytest.mark.gpu

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
FORMATS = ("auto", "fp8_e4m3", "fp8_e5m2")


@pytest.fixture(params=KERNELS)
def implementation(request):
    return request.param


@pytest.fixture
def same(implementation):
    return functools.partial(assert_stores_the_same, run=compiled(implementation))


@pytest.mark.quick(7)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("page_size", [16, 64])
def test_ragged_tokens(same, page_size, head_dim, dtype):
    check_ragged(same, head_dim, dtype, page_size)


@pytest.mark.quick(7)
@pytest.mark.parametrize("kv_dtype", MIXES)
@pytest.mark.parametrize(("head_dim", "dtype"), [(16, jnp.float32), (128, jnp.bfloat16)])
def test_every_number_of_bits(same, head_dim, dtype, kv_dtype):
    check_format(same, kv_dtype, head_dim, dtype)


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize(("head_dim", "dtype"), list(zip((16, 128, 256), DTYPES, strict=True)))
@on_hopper
def test_formats_without_codes(head_dim, dtype, kv_dtype):
    """On Hopper alone they have a kernel."""
    same = functools.partial(assert_stores_the_same, run=compiled("mosaic_gpu"))
    check_format(same, kv_dtype, head_dim, dtype)


@pytest.mark.quick(5)
@pytest.mark.parametrize("count", [1, 300, 3000])
@pytest.mark.parametrize("kv_dtype", MIXES)
def test_every_launch_of_every_number_of_bits(same, kv_dtype, count):
    tables = jnp.arange(64 * 50, dtype=jnp.int32).reshape(64, 50)[: 64 if count == 1 else 4]
    batch = len(tables)
    cache = paged.init_paged_cache(64 * 50, 64, 8, 128, kv_dtype=kv_dtype, dtype=jnp.bfloat16)
    before = jnp.arange(batch, dtype=jnp.int32)
    cache = same(cache, *tokens(count, 128, jnp.bfloat16, 8, batch=batch), tables, before)
    assert np.asarray(cache.value_norm).any()


@pytest.mark.quick(5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_strange_vectors(same, head_dim, dtype):
    same(new(head_dim, dtype), *strange(head_dim, dtype), TABLES, integers(0, 0, 0))


@pytest.mark.quick(7)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "count", "heads", "head_dim"),
    [
        (64, 1, 8, 128),
        (64, 5, 8, 128),
        (4, 1000, 8, 128),
        (2, 4096, 8, 128),
        (2, 3000, 8, 64),
        (2, 1500, 8, 256),
        (3, 6001, 3, 32),
        (3, 6001, 3, 16),
    ],
)
def test_full_sizes(same, batch, count, heads, head_dim, dtype):
    """Every launch; places at random, each vector of another length."""
    width = -(-(count + 70) // 64)
    cache = paged.init_paged_cache(batch * width + 3, 64, heads, head_dim, dtype=dtype, seed=2)
    rng = np.random.default_rng(3)
    tables = jnp.asarray(rng.permutation(batch * width).reshape(batch, width), jnp.int32)
    before = jnp.asarray(rng.integers(0, 70, batch), jnp.int32)
    x = tokens(count, head_dim, dtype, heads, batch=batch)
    cache = same(cache, *x, tables, before)
    assert int(cache.dropped_tokens) == 0
    assert np.asarray(cache.key_norm).any()


def test_what_has_no_place_is_lost(same):
    check_dropped(same)


def assert_a_cpus_bits(encode, *arrays):
    """Roots and quotients are approximate on a GPU, what is stored is not."""
    try:
        [cpu, *_] = jax.local_devices(backend="cpu")
    except RuntimeError as error:
        pytest.skip(str(error))
    got = jax.jit(encode)(*arrays)
    with jax.default_device(cpu):
        want = jax.jit(encode)(*jax.device_get(arrays))
    bits = functools.partial(jax.tree.map, as_bits)
    assert_same_bits(bits(got), bits(jax.device_put(want, jax.devices()[0])))


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_codec_gives_a_cpus_bits(head_dim, dtype):
    x = tokens(500, head_dim, dtype)[0]
    assert_a_cpus_bits(polar.encode, x, polar.rotation(head_dim, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_has_a_cpus_bits(dtype):
    given = tokens(500, 80, dtype)[0], strange(80, dtype)[0]
    assert_a_cpus_bits(formats.to_int8, jnp.concatenate([x.reshape(-1, 80) for x in given]))


def test_donated_memory_is_reused(implementation):
    """Token by token in one program each."""
    key, value = tokens(6, 128, jnp.bfloat16, seed=6)

    @functools.partial(jax.jit, donate_argnums=0, static_argnames="implementation")
    def step(cache, key, value, lengths, implementation):
        return paged.append(cache, key, value, TABLES, lengths, implementation=implementation)

    got, want = new(128, jnp.bfloat16), new(128, jnp.bfloat16)
    for t in range(6):
        x = key[:, t : t + 1], value[:, t : t + 1], integers(13 + t, t, 30 + t)
        want = step(want, *x, implementation="xla")
        memory = got.key.unsafe_buffer_pointer()
        got = step(got, *x, implementation=implementation)
        assert got.key.unsafe_buffer_pointer() == memory
    assert_same_bits(got, want)


@pytest.mark.parametrize("kv_dtype", ["turbo4", *MIXES])
def test_the_gpu_chooses_the_kernel(kv_dtype):
    cache = new(128, jnp.bfloat16, kv_dtype=kv_dtype)
    arguments = cache, *tokens(1, 128, jnp.bfloat16), TABLES, integers(0, 0, 0)
    chosen = kernel.NAME if needs_hopper() else hopper.NAME
    assert chosen in str(jax.make_jaxpr(paged.append)(*arguments))


@on_hopper
@pytest.mark.quick(7)
@pytest.mark.parametrize(
    ("kv_dtype", "head_dim", "heads", "page_size", "given"),
    [
        ("turbo4", 128, 8, 64, {}),
        ("turbo4", 64, 2, 16, {"is_split": True}),
        ("turbo4", 128, 64, 128, {"window": (300, 0)}),
        ("fp8_e4m3", 128, 8, 16, {"is_split": True}),
        ("fp8_e5m2", 64, 64, 64, {"window": (3000, 0)}),
        ("auto", 128, 8, 64, {"is_split": True}),
        ("auto", 64, 24, 16, {"logits_soft_cap": 20.0}),
        ("int8", 128, 8, 32, {}),
        ("int8", 64, 40, 64, {"is_split": True, "window": (300, 0)}),
    ],
)
def test_attention_that_stores_new_tokens_has_the_bits_of_two_calls(
    kv_dtype, head_dim, heads, page_size, given
):
    """With one token, none, one without a page; in a new page, in the first; several programs."""
    given = dict(given)
    is_split = given.pop("is_split", False)
    after = (9001, 2049, 256, 1, 64, 1101)
    cache, tables = filled(kv_dtype, after, 2, head_dim, page_size, dtype=jnp.bfloat16)
    tables = tables.at[5, 1100 // page_size].set(-1)
    counts, held = integers(1, 1, 1, 1, 0, 1), integers(*after)
    key, value = (normal(i, (6, 1, 2, head_dim), jnp.bfloat16) for i in (7, 8))
    query = normal(6, (6, 1, heads, head_dim), jnp.bfloat16)
    options, launch = Options(True, scale=0.1, **given), mosaic_gpu.Launch(is_split)
    static = {"options": options, "launch": launch}

    @jax.jit
    def both(cache):
        where = tables, held - counts
        return mosaic_gpu.append_and_attend(
            query, key, value, cache, *where, counts, counts, **static
        )

    @jax.jit
    def two(cache):
        stored = paged.append(cache, key, value, tables, held - counts, new_lengths=counts)
        return mosaic_gpu.attend(query, stored, tables, held, counts, **static), stored

    got, want = both(cache), two(cache)
    assert_same_bits(*(jax.tree.map(as_bits, x) for x in (got, want)))
    assert int(got[1].dropped_tokens) == 1
    assert np.isfinite(np.asarray(got[0][0][:4].astype(jnp.float32))).all()
