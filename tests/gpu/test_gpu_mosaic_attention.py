"""`turbo_attention` through upstream Triton and Mosaic GPU, compiled, against the definition."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests import oracles
from tests.attention.attention_helpers import (
    EXACT,
    FLOAT,
    SAS_2,
    SAS_E,
    assert_agrees,
    attend,
    oracle_softmax,
    tensors,
)
from tests.gpu.gpu_helpers import (
    CASES,
    EIGHT_BIT_MODES,
    GRID,
    assert_equal,
    assert_same_nan,
    error,
    on_hopper,
)
from turbojax.attention.options import Options
from turbojax.attention.turbo import mosaic_gpu

pytestmark = pytest.mark.gpu

_MISSING = [name for name in ("jax_triton", "triton") if importlib.util.find_spec(name) is None]
_REASON = f"not installed: {_MISSING}; pip install 'jax-triton>=0.3.1'"
with_triton = pytest.mark.skipif(bool(_MISSING), reason=_REASON)
IMPLEMENTATIONS = [
    pytest.param("jax_triton", marks=with_triton),
    pytest.param("mosaic_gpu", marks=on_hopper),
]
MODES = pytest.mark.parametrize("mode", EIGHT_BIT_MODES)

xla = functools.partial(attend, implementation="xla", return_residual=True)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


@pytest.fixture
def kernel(implementation):
    return functools.partial(attend, implementation=implementation, return_residual=True)


@pytest.fixture
def check(implementation, kernel):
    """A function that holds a call to what its implementation promises."""
    promise = near_the_oracle if implementation == "jax_triton" else near_the_definition

    def run(q, k, v, config, **options):
        options = {n: jnp.asarray(x) if "lengths" in n else x for n, x in options.items()}
        got = kernel(q, k, v, config=config, **options)
        assert (got[0].dtype, got[0].shape) == (q.dtype, q.shape)
        promise(got, q, k, v, config, **options)

    return run


def near_the_oracle(found, q, k, v, config, **options):
    """Within its bound where products are exact.

    An e4m3 unit keeps 13 bits after the largest of the 32 terms of an instruction, and truncates
    them and what it accumulates: 33 * 2**-13 of the largest weight times the largest value for
    each instruction, and a row sum is at least its largest weight. For e4m3 scores no such bound
    is of use; there the error against exact attention may not be larger than XLA's.
    """
    out, residual = found
    if config.mode == "fp8":
        want = xla(q, k, v, config=config, **options)
        exact = xla(q, k, v, config=FLOAT, **options)
        for got, theirs, truth in zip(found, want, exact, strict=True):
            truth = np.asarray(truth, np.float64)
            scale = np.max(np.abs(truth), where=np.isfinite(truth), initial=0)
            assert error(got, truth) <= 1.25 * error(theirs, truth) + 1e-3 * scale
        return
    want = oracles.attention(
        q,
        k,
        v,
        mode=config.mode,
        softmax=oracle_softmax(config.softmax),
        block_q=config.block_q,
        block_kv=config.block_kv,
        **options,
    )
    if config.mode == "int8":
        assert_agrees(out, residual, want, v)
        return
    coarse = config.block_kv / 32 * 33 * 2.0**-13 * float(jnp.max(jnp.abs(v)))
    own = 0 if q.dtype == jnp.float32 else float(jnp.finfo(q.dtype).eps)
    bound = want.out_tolerance + own * np.abs(want.out) + coarse
    assert np.all(np.abs(np.asarray(out, np.float64) - want.out) <= bound)
    finite = np.isfinite(want.residual)
    np.testing.assert_array_equal(np.isfinite(residual), finite)
    difference = np.abs(np.asarray(residual, np.float64)[finite] - want.residual[finite])
    assert np.all(difference <= want.residual_tolerance[finite])


def near_the_definition(got, q, k, v, config, **options):
    """Near it, and no farther from exact attention than it.

    A hardware exponential lies within 1.2e-3 of SAS's, and another value of a weight may round to
    the next code: 1/119 of the largest weight of a row, or 6 % of an e4m3 one. With blocks of 64,
    e4m3 weights and the exact softmax the kernel takes the maximum of two blocks at once, not of
    each, and weights of the first of them round at other places: two roundings are sqrt(2) times
    one apart.
    """
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


# What both promise -------------------------------------------------------------------------------


@pytest.mark.quick(19)
@pytest.mark.parametrize(("case", "mode", "softmax"), GRID)
def test_equals_the_definition(check, case, mode, softmax):
    options = dict(CASES[case])
    q, k, v = tensors(sum(map(ord, case)), *options.pop("shape"))
    check(q, k, v, tj.TurboConfig(mode=mode, softmax=softmax), **options)


BLOCKS = [
    pytest.param(name, *sizes, marks=mark)
    for name, mark, first in (
        ("jax_triton", with_triton, (16, 32)),
        ("mosaic_gpu", on_hopper, (64, 64)),
    )
    for sizes in (first, (128, 64), (64, 128), (256, 128))
]


@pytest.mark.quick(9)
@pytest.mark.parametrize(("implementation", "block_q", "block_kv"), BLOCKS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_block_sizes(check, block_q, block_kv, head_dim):
    q, k, v = tensors(1, 1, 300, 390, 2, 1, head_dim)
    for mode, softmax in zip(EIGHT_BIT_MODES, (SAS_E, EXACT, SAS_2), strict=True):
        sizes = {"block_q": block_q, "block_kv": block_kv, "buffer_size": block_kv}
        check(q, k, v, tj.TurboConfig(mode=mode, softmax=softmax, **sizes), is_causal=True)


@MODES
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "f16"])
def test_half_precision_inputs(check, mode, dtype):
    q, k, v = tensors(2, 1, 170, 130, 2, 1, 64, dtype)
    check(q, k, v, tj.TurboConfig.paper(mode=mode), is_causal=True)


@MODES
def test_padding_queries_change_nothing(kernel, mode):
    q, k, v = tensors(3, 2, 300, 300, 4, 2, 64)
    config = tj.TurboConfig.paper(mode=mode)
    lengths = jnp.array([300, 130])
    options = {"key_value_seq_lengths": lengths, "query_seq_lengths": lengths, "is_causal": True}
    out, residual = kernel(q, k, v, config=config, **options)
    beyond = (jnp.arange(300)[None] >= lengths[:, None])[:, :, None, None]
    spoiled = [jnp.where(beyond, jnp.nan, x) for x in (q, k, v)]
    assert_equal(kernel(*spoiled, config=config, **options), (out, residual))
    assert np.all(np.asarray(out[1, 130:]) == 0)
    assert np.all(np.isneginf(residual[1, 130:]))


@pytest.mark.quick(22)
@MODES
@pytest.mark.parametrize("spoiled", ["query", "key", "value"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("softmax", [EXACT, SAS_E, SAS_2], ids=["exact", "e", "2"])
def test_what_is_not_finite_reaches_the_rows_it_reaches_in_the_reference(
    kernel, mode, spoiled, bad, softmax
):
    names = ("query", "key", "value")
    operands = dict(zip(names, tensors(4, 1, 300, 300, 2, 1, 64), strict=True))
    operands[spoiled] = operands[spoiled].at[0, 130, 0, 5].set(bad)
    config = tj.TurboConfig(mode=mode, softmax=softmax)
    for options in ({"is_causal": True}, {"local_window_size": (70, 20)}):
        want = xla(*operands.values(), config=config, **options)
        assert_same_nan(kernel(*operands.values(), config=config, **options), want)
        assert np.isnan(want[0]).any()


@MODES
def test_transforms_and_repetition_give_the_same_bits(implementation, mode):
    q, k, v = tensors(6, 4, 130, 130, 4, 2, 64)
    run = functools.partial(
        tj.turbo_attention,
        config=tj.TurboConfig.paper(mode=mode),
        is_causal=True,
        implementation=implementation,
    )
    want = run(q, k, v)
    np.testing.assert_array_equal(run(q, k, v), want)
    np.testing.assert_array_equal(jax.jit(run)(q, k, v), want)
    split = [x.reshape(2, 2, *x.shape[1:]) for x in (q, k, v)]
    _, scanned = jax.lax.scan(lambda carry, x: (carry, run(*x)), 0, split)
    np.testing.assert_array_equal(scanned.reshape(want.shape), want)
    if implementation == "jax_triton":
        np.testing.assert_array_equal(jax.vmap(run)(*split).reshape(want.shape), want)
        shared = jax.vmap(run, in_axes=(0, None, None))(split[0], k[:2], v[:2])
        np.testing.assert_array_equal(shared[0], run(q[:2], k[:2], v[:2]))


@MODES
def test_long_contexts(kernel, mode):
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


def needle(tokens, depth):
    """One key with half of the weight, and `tokens` others, of one sign, that share the rest."""
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(1, 64, 2, 128)), rng.normal(size=(1, tokens, 1, 128))
    v = np.abs(rng.normal(size=k.shape)) + 1
    axis = np.eye(128)[5]
    q[..., 5] = 128**0.5 * (np.log(tokens) + 0.5) / 12
    k[..., 5] = 0
    k[0, int(depth * tokens), 0] = 12 * axis
    v[0, int(depth * tokens)] *= -4
    return [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]


@MODES
@pytest.mark.parametrize("depth", [0.0, 0.4, 0.999])
def test_needle(kernel, mode, depth):
    """In 128k keys a needle, and what all others give together, are as exact as in 4k.

    Sums that keep too few bits lose the others, each of which has a millionth of the weight.
    """
    config = tj.TurboConfig(mode=mode)
    errors = []
    for tokens in (2**12, 2**17):
        q, k, v = needle(tokens, depth)
        out, _ = kernel(q, k, v, config=config)
        scores = np.einsum("btnd,bskd->bnts", *(np.asarray(x, float) for x in (q, k))) / 128**0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        assert 0.4 < weights.max(-1).min() < 0.6
        want = np.einsum("bnts,bskd->btnd", weights, np.asarray(v, float))
        errors.append(np.linalg.norm(np.asarray(out, float) - want) / np.linalg.norm(want))
    assert errors[0] < 0.1
    assert errors[1] <= 1.2 * errors[0] + 0.002


@with_triton
@MODES
def test_the_same_bits_twice_of_upstream_triton(mode):
    q, k, v = tensors(5, 2, 700, 700, 4, 2, 128, jnp.bfloat16)
    config = tj.TurboConfig.paper(mode=mode)
    run = functools.partial(attend, implementation="jax_triton", return_residual=True)
    assert_equal(*(run(q, k, v, config=config) for _ in range(2)))


@with_triton
def test_upstream_triton_trains():
    """The backward pass is that of `turbo_attention`, by whichever kernels there are."""
    q, k, v = tensors(7, 1, 130, 130, 2, 1, 64)

    def loss(implementation, q, k, v):
        out = tj.turbo_attention(q, k, v, is_causal=True, implementation=implementation)
        return jnp.sum(out[..., :8])

    # On Hopper its kernels, of weights in 16 bits and of what each forward pass gave.
    got, want = (
        jax.grad(functools.partial(loss, name), argnums=(0, 1, 2))(q, k, v)
        for name in ("jax_triton", "xla")
    )
    for a, b in zip(got, want, strict=True):
        assert np.linalg.norm(a - b) <= 2.0**-7 * np.linalg.norm(b)


# On Hopper ---------------------------------------------------------------------------------------

HOPPER = pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])


@HOPPER
@pytest.mark.parametrize("softmax", [tj.SAS(-3.0), tj.SAS(-20.0, "2")], ids=["-3", "-20"])
@MODES
def test_thresholds(check, mode, softmax):
    q, k, v = tensors(2, 1, 170, 300, 2, 1, 64)
    check(q, k, v, tj.TurboConfig(mode=mode, softmax=softmax), is_causal=True)


@on_hopper
@pytest.mark.quick(3)
@MODES
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


@on_hopper
@pytest.mark.quick(5)
@MODES
@pytest.mark.parametrize(
    ("head_dim", "changes"),
    [
        (64, {}),
        (64, {"consumers": 2, "intra_warpgroup_overlap": True}),
        (64, {"consumers": 3, "intra_warpgroup_overlap": True, "tile": 64}),
        (128, {}),
        (128, {"intra_warpgroup_overlap": True, "tile": 64}),
        (256, {}),
    ],
    ids=str,
)
def test_ping_pong_changes_no_bit(mode, head_dim, changes):
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
    without, within = (run(launch=launch._replace(ping_pong=x)) for x in (False, True))
    assert_equal(without, within)


@on_hopper
@pytest.mark.quick(3)
@MODES
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
    assert_equal(run(launch=launch), run(launch=launch._replace(quantizes=True)))


@HOPPER
@pytest.mark.quick(6)
@MODES
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("size", [1, 64, 65, 190, 450])
def test_tiles_of_two_blocks(kernel, check, mode, head_dim, size):
    """Whatever number of blocks there is, and a NaN in one of them, which some rows do not see."""
    q, k, v = tensors(10, 2, size, size, 4, 2, head_dim, jnp.bfloat16)
    config = tj.TurboConfig(mode=mode, softmax=EXACT)
    for options in ({"is_causal": True}, {"local_window_size": (70, 20), "is_causal": True}):
        check(q, k, v, config, **options)
        bad = k.at[:, size // 2, 0, 3].set(jnp.nan)
        got = kernel(q, bad, v, config=config, **options)
        want = xla(q, bad, v, config=config, **options)
        assert_same_nan(got, want)


@HOPPER
@pytest.mark.quick(3)
@MODES
@pytest.mark.parametrize("cap", [3.0, 50.0])
def test_soft_caps(check, mode, cap):
    q, k, v = tensors(11, 1, 300, 300, 4, 2, 128, jnp.bfloat16)
    check(q, k, v, tj.TurboConfig(mode=mode), logits_soft_cap=cap, is_causal=True)
    check(q, k, v, tj.TurboConfig(mode=mode, softmax=EXACT), logits_soft_cap=cap, scale=1.0)
