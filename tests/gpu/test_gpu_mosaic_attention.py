"""`turbo_attention` through Mosaic GPU on a Hopper GPU, against the definition in XLA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests.attention.attention_helpers import EXACT, FLOAT, SAS_2, SAS_E, attend, tensors
from tests.gpu.gpu_helpers import CASES, GRID, error
from tests.gpu.gpu_helpers import EIGHT_BIT_MODES as MODES
from turbojax import _device
from turbojax.attention.options import Options
from turbojax.attention.turbo import mosaic_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_device.needs_hopper() is not None, reason=str(_device.needs_hopper())),
]

kernel = functools.partial(attend, implementation="mosaic_gpu", return_residual=True)
xla = functools.partial(attend, implementation="xla", return_residual=True)


def check(q, k, v, config, **options):
    """Near the definition, and no farther from exact attention than it.

    A hardware exponential lies within 1.2e-3 of SAS's, and another value of a weight may round to
    the next code: 1/119 of the largest weight of a row, or 6 % of an e4m3 one. With blocks of 64,
    e4m3 weights and the exact softmax the kernel takes the maximum of two blocks at once, not of
    each, and weights of the first of them round at other places: two roundings are sqrt(2) times
    one apart.
    """
    options = {n: jnp.asarray(x) if "lengths" in n else x for n, x in options.items()}
    got = kernel(q, k, v, config=config, **options)
    assert (got[0].dtype, got[0].shape) == (q.dtype, q.shape)
    want = xla(q, k, v, config=config, **options)
    exact = xla(q, k, v, config=FLOAT, **options)
    near = 1e-3 if config.mode == "int8" and config.softmax == EXACT else 1e-2
    has_pairs = config.mode != "int8" and config.softmax == EXACT and config.block_kv == 64
    apart = 2**0.5 if has_pairs else 0.0
    for ours, theirs, truth, bound, twice in zip(
        got, want, exact, (near, 1e-3), (apart, 0.0), strict=True
    ):
        finite = np.asarray(truth, np.float64)[np.isfinite(np.asarray(truth, np.float64))]
        scale = np.sqrt(np.mean(np.square(finite))) if finite.size else 0.0
        own = float(jnp.finfo(ours.dtype).eps) * scale
        assert error(ours, theirs) <= max(bound * scale, twice * error(theirs, truth)) + own
        assert error(ours, truth) <= 1.25 * error(theirs, truth) + 1e-3 * scale + own


@pytest.mark.quick(8)
@pytest.mark.parametrize(("case", "mode", "softmax"), GRID)
def test_equals_the_definition(case, mode, softmax):
    options = dict(CASES[case])
    q, k, v = tensors(sum(map(ord, case)), *options.pop("shape"))
    check(q, k, v, tj.TurboConfig(mode=mode, softmax=softmax), **options)


@pytest.mark.quick(4)
@pytest.mark.parametrize(("block_q", "block_kv"), [(64, 64), (128, 64), (64, 128), (256, 128)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_block_sizes(block_q, block_kv, head_dim):
    q, k, v = tensors(1, 1, 300, 390, 2, 1, head_dim)
    for mode, softmax in zip(MODES, (SAS_E, EXACT, SAS_2), strict=True):
        sizes = {"block_q": block_q, "block_kv": block_kv, "buffer_size": block_kv}
        check(q, k, v, tj.TurboConfig(mode=mode, softmax=softmax, **sizes), is_causal=True)


@pytest.mark.parametrize("softmax", [tj.SAS(-3.0), tj.SAS(-20.0, "2")], ids=["-3", "-20"])
@pytest.mark.parametrize("mode", MODES)
def test_thresholds(mode, softmax):
    q, k, v = tensors(2, 1, 170, 300, 2, 1, 64)
    check(q, k, v, tj.TurboConfig(mode=mode, softmax=softmax), is_causal=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
def test_half_precision_inputs(mode, dtype):
    q, k, v = tensors(2, 1, 170, 130, 2, 1, 64, dtype)
    check(q, k, v, tj.TurboConfig.paper(mode=mode), is_causal=True)


@pytest.mark.parametrize("mode", MODES)
def test_padding_queries_change_nothing(mode):
    q, k, v = tensors(3, 2, 300, 300, 4, 2, 64)
    config = tj.TurboConfig.paper(mode=mode)
    lengths = jnp.array([300, 130])
    options = {"key_value_seq_lengths": lengths, "query_seq_lengths": lengths, "is_causal": True}
    out, residual = kernel(q, k, v, config=config, **options)
    beyond = (jnp.arange(300)[None] >= lengths[:, None])[:, :, None, None]
    spoiled = [jnp.where(beyond, jnp.nan, x) for x in (q, k, v)]
    again = kernel(*spoiled, config=config, **options)
    np.testing.assert_array_equal(out, again[0])
    np.testing.assert_array_equal(residual, again[1])
    assert np.all(np.asarray(out[1, 130:]) == 0)
    assert np.all(np.isneginf(residual[1, 130:]))


@pytest.mark.quick(5)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("spoiled", ["query", "key", "value"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("softmax", [EXACT, SAS_E, SAS_2], ids=["exact", "e", "2"])
def test_what_is_not_finite_reaches_the_rows_it_reaches_in_the_reference(
    mode, spoiled, bad, softmax
):
    names = ("query", "key", "value")
    operands = dict(zip(names, tensors(4, 1, 300, 300, 2, 1, 64), strict=True))
    operands[spoiled] = operands[spoiled].at[0, 130, 0, 5].set(bad)
    config = tj.TurboConfig(mode=mode, softmax=softmax)
    for options in ({"is_causal": True}, {"local_window_size": (70, 20)}):
        got = kernel(*operands.values(), config=config, **options)
        want = xla(*operands.values(), config=config, **options)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        assert np.isnan(want[0]).any()


@pytest.mark.parametrize("mode", MODES)
def test_transforms_and_repetition_give_the_same_bits(mode):
    q, k, v = tensors(6, 4, 130, 130, 4, 2, 64)
    config = tj.TurboConfig.paper(mode=mode)
    run = functools.partial(
        tj.turbo_attention, config=config, is_causal=True, implementation="mosaic_gpu"
    )
    want = run(q, k, v)
    np.testing.assert_array_equal(run(q, k, v), want)
    np.testing.assert_array_equal(jax.jit(run)(q, k, v), want)
    split = [x.reshape(2, 2, *x.shape[1:]) for x in (q, k, v)]
    _, scanned = jax.lax.scan(lambda carry, x: (carry, run(*x)), 0, split)
    np.testing.assert_array_equal(scanned.reshape(want.shape), want)


@pytest.mark.quick(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_launches_agree(mode, head_dim):
    """More tiles than multiprocessors; float32 sums in another order may round a weight apart."""
    q, k, v = tensors(7, 4, 700, 700, 16, 2, head_dim, jnp.bfloat16)
    lengths = jnp.array([700, 130, 699, 64], jnp.int32)
    run = functools.partial(
        mosaic_gpu.attention,
        *(q, k, v, lengths, lengths),
        config=tj.TurboConfig.paper(mode=mode),
        options=Options(True, (400, 0), scale=0.1),
    )
    want = run()
    block = 64 if mode == "int8" else 128
    launches = [(2, False, 64), (3, False, block), (4, True, 64), (2, True, block)]
    launches += [(4, False, block, 3)] if head_dim == 64 else []
    for launch in launches:
        for a, b in zip(run(launch=mosaic_gpu.Launch(*launch)), want, strict=True):
            finite = np.isfinite(np.asarray(b, np.float32))
            np.testing.assert_array_equal(np.isfinite(np.asarray(a, np.float32)), finite)
            # Weights in e4m3 round apart where a tile of two blocks has another maximum than each.
            near = 3e-3 if mode == "int8" else 1e-2
            assert error(a, b) <= near * np.std(np.asarray(b, np.float32)[finite])


@pytest.mark.quick(5)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("head_dim", "changes"),
    [
        (64, {}),
        (64, {"consumers": 2, "ahead": True}),
        (64, {"consumers": 3, "ahead": True, "tile": 64}),
        (128, {}),
        (128, {"ahead": True, "tile": 64}),
        (256, {}),
    ],
    ids=str,
)
def test_turns_change_no_bit(mode, head_dim, changes):
    """More tiles than multiprocessors, of few and many keys, and of none."""
    q, k, v = tensors(7, 4, 700, 700, 16, 2, head_dim, jnp.bfloat16)
    lengths = jnp.array([700, 130, 0, 64], jnp.int32)
    config = tj.TurboConfig(mode=mode)
    run = functools.partial(
        mosaic_gpu.attention,
        *(q, k, v, lengths, lengths),
        config=config,
        options=Options(True, (400, 0), scale=0.1),
    )
    launch = mosaic_gpu.default_launch(q, config)._replace(**changes)
    without, within = (run(launch=launch._replace(in_turns=x)) for x in (False, True))
    for a, b in zip(without, within, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.quick(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize(
    ("head_dim", "block_q", "consumers"), [(64, 64, 3), (64, 128, 2), (128, 64, 2), (128, 128, 2)]
)
def test_queries_quantized_within_the_kernel_are_the_same(
    mode, dtype, head_dim, block_q, consumers
):
    """To the bit, with more tiles than multiprocessors, halves of a scale, and a NaN."""
    q, k, v = tensors(9, 3, 700, 300, 32, 8, head_dim, dtype)
    ties = np.random.default_rng(9).integers(-238, 239, (700, head_dim)) * 1.5
    ties[::64, 0] = 119 * 3
    q = q.at[0, :, 0].set(ties.astype(dtype)).at[1, 130, 3, 5].set(jnp.nan)
    lengths = jnp.array([700, 650, 70], jnp.int32), jnp.array([300, 300, 177], jnp.int32)
    run = functools.partial(
        mosaic_gpu.attention,
        *(q, k, v, *lengths),
        config=tj.TurboConfig(mode=mode, block_q=block_q),
        options=Options(True, scale=0.01),
    )
    launch = mosaic_gpu.Launch(4, False, 64, consumers)
    for a, b in zip(run(launch=launch), run(launch=launch._replace(quantizes=True)), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.quick(6)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("size", [1, 64, 65, 190, 450])
def test_tiles_of_two_blocks(mode, head_dim, size):
    """Whatever number of blocks there is, and a NaN in one of them, which some rows do not see."""
    q, k, v = tensors(10, 2, size, size, 4, 2, head_dim, jnp.bfloat16)
    config = tj.TurboConfig(mode=mode, softmax=EXACT)
    for options in ({"is_causal": True}, {"local_window_size": (70, 20), "is_causal": True}):
        check(q, k, v, config, **options)
        bad = k.at[:, size // 2, 0, 3].set(jnp.nan)
        got = kernel(q, bad, v, config=config, **options)
        want = xla(q, bad, v, config=config, **options)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(np.isnan(a), np.isnan(b))


@pytest.mark.quick(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cap", [3.0, 50.0])
def test_soft_caps(mode, cap):
    q, k, v = tensors(11, 1, 300, 300, 4, 2, 128, jnp.bfloat16)
    check(q, k, v, tj.TurboConfig(mode=mode), logits_soft_cap=cap, is_causal=True)
    check(q, k, v, tj.TurboConfig(mode=mode, softmax=EXACT), logits_soft_cap=cap, scale=1.0)


@pytest.mark.parametrize("mode", MODES)
def test_long_contexts(mode):
    """128k keys: the error does not grow with the length, also where all values have one sign."""
    rng = np.random.default_rng(8)
    q = jnp.asarray(rng.normal(size=(1, 64, 2, 128)), jnp.bfloat16)
    k = jnp.asarray(rng.normal(size=(1, 2**17, 1, 128)), jnp.bfloat16)
    v = jnp.asarray(np.abs(rng.normal(size=k.shape)) + 1, jnp.bfloat16)
    exact, _ = xla(q, k, v, config=FLOAT)
    for block_kv in (64, 128):
        config = tj.TurboConfig(mode=mode, softmax=EXACT, block_kv=block_kv, buffer_size=block_kv)
        out, _ = kernel(q, k, v, config=config)
        theirs, _ = xla(q, k, v, config=config)
        assert error(out, exact) <= 2 * error(theirs, exact) + 2e-3 * float(jnp.max(exact))
