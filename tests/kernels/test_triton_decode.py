"""What is the Triton decode kernel's own: refusals, launches, real models' heads, lowering.

Numerics that every implementation shares are in `test_decode.py`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from benchmarks.shapes import MODELS
from tests.attention.decode_helpers import (
    SOFTMAXES,
    assert_matches_reference,
    decode,
    filled,
    lengths_of,
    queries,
    under,
)
from tests.grids import pairwise
from tests.kernels.kernel_helpers import lower_for_cuda
from turbojax._device import interpret_kernels
from turbojax.attention.options import Options
from turbojax.caches.progressive import decode_triton as triton

TAKEN = [name for name, heads in MODELS.items() if heads.query // heads.kv <= 64]


@pytest.mark.optimized
@pytest.mark.fuzz
def test_odd_groups_and_the_largest_head_dim():
    cache = under(filled((), (150,), (3,), 2, 256))
    assert_matches_reference(queries(1, 2, 1, 6, 256), cache)


def test_the_only_model_left_out_has_too_many_queries():
    """71 heads share one KV head: the next test."""
    assert [h.query for name, h in MODELS.items() if name not in TAKEN] == [71]


@pytest.mark.slow
def test_too_many_queries_are_refused_in_words():
    cache = under(filled((), (70,), (3,), 1, 64))
    with pytest.raises(NotImplementedError, match="71 heads per KV head must be at most 64"):
        decode(queries(1, 3, 1, 71, 64), cache, "triton")


@pytest.mark.slow
def test_edges():
    """An empty sequence, one token, exactly one block, fewer tokens than queries, padding."""
    cache = under(filled((), (0, 1, 64, 65), (0, 0, 0, 0), 2, 64))
    query = queries(8, 4, 4, 4, 64)
    assert_matches_reference(query, cache)
    assert_matches_reference(query, cache, query_seq_lengths=lengths_of([0, 1, 1, 8]))


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(
    ("mode", "softmax", "options"),
    [
        ("int8", "sas-e", {"local_window_size": (30, 0)}),
        ("float", "exact", {}),
    ],
)
def test_nan_reaches_exactly_what_it_reaches_in_the_reference(mode, softmax, options):
    """In a query, in a block of keys, and in a buffer of values."""
    cache = under(filled((), (150, 140), (0, 0), 2, 64), mode, SOFTMAXES[softmax])
    key_scale, value_scale = cache.key.block_scale.copy(), cache.value.buffer_scale.copy()
    key_scale[0, 0, 1] = value_scale[1, 1] = np.nan
    cache = dataclasses.replace(
        cache,
        key=dataclasses.replace(cache.key, block_scale=key_scale),
        value=dataclasses.replace(cache.value, buffer_scale=value_scale),
    )
    query = queries(2, 5, 2, 6, 64)
    query[1, 0, 0, 0] = np.nan
    got = decode(query, cache, "triton", **options)
    want = decode(query, cache, "xla", **options)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    assert not np.isnan(got[0]).all()


@pytest.mark.slow
def test_splits_do_not_matter(monkeypatch):
    """Blocks over one program or many: the same splits of the softmax, so nearly the same bits."""
    cache = under(filled((), (700, 333), (0, 0), 2, 64))
    query, results = queries(1, 6, 2, 4, 64), []
    for programs in (1, 1000):
        monkeypatch.setattr(triton, "_ENOUGH_PROGRAMS", programs)
        triton.decode.clear_cache()
        with interpret_kernels():
            results.append(tj.decode(query, cache, implementation="triton"))
    triton.decode.clear_cache()
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], atol=1e-6)


# Lowering ----------------------------------------------------------------------------------------

WIDTHS = {
    "4 bits": {},
    "3 bits": {"key_bits": 3, "value_bits": 3},
    "2 bits": {"key_bits": 2, "value_bits": 2},
    "3 and 2": {"key_bits": 3, "num_low_bit_key_heads": 1, "value_bits": 2},
    "4 and 3": {"num_low_bit_value_heads": 1, "low_bits": 3},
}


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(
    ("name", "mode", "dim"),
    pairwise(name=list(WIDTHS)[::-1], mode=["int8", "float"], dim=[64, 96, 128, 256])[::3],
)
def test_lowers_for_cuda(name, mode, dim):
    config = tj.TurboConfig(mode=mode, softmax="exact" if dim == 64 else tj.SAS(), **WIDTHS[name])
    cache = jax.eval_shape(lambda: tj.init_cache(2, 4096, 2, dim, config=config))
    options = Options(True, scale=0.1)
    if dim == 96:
        options = Options(True, (100, 0), scale=0.1, logits_soft_cap=5.0)
    call = functools.partial(
        triton.decode,
        options=options,
    )
    query = jax.ShapeDtypeStruct((2, 1 if dim == 128 else 3, 8, dim), jnp.bfloat16)
    text = lower_for_cuda(call, query, cache, jax.ShapeDtypeStruct((2,), jnp.int32))
    assert "turbojax_decode" in text
