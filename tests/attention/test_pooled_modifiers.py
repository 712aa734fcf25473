"""Segments, offsets, sinks and float32 parts of `pooled_attention`, against the float64 oracle.

Through the definition and Triton's kernels, interpreted, forward and gradients. What they compute
on a GPU is checked in `test_gpu_pooled.py`.
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from typer.testing import CliRunner

import turbojax as tj
from tests.attention.pooled_helpers import (
    EPS,
    Case,
    api_options,
    assert_as_good_as_plain,
    operands,
    options,
    oracle,
    oracle_gradient,
    plain,
    plain_gradient,
)
from turbojax import models
from turbojax._device import interpret_kernels
from turbojax.app.main import app
from turbojax.levels import LocalWindow, Threshold
from turbojax.models import PooledAttention, pooled_by_name
from turbojax.models.generation import session as generation

CASES = {
    "segments": Case(150, 150, heads=4, kv_heads=2, is_causal=True, segments=4),
    "segments that come again, both lengths": Case(
        130,
        133,
        batch=3,
        segments=9,
        sorted_ids=False,
        query_lengths=(130, 67, 12),
        key_lengths=(133, 61, 0),
    ),
    "offsets": Case(
        70, 133, batch=3, is_causal=True, query_offsets=(63, 5, 0), key_offsets=(0, 30, 70)
    ),
    "segments, offsets": Case(
        130,
        130,
        block_q=64,
        is_causal=True,
        segments=5,
        query_offsets=(11, 40),
        key_offsets=(0, 45),
    ),
    "sinks": Case(70, 90, heads=4, is_causal=True, with_sinks=True, query_lengths=(70, 33)),
    "sinks, segments, offsets, lengths": Case(
        130,
        100,
        heads=4,
        kv_heads=2,
        is_causal=True,
        segments=4,
        with_sinks=True,
        query_offsets=(3, 0),
        query_lengths=(130, 77),
        key_lengths=(100, 91),
        shared="heads",
    ),
    "a segment for each token": Case(64, 64, is_causal=True, segments=200),
    "odd blocks": Case(77, 131, block_q=7, block_kv=24, segments=4, with_sinks=True, xla_only=True),
}
HASTE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
GRID = [("xla", name) for name in CASES] + [
    pytest.param("triton", name, marks=() if "lengths" in name else pytest.mark.slow)
    for name, case in CASES.items()
    if not case.xla_only
]


@functools.partial(jax.jit, static_argnums=(0, 1, 2), compiler_options=HASTE)
def _run(implementation, static, output_dtype, given, arrays, cotangents):
    def call(q, k, v, sinks):
        modifiers = given if sinks is None else {**given, "sinks": sinks}
        chosen = {"implementation": implementation, "return_residual": True}
        chosen["output_dtype"] = output_dtype
        return tj.pooled_attention(q, k, v, arrays[3], **dict(static), **modifiers, **chosen)

    results, pull = jax.vjp(call, *arrays[:3], given.get("sinks"))
    d_out, d_residual = cotangents
    gradients = pull((d_out.astype(results[0].dtype), d_residual))
    return results, [x for x in gradients if x is not None]


def run(case, arrays, implementation="xla", output_dtype=None, **changed):
    """Output and residual, and the gradients of queries, keys, values and sinks."""
    static, given = api_options(case)
    call = (implementation, static, output_dtype, {**given, **changed}, arrays[:4], arrays[4:])
    if implementation == "triton":
        with interpret_kernels():
            return _run(*call)
    return _run(*call)


def check(case, implementation, dtype=jnp.float32, output_dtype=None):
    arrays, known = operands(case, dtype), options(case)
    results, gradients = run(case, arrays, implementation, output_dtype)
    assert results[0].dtype == (output_dtype or dtype)
    want, of_plain = oracle(*arrays[:4], **known), plain(*arrays[:4], **known)
    # A kernel's weights multiply in the operands' dtype, also where its output is not rounded.
    of_weights = 0 if implementation == "xla" else float(jnp.finfo(dtype).eps)
    assert_as_good_as_plain(results, want, of_plain, floor=32 * EPS + of_weights)
    want, of_plain = oracle_gradient(*arrays, **known), plain_gradient(*arrays, **known)
    assert len(gradients) == len(want) == 3 + case.with_sinks
    # The sinks' is a sum over outputs as they are kept, in their dtype.
    own = of_weights if results[0].dtype == jnp.float32 else 0.02
    assert_as_good_as_plain(gradients[:3], want[:3], of_plain[:3])
    assert_as_good_as_plain(gradients[3:], want[3:], of_plain[3:], floor=32 * EPS + own)


@pytest.mark.quick(1, slow=1)
@pytest.mark.parametrize(("implementation", "name"), GRID)
def test_equals_the_oracle(implementation, name):
    check(CASES[name], implementation)


@pytest.mark.slow
def test_half_precision_and_float32_parts():
    """A float32 part is not rounded: its error is that of rounded pooled keys and values alone."""
    case = CASES["sinks, segments, offsets, lengths"]
    check(case, "xla", jnp.bfloat16)
    check(case, "xla", jnp.bfloat16, jnp.float32)


@pytest.mark.slow
def test_packed_documents_are_as_alone():
    """Also where they end within a block, where their levels are all 1."""
    case = Case(96, 96, heads=4, kv_heads=2, batch=1, is_causal=True)
    arrays = operands(case)
    ids = np.repeat([3, 1, 2], [32, 20, 44])[None]
    levels = arrays[3].at[:, :, 1:].set(1)
    segments = {"query_segment_ids": ids, "key_value_segment_ids": ids}
    results, gradients = run(case, (*arrays[:3], levels, *arrays[4:]), **segments)
    begin = 0
    for size in (32, 20, 44):
        part = slice(begin, begin + size)
        alone = dataclasses.replace(case, tokens=size, size=size)
        count = -(-size // 32)
        mine = jnp.ones((1, 4, count, count), jnp.int8) if begin else arrays[3][:, :, :1, :1]
        q, k, v, _, *cotangents = (x[:, part] for x in arrays)
        want = run(alone, (q, k, v, mine, *cotangents))
        for got, expected in zip((*results, *gradients), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(got[:, part], expected, atol=2e-6)
        begin += size


@pytest.mark.slow
def test_merged_parts_are_the_whole():
    """Halves of the keys, each with the offset of its first key; sinks belong to one of them."""
    case = Case(96, 128, heads=4, kv_heads=2, is_causal=True, with_sinks=True)
    q, k, v, levels, *_ = operands(case, jnp.bfloat16)
    static, given = api_options(case)
    call = functools.partial(
        tj.pooled_attention, q, **dict(static), return_residual=True, output_dtype=jnp.float32
    )
    want = call(k, v, levels, **given)
    first = call(k[:, :64], v[:, :64], levels[..., :2], **given)
    second = call(k[:, 64:], v[:, 64:], levels[..., 2:], key_offset=64)
    merged = tj.merge_attention(*(jnp.stack(x) for x in zip(first, second, strict=True)))
    for got, expected in zip(merged, want, strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("implementation", ["xla", pytest.param("triton", marks=pytest.mark.fuzz)])
def test_nothing_reaches_what_does_not_see_it(implementation):
    """NaN in padding, in blocks of other documents, in cotangents of what sees but a sink."""
    case = CASES["sinks, segments, offsets, lengths"]
    ids = np.repeat([1, 2, 5], [64, 32, 34])[None].repeat(2, 0)
    keys = np.repeat([1, 3], [64, 36])[None].repeat(2, 0)
    segments = {"query_segment_ids": ids, "key_value_segment_ids": keys}
    q, k, v, levels, d_out, d_residual = operands(case)
    want = run(case, (q, k, v, levels, d_out, d_residual), implementation, **segments)
    # Nobody sees document 3, and the queries of 2 and 5 see nothing but their sinks.
    k, v = (x.at[:, 64:].set(jnp.nan) for x in (k, v))
    d_out, q = (x.at[1, 77:].set(jnp.nan) for x in (d_out, q))
    d_out, d_residual = d_out.at[0, 64:].set(jnp.nan), d_residual.at[1, 77:].set(jnp.nan)
    got = run(case, (q, k, v, levels, d_out, d_residual), implementation, **segments)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(x, y)
    (out, residual), (*_, d_sinks) = got
    assert not np.asarray(out[0, 64:]).any()
    sinks = api_options(case)[1]["sinks"]
    np.testing.assert_array_equal(residual[0, 64:], np.broadcast_to(sinks, (66, 4)))
    assert np.isneginf(residual[1, 77:]).all()
    assert np.isfinite(d_sinks).all()


@pytest.mark.slow
def test_what_is_nan_gives_nan():
    case = CASES["sinks, segments, offsets, lengths"]
    arrays = operands(case)
    static, given = api_options(case)
    bad = dict(given, sinks=given["sinks"].at[1].set(jnp.nan))
    out = tj.pooled_attention(*arrays[:4], **dict(static), **bad)
    assert np.isnan(out[0, :, 1]).all()
    assert np.isfinite(out[:, :, [0, 2, 3]]).all()
    # A level that is none, in a block of another document too.
    levels = arrays[3].at[0, 0, 0].set(3)
    out = jax.jit(lambda x: tj.pooled_attention(*arrays[:3], x, **dict(static), **given))(levels)
    assert np.isnan(out[0, :32, 0]).all()
    assert np.isfinite(out[0, 32:, 0]).all()


@pytest.mark.slow
def test_a_sink_of_minus_infinity_is_none():
    case = dataclasses.replace(CASES["sinks"], query_lengths=None)
    arrays = operands(case)
    without = run(dataclasses.replace(case, with_sinks=False), arrays)
    got = run(case, arrays, sinks=jnp.full(4, -jnp.inf))
    for x, y in zip(jax.tree.leaves(got)[:-1], jax.tree.leaves(without), strict=True):
        np.testing.assert_array_equal(x, y)
    assert not np.asarray(got[1][-1]).any()


Q = jnp.zeros((2, 16, 4, 8))
BAD = {
    "query_segment_ids need key_value_segment_ids": {"query_segment_ids": jnp.zeros((2, 16), int)},
    r"key_value_segment_ids.shape=\(2, 15\) must be \(2, 16\)": {
        "query_segment_ids": jnp.zeros((2, 16), int),
        "key_value_segment_ids": jnp.zeros((2, 15), int),
    },
    r"query_offset=\[-1, 0\] must be between": {"query_offset": np.array([-1, 0])},
    r"sinks.shape=\(3,\) must be \(4,\)": {"sinks": jnp.zeros(3)},
    "output_dtype=.*bfloat16.* must be float32": {"output_dtype": jnp.bfloat16},
}


@pytest.mark.parametrize("words", BAD)
def test_error_names_value_and_requirement(words):
    levels = jnp.ones((1, 1, 1, 1), jnp.int8)
    bad = BAD[words]
    with pytest.raises(ValueError, match=words):
        tj.pooled_attention(Q, Q, Q, levels, **bad)
    if not {"sinks", "output_dtype"} & set(bad):
        with pytest.raises(ValueError, match=words):
            tj.select_levels(Q, Q, tj.levels.TopK(), **bad)


EVERYTHING = PooledAttention(LocalWindow(4096, (4096, 4096, None)), 32, 32)
LOCAL = pooled_by_name("window", window=32, block_size=32)


@pytest.fixture(scope="module")
def model() -> models.Transformer:
    config = models.TransformerConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_length=256,
    )
    return models.Transformer(config, rngs=nnx.Rngs(1))


@pytest.fixture(scope="module")
def shallow(model) -> models.Transformer:
    """One layer: quicker to compile."""
    return models.Transformer(dataclasses.replace(model.config, num_layers=1), rngs=nnx.Rngs(1))


def _tokens(batch: int, length: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(256, size=(batch, length), dtype=np.int32))


@pytest.mark.slow
def test_level_1_everywhere_generates_what_exact_attention_does(shallow):
    tokens, lengths = _tokens(2, 200), jnp.array([200, 3])
    options = {"max_length": 256, "lengths": lengths}
    dense = models.start(shallow, tokens, **options)
    pooled = models.start(shallow, tokens, **options, pooled_prefill=EVERYTHING)
    # Sums in another order, in float32.
    bound = 1e-5 * float(jnp.max(jnp.abs(dense.logits)))
    np.testing.assert_allclose(pooled.logits, dense.logits, atol=bound)
    one, two = (np.stack(list(generation.stream(s, 8))) for s in (dense, pooled))
    np.testing.assert_array_equal(one, two)


@pytest.mark.fuzz
def test_logits_are_those_of_a_forward_pass_with_pooled_attention(shallow):
    """All prompts at once, or in turn."""
    tokens = _tokens(2, 150)
    expected = shallow(tokens, attend=LOCAL)[:, -1]
    bound = 1e-5 * float(jnp.max(jnp.abs(expected)))
    options = {"max_length": 160, "pooled_prefill": LOCAL}
    whole = models.start(shallow, tokens, **options)
    parts = models.start(shallow, tokens, prefill_batch_size=1, **options)
    for session in (whole, parts):
        np.testing.assert_allclose(session.logits, expected, atol=bound)
    for one, two in zip(whole.caches.layers, parts.caches.layers, strict=True):
        # Sums in another order may round to the next bfloat16.
        for a, b in ((one.key, two.key), (one.value, two.value)):
            a, b = (np.asarray(x, np.float32) for x in (a, b))
            np.testing.assert_allclose(a, b, rtol=2**-7, atol=bound)
        np.testing.assert_array_equal(one.lengths, two.lengths)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_kv": 12}, "block_kv=12 must be a multiple of 8"),
        ({"implementation": "cuda"}, "cuda"),
        ({"policy": "window"}, "policy is a str, must be one of turbojax.levels"),
    ],
)
def test_bad_options_are_refused(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        PooledAttention(**{"policy": LocalWindow(), **change})


def test_names():
    pooled = pooled_by_name("window", window=64, block_size=32, implementation="xla")
    assert pooled == PooledAttention(LocalWindow(64, (64, 64, None)), 32, 32, "xla")
    assert pooled_by_name("window") == PooledAttention(LocalWindow())
    bounds = (0.62, 0.77, 0.89, 0.97)
    chosen = PooledAttention(Threshold(bounds), query_samples=8, key_means=8)
    assert pooled_by_name("threshold") == chosen
    with pytest.raises(ValueError, match="policy 'best' must be one of threshold, topk, window"):
        pooled_by_name("best")
    with pytest.raises(ValueError, match="window=-1"):
        pooled_by_name("window", window=-1)
    with pytest.raises(ValueError, match="window=64 is for policy 'window', not 'topk'"):
        pooled_by_name("topk", window=64)


@pytest.mark.slow
def test_command(model, tmp_path):
    models.save(model, tmp_path)
    base = ["generate", "a" * 200, "--model", str(tmp_path), "--max-new-tokens", "4", "--json"]
    options = ["--prefill", "window", "--prefill-window", "16", "--prefill-block-size", "16"]
    result = CliRunner().invoke(app, [*base, "--cache", "exact", *options])
    assert result.exit_code == 0, result.stderr
    tokens = jnp.array([[0, *b"a" * 200]])
    pooled = pooled_by_name("window", window=16, block_size=16)
    loaded = models.load(tmp_path, dtype=jnp.float32)
    expected = models.generate(loaded, tokens, max_new_tokens=4, pooled_prefill=pooled)
    text = bytes(expected[0].tolist()).decode("utf-8", "replace")
    assert json.loads(result.stdout)["text"] == text
    for wrong, message in (
        (["--prefill", "best"], "prefill 'best' must be one of dense, threshold, topk, window"),
        (["--prefill-window", "9"], "are for pooled attention, not 'dense'"),
    ):
        result = CliRunner().invoke(app, [*base, *wrong])
        assert result.exit_code == 2
        assert message in result.stderr
