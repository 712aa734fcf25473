"""The kernel that writes pages of codes, interpreted: the bits of plain JAX, and lowering."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.triton import paged_append as kernel
from tests.caches.cache_helpers import assert_same_bits
from tests.caches.paged_append_helpers import (
    MIXES,
    PAGES,
    TABLES,
    as_bits,
    assert_stores_the_same,
    check_format,
    check_ragged,
    compiled,
    integers,
    new,
    strange,
    tokens,
)
from tests.grids import pairwise
from tests.kernels.kernel_helpers import lower_for_cuda
from turbojax._device import interpret_kernels
from turbojax.caches.paged import append_triton
from turbojax.caches.paged import pool as paged

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_RUN = compiled("triton")


def run(*arguments, **options):
    with interpret_kernels():
        return _RUN(*arguments, **options)


same = functools.partial(assert_stores_the_same, run=run)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(
    ("head_dim", "dtype", "page_size"),
    [(32, jnp.float32, 32), (256, jnp.bfloat16, 128)],
)
def test_ragged_tokens(head_dim, dtype, page_size):
    check_ragged(same, head_dim, dtype, page_size)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(
    ("kv_dtype", "head_dim", "dtype"),
    pairwise(kv_dtype=MIXES, head_dim=(16, 64), dtype=DTYPES),
)
def test_every_number_of_bits(kv_dtype, head_dim, dtype):
    check_format(same, kv_dtype, head_dim, dtype)


@pytest.mark.optimized
@pytest.mark.quick(1)
@pytest.mark.parametrize(("dtype", "head_dim"), [(jnp.bfloat16, 16), (jnp.float16, 128)])
def test_strange_vectors(head_dim, dtype):
    key, value = strange(head_dim, dtype)
    cache = same(new(head_dim, dtype), key, value, TABLES, integers(0, 0, 0))
    norms = stored_norms(cache, key.shape[1])
    assert np.isnan(norms).any()
    assert (norms == 0).any()
    assert (norms == 2.0**-24).any()
    assert (norms > 60_000).any()


def stored_norms(cache, count):
    """Of the keys of all sequences."""
    pages = np.asarray(cache.key_norm)[TABLES[:, : -(-count // 16)]]
    return np.moveaxis(pages, 2, 3).reshape(3, -1, pages.shape[2])[:, :count]


# Vectors of a program, pieces, and what is written; the first is how few are launched.
LAUNCHES = [(1, 1, jnp.float32), (64, 8, jnp.bfloat16)]


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(("rows", "pieces", "dtype"), LAUNCHES)
def test_how_vectors_are_cut_does_not_matter(rows, pieces, dtype):
    cache, lengths = new(128, dtype), integers(5, 14, 0)
    x = tokens(7, 128, dtype, seed=rows)
    taken = append_triton.settings(63, 7, 128, (4, 4))
    cut = dataclasses.replace(taken, rows=rows, pieces=pieces, interpret=True)
    pages = (
        kernel.Pages(cache.key, cache.key_norm),
        kernel.Pages(cache.value, cache.value_norm),
    )
    written = jax.jit(functools.partial(kernel.append, settings=cut))(
        tuple(y.reshape(-1, 128) for y in x),
        cache.rotation.signs,
        jnp.asarray(TABLES),
        lengths,
        integers(7, 7, 7),
        pages,
    )
    want = compiled("xla")(cache, *x, TABLES, lengths)
    arrays = {"key": written[0].codes, "key_norm": written[0].norms}
    arrays |= {"value": written[1].codes, "value_norm": written[1].norms}
    got = dataclasses.replace(cache, **arrays)
    assert_same_bits(jax.tree.map(as_bits, got), jax.tree.map(as_bits, want))


def test_all_launches_fit_all_shapes():
    for head_dim in (16, 32, 64, 128, 256):
        for vectors in (1, 2048, 2049, 16384, 16385, 10**6):
            s = append_triton.settings(vectors, 1, head_dim, (2, 3, 4))
            width = head_dim // s.pieces
            assert s.pieces * width == head_dim
            assert s.pieces & (s.pieces - 1) == 0
            assert s.rows & (s.rows - 1) == 0
            assert width >= 16
            assert append_triton.settings(vectors, 1, head_dim, (8, 2)).codecs[0] is None
            for codec in s.codecs:
                assert all(0 < square < 2 ** (30 - codec.bits) for square in codec.squares)
            # What one thread holds.
            assert s.rows * head_dim <= 64 * 32 * s.num_warps


def test_what_has_no_place_is_lost():
    """No page, past the table, negative positions, where int32 ends: nothing else changes."""
    cache = new(32, jnp.float32)
    tables = TABLES.copy()
    tables[0, 1], tables[1, 0], tables[2, 3] = -1, PAGES, 2**31 - 1
    x = tokens(30, 32, jnp.float32, seed=5)
    dropped_tokens = []
    for lengths, count in (
        ((10, 0, 40), (30, 30, 30)),
        ((60, -5, 2**31 - 9), (30, 30, 30)),
        ((0, 20, -(2**31)), (17, 40, -3)),
    ):
        given = {"new_lengths": integers(*count)}
        dropped_tokens.append(
            int(same(cache, *x, tables, integers(*lengths), **given).dropped_tokens)
        )
    assert min(dropped_tokens) > 10


@pytest.mark.slow
def test_outside_jit():
    """Errors as of plain JAX; a vector past the range is named."""
    cache = new(64, jnp.float32)
    key, value = tokens(3, 64, jnp.float32)
    lengths = integers(4, 0, 9)
    with interpret_kernels():
        append = functools.partial(paged.append, implementation="triton")
        got = append(cache, key, value, TABLES, lengths)
        want = paged.append(cache, key, value, TABLES, lengths, implementation="xla")
        assert_same_bits(jax.tree.map(as_bits, got), jax.tree.map(as_bits, want))
        key = key.at[1, 2, 0].set(1e5)
        with pytest.raises(ValueError, match=r"key\[1, 2\] has a norm beyond 65504"):
            append(cache, key, value, TABLES, lengths)
        append(cache, key, value, TABLES, lengths, new_lengths=integers(3, 2, 3))
        append(cache, key.at[1, 2].set(jnp.nan), value, TABLES, lengths)
        with pytest.raises(ValueError, match=r"block_tables\[0, 3\]=-1 is needed"):
            append(cache, key, value, TABLES, integers(48, 0, 0))
        with pytest.raises(NotImplementedError, match="append has no gradient"):
            jax.grad(
                lambda x: append(cache, x, value, TABLES, lengths).key_norm.astype(x.dtype).sum()
            )(value)


def test_donated_memory_is_reused():
    """Steps of a decoder, in one program each: the other pages stay, and nothing is copied."""
    key, value = tokens(6, 64, jnp.bfloat16, seed=6)

    @functools.partial(jax.jit, donate_argnums=0, static_argnames="implementation")
    def step(cache, key, value, lengths, implementation):
        return paged.append(cache, key, value, TABLES, lengths, implementation=implementation)

    got, want = new(64, jnp.bfloat16), new(64, jnp.bfloat16)
    for t in range(6):
        x = key[:, t : t + 1], value[:, t : t + 1], integers(13 + t, t, 30 + t)
        want = step(want, *x, implementation="xla")
        first = got
        with interpret_kernels():
            got = step(got, *x, implementation="triton")
        assert first.key.is_deleted()
        assert first.value_norm.is_deleted()
    assert_same_bits(got, want)


@pytest.mark.slow
def test_layers_by_vmap():
    cache = jax.tree.map(lambda x: jnp.stack([x, x]), new(32, jnp.float32))
    key, value = (jnp.stack([x, 2 * x]) for x in tokens(3, 32, jnp.float32))

    def both(implementation):
        one = functools.partial(paged.append, implementation=implementation)
        return jax.jit(jax.vmap(one, in_axes=(0, 0, 0, None, None)))

    arguments = cache, key, value, jnp.asarray(TABLES), integers(1, 2, 15)
    with interpret_kernels():
        got = both("triton")(*arguments)
    assert_same_bits(jax.tree.map(as_bits, got), jax.tree.map(as_bits, both("xla")(*arguments)))


# The choice --------------------------------------------------------------------------------------


def test_without_a_gpu_triton_says_so():
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    cache, x = new(32, jnp.float32), tokens(1, 32, jnp.float32)
    message = "paged.append cannot run here: triton: needs an NVIDIA GPU of compute capability 8.0"
    with pytest.raises(NotImplementedError, match=message):
        paged.append(cache, *x, TABLES, integers(0, 0, 0), implementation="triton")
    paged.append(cache, *x, TABLES, integers(0, 0, 0))  # None chooses plain JAX


@pytest.mark.parametrize(
    ("kv_dtype", "head_dim", "words"),
    [
        ("auto", 64, "kv_dtype='auto' must store keys or values as codes or int8"),
        ("fp8_e4m3", 64, "kv_dtype='fp8_e4m3' must store keys or values as codes"),
        ("k8v4", 80, "head_dim=80 must be a power of two from 16 to 256"),
        ("turbo4", 80, "head_dim=80 must be a power of two from 16 to 256"),
        ("turbo4", 8, "head_dim=8 must be a power of two"),
        ("turbo4", 512, "head_dim=512 must be a power of two"),
    ],
)
def test_refusals(kv_dtype, head_dim, words):
    cache = paged.init_paged_cache(PAGES, 16, 3, head_dim, kv_dtype=kv_dtype, dtype=jnp.float32)
    x = tokens(1, head_dim, jnp.float32)
    x = tuple(jnp.clip(y, -99, 99) for y in x)
    with interpret_kernels():
        with pytest.raises(NotImplementedError, match=words):
            paged.append(cache, *x, TABLES, integers(0, 0, 0), implementation="triton")
        # Traced alone, which is when None chooses: it is not the kernel.
        jax.eval_shape(paged.append, cache, *x, jnp.asarray(TABLES), integers(0, 0, 0))


def test_arrays_whose_offsets_overflow_are_refused():
    key = jax.ShapeDtypeStruct((4, 1, 8, 128), jnp.bfloat16)
    tables = jax.ShapeDtypeStruct((4, 9), jnp.int32)
    refusals = []
    for pages in (65536, 65537):
        cache = jax.eval_shape(functools.partial(paged.init_paged_cache, pages, 64, 8, 128))
        with interpret_kernels():
            refusals.append(
                append_triton.append_unsupported(cache=cache, key=key, block_tables=tables)
            )
    assert refusals[0] is None
    assert "cannot be indexed" in refusals[1]


# Lowering ----------------------------------------------------------------------------------------


LOWERED = pairwise(
    page=[(128, 64), (16, 16), (256, 128)],
    dtype=DTYPES,
    count=[(64, 1), (4, 4096)],
    kv_dtype=("turbo4", *MIXES),
)


@pytest.mark.quick(first=2, slow=0)
@pytest.mark.parametrize(("page", "dtype", "count", "kv_dtype"), LOWERED)
def test_lowers_for_a_gpu(page, dtype, count, kv_dtype):
    (head_dim, page_size), (batch, count) = page, count
    cache = jax.eval_shape(
        functools.partial(
            paged.init_paged_cache, 99, page_size, 8, head_dim, dtype=dtype, kv_dtype=kv_dtype
        )
    )
    x = jax.ShapeDtypeStruct((batch, count, 8, head_dim), dtype)
    lengths = jax.ShapeDtypeStruct((batch,), jnp.int32)
    tables = jax.ShapeDtypeStruct((batch, 70), jnp.int32)
    text = lower_for_cuda(append_triton.append, cache, x, x, tables, lengths, lengths)
    assert text.count(kernel.NAME) >= 1
    assert "output_operand_alias" in text
