"""`implementation="mosaic_gpu"` of `turbo_attention` without a GPU: refusals, order, lowering.

And which tiles segments and bounds let it load: plain JAX, held to numpy's search.
No interpreter runs its matrix instructions: what it computes is checked on a GPU, in
`test_gpu_mosaic_attention.py`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from pallas_kernels.mosaic.hopper import segments
from tests.attention.attention_helpers import EXACT, SAS_2, SAS_E
from tests.grids import pairwise
from tests.kernels.kernel_helpers import OFFSETS, SEGMENTS, lower_for_cuda, modifiers_of
from turbojax import _device
from turbojax.attention.options import Options
from turbojax.attention.score_modifiers import NO_MODIFIERS
from turbojax.attention.turbo import mosaic_gpu
from turbojax.attention.turbo.operands import permute_tokens, quantize_queries
from turbojax.bounds import image_blocks

MODES = ("int8", "int8_fp8", "fp8")
SEES_ALL = Options(False, scale=0.1)


def refusal(config=tj.TurboConfig(), shape=(1, 8, 2, 64), modifiers=NO_MODIFIERS, of_values=None):
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    value = jax.ShapeDtypeStruct((*shape[:3], of_values or shape[3]), jnp.bfloat16)
    given = {"config": config, "options": SEES_ALL, "modifiers": modifiers}
    return mosaic_gpu.attention_unsupported(query=x, key=x, value=value, **given)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 200, 256])
def test_hopper_runs_it(mode, head_dim):
    assert refusal(tj.TurboConfig(mode=mode), (1, 8, 2, head_dim)) is None


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("config", "shape", "words"),
    [
        ({"mode": "float"}, (1, 8, 2, 64), "config.mode='float' must be an 8-bit mode"),
        ({"block_kv": 32}, (1, 8, 2, 64), r"config.block_kv=32 must be one of \(64, 128\)"),
        (
            {"block_kv": 256, "buffer_size": 256},
            (1, 8, 2, 64),
            r"config.block_kv=256 must be one of \(64, 128\)",
        ),
        ({"block_q": 32}, (1, 8, 2, 64), "config.block_q=32 must be a multiple of 64"),
        ({}, (1, 8, 2, 264), "head_dim=264 must be at most 256"),
    ],
)
def test_refusals_in_words(config, shape, words):
    with pytest.raises(AssertionError, match=words):
        assert refusal(tj.TurboConfig(**config), shape) is None


@pytest.mark.usefixtures("hopper")
def test_which_modifiers_it_has():
    every = ("query_offset", "key_offset", *SEGMENTS, "alibi_slopes", "bias", "sinks")
    assert refusal(modifiers=modifiers_of(every, 1, 8, 8, 2)) is None
    others = ("key_bounds", *OFFSETS, "alibi_slopes", "sinks")
    assert refusal(modifiers=modifiers_of(others, 1, 8, 8, 2)) is None
    words = "it has no key_bounds beside segments"
    assert words in refusal(modifiers=modifiers_of((*SEGMENTS, "key_bounds"), 1, 8, 8, 2))
    assert refusal(of_values=48) is None
    words = "head_dim=80 of values must be at most that of keys, 64"
    assert refusal(of_values=80) == words


def test_it_needs_hopper(monkeypatch):
    for capability in (None, 8.9, 10.0):
        monkeypatch.setattr(_device, "gpu_compute_capability", lambda c=capability: c)
        assert "needs an NVIDIA GPU of compute capability 9.0" in refusal()
    with _device.interpret_kernels():
        assert refusal() == "its kernel cannot be interpreted"


def test_order_of_keys():
    """Place ``8 h + 2 t + r`` of a group of 16 holds token ``4 t + 2 h + r``."""
    x = jnp.arange(48).reshape(1, 1, 48, 1)
    got = np.asarray(permute_tokens(x)).ravel()
    t, h, r = np.meshgrid(np.arange(4), np.arange(2), np.arange(2), indexing="ij")
    for group in range(3):
        place, token = (16 * group + x for x in (8 * h + 2 * t + r, 4 * t + 2 * h + r))
        np.testing.assert_array_equal(got[place], token)


FEATURES = {
    "plain": SEES_ALL,
    "causal": Options(True, scale=0.1),
    "window": Options(False, (100, 30), scale=0.1),
    "causal window": Options(True, (64, 64), scale=0.1),
    "soft cap": Options(True, scale=0.1, logits_soft_cap=5.0),
    "negative scale": Options(False, scale=-0.2),
}


def lower(
    config,
    head_dim=64,
    dtype=jnp.bfloat16,
    tokens=100,
    options=SEES_ALL,
    launch=None,
    modifiers=(),
    of_values=None,
):
    run = functools.partial(mosaic_gpu.attention, config=config, options=options, launch=launch)
    query, key, value = (
        jax.ShapeDtypeStruct((2, n, h, d), dtype)
        for n, h, d in ((tokens, 4, head_dim), (150, 2, head_dim), (150, 2, of_values or head_dim))
    )
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    given = modifiers_of(modifiers, 2, tokens, 150, 4)
    arrays = (query, key, value, lengths, lengths, given)
    return lower_for_cuda(lambda *x: run(*x[:-1], modifiers=x[-1]), *arrays)


LOWERED = pairwise(
    feature=list(FEATURES),
    softmax=[SAS_E, EXACT, SAS_2, tj.SAS(-3.0), tj.SAS(-87.0, "2")],
    head_dim=[128, 64, 8, 80, 256],
    tokens=[100, 1, 7, 128, 300],
    mode=list(MODES),
    dtype=[jnp.bfloat16, jnp.float16, jnp.float32],
    block_kv=[64, 128],
)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(
    ("feature", "softmax", "head_dim", "tokens", "mode", "dtype", "block_kv"),
    LOWERED[::3],
)
def test_it_lowers(feature, softmax, head_dim, tokens, mode, dtype, block_kv):
    """Each option, softmax, mode, dtype, head dim, block and number of queries, many in pairs."""
    config = tj.TurboConfig(
        mode=mode, softmax=softmax, block_q=128, block_kv=block_kv, buffer_size=block_kv
    )
    assert "mosaic_gpu" in lower(config, head_dim, dtype, tokens, FEATURES[feature])


MODIFIERS = pairwise(
    modifiers=[
        SEGMENTS,
        (*SEGMENTS, *OFFSETS),
        (*SEGMENTS, "sinks"),
        (*SEGMENTS, "alibi_slopes"),
        (*OFFSETS, "alibi_slopes"),
        ("query_offset", "sinks"),
        ("alibi_slopes", "sinks"),
        ("key_bounds",),
        ("key_bounds", *OFFSETS, "alibi_slopes", "sinks"),
        ("bias",),
        (*SEGMENTS, *OFFSETS, "bias", "alibi_slopes", "sinks"),
    ],
    feature=list(FEATURES),
    head_dim=[(128, 128), (64, 64), (192, 128), (80, 40)],
    mode=list(MODES),
    softmax=[SAS_E, EXACT, tj.SAS(-3.0)],
    dtype=[jnp.bfloat16, jnp.float32],
    out_dtype=[None, "float32"],
    block_kv=[64, 128],
)


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("modifiers", "feature", "head_dim", "mode", "softmax", "dtype", "out_dtype", "block_kv"),
    MODIFIERS[::3],
)
def test_modifiers_lower(modifiers, feature, head_dim, mode, softmax, dtype, out_dtype, block_kv):
    """Each of them, with all else, in pairs."""
    config = tj.TurboConfig(
        mode=mode, softmax=softmax, block_q=128, block_kv=block_kv, buffer_size=block_kv
    )
    options = dataclasses.replace(FEATURES[feature], out_dtype=out_dtype)
    head_dim, of_values = head_dim
    given = {"options": options, "modifiers": modifiers, "of_values": of_values}
    assert "mosaic_gpu" in lower(config, head_dim, dtype, 300, **given)


LAUNCHES = [
    (4, True, 64, 2, False),
    (2, False, 64, 2, True),
    (3, False, 128, 3, True),
    (2, True, 128, 2, True),
    (3, True, 64, 3, False),
]


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(("launch", "mode"), list(zip(LAUNCHES, MODES[1:] * 3, strict=False)))
def test_launches_lower(launch, mode):
    softmax = (EXACT, SAS_E)[launch[1]]
    config = tj.TurboConfig(mode=mode, softmax=softmax)
    options = {"options": Options(True, (70, 0), scale=0.1), "launch": mosaic_gpu.Launch(*launch)}
    assert "mosaic_gpu" in lower(config, **options)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_q", [64, 128])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_queries_are_quantized_once(head_dim, block_q, dtype):
    """By the kernel if it can, else in a launch of its own before it."""
    config = tj.TurboConfig(mode="fp8", softmax=EXACT, block_q=block_q)
    query = jax.ShapeDtypeStruct((2, 300, 4, head_dim), dtype)
    launch = mosaic_gpu.default_launch(query, config)
    # Tiles of 192 queries are no multiple of blocks of 128.
    assert launch.consumers == (3 if head_dim == 64 else 2)
    assert launch.quantizes == (dtype != jnp.float32 and (head_dim, block_q) != (64, 128))
    assert launch.tile == 128
    with pytest.MonkeyPatch.context() as patch:
        seen = []

        def counted(query, *rest):
            seen.append(query.shape)
            return quantize_queries(query, *rest)

        patch.setattr(mosaic_gpu, "quantize_queries", counted)
        assert "mosaic_gpu" in lower(config, head_dim, dtype, 300)
    assert len(seen) == (not launch.quantizes)


def test_which_queries_the_kernel_quantizes():
    def quantizes(head_dim=128, dtype=jnp.bfloat16, block_q=64, consumers=2):
        query = jax.ShapeDtypeStruct((2, 300, 4, head_dim), dtype)
        config = tj.TurboConfig(block_q=block_q)
        return mosaic_gpu.quantizes_queries(query, config, consumers)

    assert quantizes()
    assert quantizes(64, jnp.float16, 128)
    assert quantizes(64, consumers=3)
    assert not quantizes(64, block_q=128, consumers=3)
    assert not quantizes(dtype=jnp.float32)
    assert not quantizes(96)
    assert not quantizes(256)
    assert not quantizes(block_q=256)


def search(own, own_length, rows, other, other_length, columns):
    """For each tile what must be visited, and what every pair of is of one segment."""
    for begin in range(0, len(own), rows):
        mine = own[begin : min(begin + rows, own_length)]
        seen = np.isin(other[:other_length], mine)
        yield mine, np.flatnonzero(seen), columns


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(128, 64), (64, 128)])
def test_bounds_hold_all_that_is_visible(is_sorted, rows, columns):
    rng = np.random.default_rng(0)
    tokens, size = 700, 900
    own, other = (
        rng.integers(-2, 5, (3, n // 50 + 1)).repeat(50, 1)[:, :n] for n in (tokens, size)
    )
    if is_sorted:
        own, other = np.sort(own), np.sort(other)
    own_lengths, other_lengths = np.array([tokens, 300, 0]), np.array([size, 70, 500])
    got = segments.bounds(
        jnp.asarray(own, jnp.int32),
        jnp.asarray(own_lengths, jnp.int32),
        rows,
        jnp.asarray(other, jnp.int32),
        jnp.asarray(other_lengths, jnp.int32),
        columns,
    )
    assert got.shape == (3, 4, -(-tokens // rows))
    for b in range(3):
        rest = search(own[b], own_lengths[b], rows, other[b], other_lengths[b], columns)
        for tile, (mine, seen, _) in enumerate(rest):
            start, stop, full_start, full_stop = np.asarray(got[b, :, tile])
            if len(seen):
                assert start <= seen[0]
                assert stop > seen[-1]
                if is_sorted:  # no tile more than needed, but where it has ids of more segments
                    assert seen[0] - start < columns
                    assert stop - seen[-1] <= columns
            elif is_sorted and not len(mine):
                assert stop <= start
            inside = other[b, full_start : min(full_stop, other_lengths[b])]
            assert np.isin(inside, mine).all()
            if full_start < full_stop:
                assert len(set(mine)) == 1


def test_packed_sequences_cost_what_is_visible():
    """Eight segments of 1,024: each tile walks over its own segment, and masks nothing."""
    ids = jnp.asarray(np.arange(8192) // 1024, jnp.int32)[None]
    lengths = jnp.asarray([8192], jnp.int32)
    start, stop, full_start, full_stop = segments.bounds(ids, lengths, 128, ids, lengths, 128)[0]
    own = np.arange(64) // 8 * 1024
    for x in (start, full_start):
        np.testing.assert_array_equal(x, own)
    for x in (stop, full_stop):
        np.testing.assert_array_equal(x, own + 1024)


def test_the_first_full_tiles_are_those_that_follow_each_other():
    ids = jnp.asarray(np.repeat([0, 0, 1, 0], 64), jnp.int32)[None]
    lengths = jnp.asarray([256], jnp.int32)
    found = segments.bounds(ids, lengths, 64, ids, lengths, 64)[0]
    np.testing.assert_array_equal(found[:, 0], [0, 256, 0, 128])
    np.testing.assert_array_equal(found[:, 2], [128, 192, 128, 192])


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize("shift", [None, 200])
@pytest.mark.parametrize(("before", "after"), [(None, None), (None, 0), (300, 0)])
def test_tiles_with_most_to_do_come_first(shift, before, after):
    rng = np.random.default_rng(1)
    own = jnp.asarray(np.sort(rng.integers(0, 4, (2, 1100)), axis=1), jnp.int32)
    lengths = jnp.asarray([1100, 500], jnp.int32)
    bounds = segments.bounds(own, lengths, 128, own, lengths, 64)
    shifts = None if shift is None else jnp.full((2,), shift, jnp.int32)
    order = np.asarray(segments.order(bounds, 128, shifts, before, after))
    np.testing.assert_array_equal(np.sort(order), np.arange(18))
    start, stop = np.asarray(bounds[:, 0]), np.asarray(bounds[:, 1])
    first = np.arange(9) * 128 + (shift or 0)
    stop = stop if after is None else np.minimum(stop, first + 128 + after)
    start = start if before is None else np.maximum(start, first - before)
    counts = np.maximum(stop - start, 0).ravel()[order]
    assert (np.diff(counts) <= 0).all()


@pytest.mark.parametrize("is_image", [True, False])
@pytest.mark.parametrize("of_keys", [False, True])
def test_tiles_of_bounds(of_keys, is_image):
    """All that is visible, no tile more than needed in a row of images, and full tiles are full."""
    tokens, size, rows, columns = 700, 700, 128, 64
    rng = np.random.default_rng(4)
    if is_image:
        types = np.zeros((3, tokens), np.int32)
        types[0, 70:400] = types[1, 600:] = 1
        x = image_blocks(jnp.asarray(types))
    else:
        x = tuple(jnp.asarray(rng.integers(0, size + 1, (2, 3, tokens)), jnp.int32))
    lengths = np.array([tokens, 300, 0])
    given = (x, jnp.asarray(lengths, jnp.int32), rows, size, columns)
    found = np.asarray((segments.of_bound_keys if of_keys else segments.of_key_bounds)(*given))
    start, end = (np.asarray(a)[:, :, None] for a in x)
    seen = (start <= np.arange(size)) & (np.arange(size) < end)
    seen &= (np.arange(tokens) < lengths[:, None])[:, :, None]
    real = np.broadcast_to((np.arange(tokens) < lengths[:, None])[:, :, None], seen.shape)
    if of_keys:
        seen, real, rows, columns = (*(np.swapaxes(a, 1, 2) for a in (seen, real)), columns, rows)
    assert found.shape == (3, 4, -(-seen.shape[1] // rows))
    for b in range(3):
        for tile, (first, stop, full_first, full_stop) in enumerate(found[b].T):
            mine = slice(tile * rows, (tile + 1) * rows)
            some = np.flatnonzero(seen[b, mine].any(0))
            if len(some):
                assert first <= some[0]
                assert stop > some[-1]
                if is_image:
                    assert some[0] - first < columns
                    assert stop - some[-1] <= columns
            else:
                assert stop <= first
            inside = slice(full_first, full_stop)
            assert (seen | ~real)[b, mine, inside].all()
    if is_image and not of_keys:  # the second tile of queries is within the first image
        np.testing.assert_array_equal(found[0, :, 1], [0, 448, 0, 384])
