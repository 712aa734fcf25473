"""Many queries to pages compiled on Hopper: against the oracle and plain JAX, and equal bits."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention.paged_helpers import (
    SHAPES,
    attend,
    check_nan,
    check_neighbours_and_places,
    equal,
    filled,
    normal,
    options_of,
)
from tests.attention.paged_prompt_helpers import (
    HEAD_DIMS,
    KINDS,
    LARGE,
    OPTIONS,
    assert_right,
    check_cuts,
    large,
    mosaic,
)
from tests.gpu.gpu_helpers import assert_near, on_hopper
from tests.grids import pairwise

pytestmark = [pytest.mark.gpu, on_hopper]


SIXTEEN = (jnp.bfloat16, jnp.float16)


@pytest.mark.quick(9)
@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    pairwise(name=[n for n in SHAPES if SHAPES[n][2] in HEAD_DIMS], kind=KINDS, dtype=SIXTEEN),
)
def test_equals_the_oracle(name, kind, dtype):
    lengths, kv_heads, dim, heads, count = SHAPES[name]
    cache, tables = filled(kind, lengths, kv_heads, dim, dtype=dtype)
    query = normal(3, (len(lengths), count, heads, dim), dtype)
    assert_right(query, cache, tables, lengths, mosaic)


@pytest.mark.quick(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["scale", "negative scale", "soft cap", "window", "padding"])
def test_options(name, kind):
    (query, cache, tables, lengths), options = options_of(name, kind, jnp.bfloat16, 64)
    if "scale" in options:  # keys in 16 bits: the bound would be no small one
        options["scale"] /= 5
    assert_right(query, cache, tables, lengths, mosaic, **options)


@pytest.mark.quick(7)
@pytest.mark.parametrize(
    ("name", "kind", "option"), pairwise(name=list(LARGE), kind=KINDS, option=list(OPTIONS))
)
def test_full_sizes(name, kind, option):
    """Twice the same bits, and plain JAX's numbers but for rounding."""
    *arguments, counts = large(name, kind)
    given = {**OPTIONS[option], "query_seq_lengths": counts, "return_residual": True}
    call = functools.partial(attend, *arguments, **given)
    got = call(implementation="mosaic_gpu")
    equal(call(implementation="mosaic_gpu"), got)
    want = call(implementation="xla")
    is_8_bit = kind == "fp8_e4m3"
    given = (2.0**-4, 0.08) if is_8_bit else (2.0**-7,)
    assert_near(got[0], want[0], jnp.bfloat16, *given)
    # Of a row that sees few tokens, rounding the query to e4m3 alone moves one by 0.031.
    assert_near(got[1], want[1], jnp.float32, *((1e-2, 0.05) if is_8_bit else (1e-3,)))


@pytest.mark.quick(5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_what_is_not_finite_reaches_what_attends_to_it(head_dim, kind):
    check_nan(mosaic, kind, jnp.bfloat16, head_dim)


@pytest.mark.quick(3)
@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_and_places_do_not_matter(kind):
    check_neighbours_and_places(mosaic, kind, jnp.bfloat16, 128)


@pytest.mark.quick(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", ["plain", "window"])
def test_chunks_do_not_matter(option, kind):
    check_cuts(
        functools.partial(attend, implementation="mosaic_gpu"), kind, options=OPTIONS[option]
    )


@pytest.mark.quick(3)
@pytest.mark.parametrize("kind", KINDS)
def test_one_sequence_after_the_other(kind, monkeypatch):
    """Where expanded pages would take too much memory: the same bits."""
    from turbojax.attention.options import Options
    from turbojax.caches.paged import mosaic_prompt

    query, cache, tables, lengths, counts = large("chunks of two", kind)
    arrays = query, cache, jnp.asarray(tables), jnp.asarray(lengths), jnp.asarray(counts)
    want = mosaic_prompt.attend(*arrays, options=Options(True, scale=0.1))
    monkeypatch.setattr(mosaic_prompt, "_MOST_EXPANDED", 1)
    got = mosaic_prompt.attend(*arrays, options=Options(True, scale=0.1001))
    assert_near(got[0], want[0], jnp.bfloat16, 2.0**-6)
    again = mosaic_prompt.attend.__wrapped__(*arrays, options=Options(True, scale=0.1))
    equal(again, want)


@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("part", [None, 128])
def test_programs_go_on_past_tiles_that_see_nothing(part, kind):
    """Several tiles a program, some of empty sequences and some of padding alone."""
    from turbojax.attention.options import Options
    from turbojax.caches.paged import mosaic_prompt

    lengths = [290 if b % 4 == 0 else 3 * (b % 4 == 1) for b in range(64)]
    cache, tables = filled(kind, tuple(lengths), 2, 128, 32, dtype=jnp.bfloat16)
    query = normal(5, (64, 200, 8, 128), jnp.bfloat16)
    counts = jnp.minimum(jnp.asarray(lengths, jnp.int32), 200)
    arrays = query, cache, jnp.asarray(tables), jnp.asarray(lengths, jnp.int32), counts
    launch = mosaic_prompt.Launch(part, 2)
    got = mosaic_prompt.attend(*arrays, options=Options(True, scale=0.1), launch=launch)
    want = attend(
        *arrays[:4], scale=0.1, query_seq_lengths=counts, implementation="xla"
    )  # fmt: skip
    if kind == "fp8_e4m3":  # a weight has four bits, and few are summed
        assert_near(got[0], want, jnp.bfloat16, 2.0**-4, 0.08)
    else:
        assert_near(got[0], want, jnp.bfloat16, 2.0**-7)


def test_what_is_out_of_range_is_nan_under_jit():
    lengths = np.asarray((1100, 33), np.int32)
    cache, tables = filled("auto", (1100, 33), head_dim=128, dtype=jnp.bfloat16)
    query = normal(8, (2, 50, 4, 128), jnp.bfloat16)
    call = functools.partial(attend, implementation="mosaic_gpu")
    want = call(query, cache, tables, lengths)
    for broken in (-1, cache.num_pages, 2**31 - 1):
        got = call(query, cache, tables.at[0, 40].set(broken), lengths)
        equal(got[1], want[1])
        assert np.isnan(np.asarray(got[0].astype(jnp.float32))).all()
