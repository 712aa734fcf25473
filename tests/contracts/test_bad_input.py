"""Wrong calls of the core: one clear error each, with the value and what is required of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj

CONFIG = tj.TurboConfig(block_q=16, block_kv=16, buffer_size=16)


def zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


def lengths(*values):
    return jnp.asarray(values, jnp.int32)


QUERY, KEY = zeros(2, 5, 4, 16), zeros(2, 5, 2, 16)


def cache(length=3, **kwargs):
    empty = tj.init_cache(2, 40, 2, 16, config=CONFIG, dtype=jnp.float32, **kwargs)
    return tj.append(empty, KEY[:, :length], KEY[:, :length]) if length else empty


def attend(query=QUERY, key=KEY, value=None, **kwargs):
    return tj.turbo_attention(query, key, key if value is None else value, config=CONFIG, **kwargs)


def prefill(query=QUERY, key=KEY, value=None, into=None, **kwargs):
    into = cache(0) if into is None else into
    return tj.prefill(query, key, key if value is None else value, into, **kwargs)


def append(key=KEY, value=None, into=None, **kwargs):
    return tj.append(into or cache(), key, key if value is None else value, **kwargs)


def decode(query=QUERY[:, :1], into=None, **kwargs):
    return tj.decode(query, into or cache(), **kwargs)


def init(*sizes, **kwargs):
    return tj.init_cache(*(sizes or (2, 40, 2, 16)), **kwargs)


# Case: the call, the error, and what its message must say: value, then requirement.
CONFIGS = {
    "key bits": (lambda: tj.TurboConfig(key_bits=5), r"key_bits=5.*\(2, 3, 4\)"),
    "value bits": (lambda: tj.TurboConfig(value_bits=8), r"value_bits=8.*\(2, 3, 4\)"),
    "low bits": (lambda: tj.TurboConfig(low_bits=1), r"low_bits=1.*\(2, 3, 4\)"),
    "negative count, keys": (
        lambda: tj.TurboConfig(num_low_bit_key_heads=-1),
        r"num_low_bit_key_heads=-1.*not be negative",
    ),
    "negative count, values": (
        lambda: tj.TurboConfig(num_low_bit_value_heads=-2),
        r"num_low_bit_value_heads=-2.*not be negative",
    ),
    "block_q": (lambda: tj.TurboConfig(block_q=12), r"block_q=12.*multiple of 8"),
    "block_kv zero": (lambda: tj.TurboConfig(block_kv=0), r"block_kv=0.*multiple of 8"),
    "block_kv negative": (lambda: tj.TurboConfig(block_kv=-8), r"block_kv=-8.*multiple of 8"),
    "buffer": (
        lambda: tj.TurboConfig(block_kv=64, buffer_size=96),
        r"buffer_size=96.*multiple of .*block_kv=64",
    ),
    "no buffer": (lambda: tj.TurboConfig(buffer_size=0), r"buffer_size=0.*multiple of"),
    "flush": (lambda: tj.TurboConfig(flush="newest"), r"flush='newest'.*oldest.*all"),
    "first tokens": (
        lambda: tj.TurboConfig(first_tokens=65),
        r"first_tokens=65.*from 0 to 64.*buffer_size=128.*block_kv=64",
    ),
    "first tokens, negative": (lambda: tj.TurboConfig(first_tokens=-1), r"=-1.*from 0 to 64"),
    "first tokens, all flushed": (
        lambda: tj.TurboConfig(first_tokens=1, flush="all"),
        r"first_tokens=1.*from 0 to 0.*flush='all'",
    ),
    "first tokens of one block": (
        lambda: tj.TurboConfig(first_tokens=1, buffer_size=64),
        r"first_tokens=1.*from 0 to 0.*buffer_size=64",
    ),
    "softmax": (lambda: tj.TurboConfig(softmax="fast"), r"softmax='fast'.*SAS or 'exact'"),
    "mode": (lambda: tj.TurboConfig(mode="int4"), r"mode='int4'.*int8_fp8"),
    "priority": (lambda: tj.TurboConfig(head_priority="size"), r"head_priority='size'.*gap_std"),
    "SAS threshold": (lambda: tj.SAS(threshold=0.0), r"threshold=0.0.*negative"),
    "SAS threshold infinite": (lambda: tj.SAS(threshold=-np.inf), r"threshold=-inf.*finite"),
    "SAS threshold NaN": (lambda: tj.SAS(threshold=np.nan), r"threshold=nan.*finite"),
    "SAS base": (lambda: tj.SAS(base="10"), r"base='10'.*'e' or '2'"),
    "batch": (lambda: init(0, 40, 2, 16), r"batch_size=0.*at least 1"),
    "max_length": (lambda: init(2, -4, 2, 16), r"max_length=-4.*at least 1"),
    "heads": (lambda: init(2, 40, 0, 16), r"num_kv_heads=0.*at least 1"),
    "no channels": (lambda: init(2, 40, 2, 0), r"head_dim=0.*at least 1"),
    "head dim": (lambda: init(2, 40, 2, 20), r"head_dim=20.*multiple of 8"),
    "more low-bit key heads than heads": (
        lambda: init(config=tj.TurboConfig(num_low_bit_key_heads=3)),
        r"num_low_bit_key_heads=3.*at most num_kv_heads=2",
    ),
    "more low-bit value heads than heads": (
        lambda: init(config=tj.TurboConfig(num_low_bit_value_heads=9)),
        r"num_low_bit_value_heads=9.*at most num_kv_heads=2",
    ),
    "scale's shape": (lambda: init(key_scale=jnp.ones(3)), r"key_scale.shape=\(3,\).*\(2, 2\)"),
    "scale of zero": (lambda: init(value_scale=jnp.zeros(())), r"value_scale=0.0.*positive"),
    "negative scale": (
        lambda: init(value_scale=jnp.asarray([[1.0, -1.0]])),
        r"value_scale=.*-1.0.*positive",
    ),
    "scale of NaN": (lambda: init(key_scale=jnp.asarray(np.nan)), r"key_scale=nan.*finite"),
}
SHAPES = {
    "query's rank": (lambda: attend(QUERY[0]), r"\(5, 4, 16\).*\[B, T, N, H\]"),
    "key's rank": (lambda: attend(key=KEY[0]), r"\(5, 2, 16\).*\[B, S, K, H\]"),
    "value's rank": (lambda: attend(value=KEY[0]), r"\(5, 2, 16\).*\(2, 5, 2, 16\)"),
    "value's shape": (lambda: attend(value=KEY[:, :4]), r"\(2, 4, 2, 16\).*\(2, 5, 2, 16\)"),
    "batches": (lambda: attend(QUERY[:1]), r"\(1, 5, 4, 16\).*\(2, 5, 2, 16\).*batch"),
    "head dims": (lambda: attend(QUERY[..., :8]), r"\(2, 5, 4, 8\).*\(2, 5, 2, 16\).*head dim"),
    "heads do not divide": (lambda: attend(QUERY[:, :, :3]), r"3 query.*multiple of 2"),
    "fewer query heads": (lambda: attend(QUERY[:, :, :1]), r"1 query.*multiple of 2"),
    "no queries": (lambda: attend(QUERY[:, :0]), r"\(2, 0, 4, 16\).*no axis empty"),
    "no keys": (lambda: attend(key=KEY[:, :0]), r"\(2, 0, 2, 16\).*no axis empty"),
    "prompt for another cache's heads": (
        lambda: prefill(QUERY, zeros(2, 5, 4, 16)),
        r"\(2, 5, 4, 16\).*\[2, T, 2, 16\].*cache",
    ),
    "prompt for another cache's batch": (
        lambda: prefill(QUERY[:1], KEY[:1]),
        r"\(1, 5, 2, 16\).*\[2, T, 2, 16\].*cache",
    ),
    "prompt's query heads": (lambda: prefill(QUERY[:, :, :3]), r"3 query.*multiple of 2"),
    "append's rank": (lambda: append(KEY[:, 0]), r"\(2, 2, 16\).*\[B, S, K, H\]"),
    "append's heads": (lambda: append(zeros(2, 5, 1, 16)), r"\(2, 5, 1, 16\).*\[2, T, 2, 16\]"),
    "append's head dim": (lambda: append(zeros(2, 5, 2, 8)), r"\(2, 5, 2, 8\).*\[2, T, 2, 16\]"),
    "append's value": (lambda: append(value=KEY[:, :2]), r"\(2, 2, 2, 16\).*\(2, 5, 2, 16\)"),
    "append of nothing": (lambda: append(KEY[:, :0]), r"\(2, 0, 2, 16\).*no axis empty"),
    "decode's rank": (lambda: decode(QUERY[:, 0]), r"\(2, 4, 16\).*\[B, T, N, H\]"),
    "decode's batch": (lambda: decode(QUERY[:1]), r"\(1, 5, 4, 16\).*\[2, T, N, 16\].*cache"),
    "decode's head dim": (lambda: decode(QUERY[..., :8]), r"\(2, 5, 4, 8\).*\[2, T, N, 16\]"),
    "decode's heads": (lambda: decode(QUERY[:, :, :3]), r"3 query.*multiple of 2"),
    "lengths of another batch": (
        lambda: attend(key_value_seq_lengths=lengths(1, 2, 3)),
        r"key_value_seq_lengths.shape=\(3,\).*\(2,\)",
    ),
    "a scalar length": (
        lambda: attend(key_value_seq_lengths=jnp.asarray(3)),
        r"key_value_seq_lengths.shape=\(\).*\(2,\)",
    ),
    "append's lengths of another batch": (
        lambda: append(lengths=lengths(1)),
        r"lengths.shape=\(1,\).*\(2,\)",
    ),
    "priority's rank": (lambda: tj.head_priority(KEY[0]), r"\(5, 2, 16\).*\[B, S, K, H\]"),
    "priority's mask": (
        lambda: tj.head_priority(KEY, where=jnp.ones((2, 4), bool)),
        r"\(2, 4\).*\(2, 5\)",
    ),
    "channels without tokens' axis": (
        lambda: tj.quantizers.quantize_channels(jnp.zeros(8, jnp.int8), 4),
        r"\(8,\).*token axis",
    ),
    "softmax's mask": (
        lambda: tj.sas_softmax(jnp.ones((2, 3)), where=jnp.ones((2, 4), bool)),
        r"\(2, 4\).*broadcast to .*\(2, 3\)",
    ),
}
WINDOW = r"must be one or two integers >= 0"
VALUES = {
    "query lengths": (
        lambda: attend(query_seq_lengths=lengths(6, 1)),
        r"query_seq_lengths=\[6, 1\].*between 0 and 5",
    ),
    "fewer queries than keys of a prompt": (
        lambda: prefill(query=QUERY[:, :4]),
        r"query.shape=\(2, 4, 4, 16\).*one query per key",
    ),
    "window of truth": (
        lambda: attend(local_window_size=True),
        r"local_window_size=True.*integers",
    ),
    "scale beyond float32": (
        lambda: init(key_scale=jnp.float32(3.4028e38)),
        r"key_scale=.*positive and finite",
    ),
    "length too large": (
        lambda: attend(key_value_seq_lengths=lengths(6, 1)),
        r"key_value_seq_lengths=\[6, 1\].*between 0 and 5",
    ),
    "length negative": (
        lambda: prefill(key_value_seq_lengths=lengths(5, -1)),
        r"key_value_seq_lengths=\[5, -1\].*between 0 and 5",
    ),
    "append's length": (
        lambda: append(lengths=lengths(6, 0)),
        r"lengths=\[6, 0\].*between 0 and 5",
    ),
    "window negative": (lambda: attend(local_window_size=-1), r"window_size=-1 " + WINDOW),
    "window of three": (lambda: attend(local_window_size=(1, 2, 3)), r"\(1, 2, 3\) " + WINDOW),
    "window half negative": (lambda: decode(local_window_size=(3, -2)), r"\(3, -2\) " + WINDOW),
    "window of fractions": (lambda: attend(local_window_size=(1.5, 2)), r"\(1.5, 2\) " + WINDOW),
    "window a fraction": (lambda: attend(local_window_size=1.5), r"size=1.5 " + WINDOW),
    "soft cap zero": (lambda: attend(logits_soft_cap=0.0), r"soft_cap=0.0.*positive"),
    "soft cap negative": (lambda: decode(logits_soft_cap=-3.0), r"soft_cap=-3.0.*positive"),
    "soft cap infinite": (lambda: attend(logits_soft_cap=np.inf), r"soft_cap=inf.*finite"),
    "scale NaN": (lambda: attend(scale=np.nan), r"scale=nan.*finite"),
    "scale infinite": (lambda: decode(scale=-np.inf), r"scale=-inf.*finite"),
    "implementation": (lambda: attend(implementation="cuda"), r"'cuda'.*None or one of.*xla"),
    "decode's implementation": (lambda: decode(implementation=""), r"''.*None or one of.*xla"),
    "prefill's implementation": (lambda: prefill(implementation="XLA"), r"'XLA'.*None or one of"),
    "a cache in use": (
        lambda: prefill(into=cache(3)),
        r"cache.lengths=\[3, 3\] must be 0",
    ),
    "a prompt too long": (
        lambda: prefill(zeros(2, 41, 4, 16), zeros(2, 41, 2, 16)),
        r"\[41, 41\].*at most max_length=40",
    ),
    "too many tokens": (
        lambda: append(zeros(2, 38, 2, 16)),
        r"\[41, 41\].*at most max_length=40",
    ),
    "priority's method": (
        lambda: tj.head_priority(KEY, method="size"),
        r"method='size'.*gap_std",
    ),
    "bits to quantize": (
        lambda: tj.quantizers.quantize_channels(jnp.zeros((8, 8), jnp.int8), 5),
        r"bits=5.*\(2, 3, 4\)",
    ),
    "bits to pack": (lambda: tj.quantizers.pack(jnp.zeros(8, jnp.uint8), 5), r"bits=5"),
    "bits to unpack": (lambda: tj.quantizers.unpack(jnp.zeros(8, jnp.uint8), 1), r"bits=1"),
    "codes that fill no byte": (
        lambda: tj.quantizers.pack(jnp.zeros(6, jnp.uint8), 2),
        r"size=6.*multiple of 4",
    ),
    "bytes that hold no codes": (
        lambda: tj.quantizers.unpack(jnp.zeros(4, jnp.uint8), 3),
        r"4.*multiple of 3",
    ),
}
HALF = jnp.bfloat16
KINDS = {
    "integer query": (lambda: attend(QUERY.astype(jnp.int32)), r"query.dtype=int32.*bfloat16"),
    "float64": (
        lambda: attend(*(np.zeros(x.shape) for x in (QUERY, KEY))),
        r"query.dtype=float64.*bfloat16, float16 or float32",
    ),
    "key's dtype": (lambda: attend(key=KEY.astype(HALF)), r"key.dtype=bfloat16.*float32"),
    "value's dtype": (lambda: attend(value=KEY.astype(HALF)), r"value.dtype=bfloat16.*float32"),
    "prompt's dtype": (
        lambda: prefill(QUERY.astype(HALF), KEY.astype(HALF)),
        r"key.dtype=bfloat16.*cache.dtype=float32",
    ),
    "append's dtype": (lambda: append(KEY.astype(HALF)), r"bfloat16.*cache.dtype=float32"),
    "append's mixed dtypes": (lambda: append(value=KEY.astype(HALF)), r"bfloat16.*float32"),
    "decode's dtype": (
        lambda: decode(QUERY.astype(HALF)),
        r"query.dtype=bfloat16.*cache.dtype=float32",
    ),
    "integer decode": (lambda: decode(QUERY.astype(jnp.int8)), r"query.dtype=int8.*bfloat16"),
    "fractional lengths": (
        lambda: attend(key_value_seq_lengths=jnp.asarray([1.0, 2.0])),
        r"key_value_seq_lengths.dtype=float32.*integer",
    ),
    "append's fractional lengths": (
        lambda: append(lengths=jnp.asarray([1.0, 2.0])),
        r"lengths.dtype=float32.*integer",
    ),
    "no cache to prefill": (lambda: prefill(into={"a": 1}), r"dict.*ProgressiveCache"),
    "no cache to append to": (
        lambda: append(into=(KEY, KEY)),
        r"tuple.*Progressive",
    ),
    "no cache to decode": (
        lambda: decode(into=(KEY, KEY)),
        r"tuple.*Progressive",
    ),
    "no cache to dequantize": (lambda: tj.dequantize(KEY), r"must be one of .*ProgressiveCache"),
    "dequantized to integers": (
        lambda: tj.dequantize(cache(), jnp.int32),
        r"int32.*bfloat16, float16 or float32",
    ),
    "cache's dtype": (lambda: init(dtype=jnp.int8), r"int8.*bfloat16, float16 or float32"),
    "integers to SAS": (lambda: tj.SAS()(jnp.zeros(3, jnp.int32)), r"int32.*floating"),
    "integers to softmax": (lambda: tj.sas_softmax(jnp.zeros(3, jnp.int32)), r"int32.*floating"),
    "softmax's mask of floats": (
        lambda: tj.sas_softmax(jnp.zeros(3), where=jnp.ones(3)),
        r"float32.*bool",
    ),
    "priority of integers": (
        lambda: tj.head_priority(KEY.astype(jnp.int32)),
        r"int32.*floating",
    ),
    "priority's mask of integers": (
        lambda: tj.head_priority(KEY, where=jnp.ones((2, 5), jnp.int32)),
        r"int32.*bool",
    ),
    "integers to stage 1": (
        lambda: tj.quantizers.quantize_int8(jnp.zeros(3, jnp.int32), axis=0),
        r"int32.*floating",
    ),
    "integers to e4m3": (
        lambda: tj.quantizers.quantize_fp8(jnp.zeros(3, jnp.int32), axis=0),
        r"int32.*floating",
    ),
    "floats to stage 2": (
        lambda: tj.quantizers.quantize_channels(jnp.zeros((8, 8)), 4),
        r"float32.*int8",
    ),
    "bits as text": (lambda: tj.TurboConfig(key_bits="4"), r"key_bits='4'.*integer"),
    "no block": (lambda: tj.TurboConfig(block_kv=None), r"block_kv=None.*integer"),
    "fractional first tokens": (
        lambda: tj.TurboConfig(first_tokens=0.5),
        r"first_tokens=0.5.*integer",
    ),
    "fractional block": (lambda: tj.TurboConfig(block_kv=64.0), r"block_kv=64.0.*integer"),
    "fractional max_length": (lambda: init(2, 100.5, 2, 16), r"max_length=100.5.*integer"),
    "no config": (lambda: init(config=None), r"config=None.*TurboConfig"),
    "config as text": (lambda: tj.turbo_attention(QUERY, KEY, KEY, config="4bit"), r"TurboConfig"),
    "scale as text": (lambda: attend(scale="a"), r"scale is a str.*number"),
    "array as scale": (lambda: decode(scale=jnp.float32(1)), r"scale is a .*Python number"),
    "floats to pack": (lambda: tj.quantizers.pack(jnp.zeros(8), 4), r"float32.*uint8"),
    "signed bytes to unpack": (
        lambda: tj.quantizers.unpack(jnp.zeros(8, jnp.int8), 4),
        r"int8.*uint8",
    ),
}
CALLS = {
    **{f"config: {k}": (ValueError, *v) for k, v in CONFIGS.items()},
    **{f"shape: {k}": (ValueError, *v) for k, v in SHAPES.items()},
    **{f"value: {k}": (ValueError, *v) for k, v in VALUES.items()},
    **{f"kind: {k}": (TypeError, *v) for k, v in KINDS.items()},
}


@pytest.mark.quick(68, slow=0)
@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_says_what_is_wrong(name):
    """The right kind of error, naming the value and the requirement."""
    error, call, message = CALLS[name]
    with pytest.raises(error, match=message) as caught:
        call()
    assert caught.type is error
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "implementation"), [(decode, "jax_triton"), (append, "jax_triton")]
)
def test_implementations_that_are_not_there(call, implementation):
    """A known name without an implementation: no silent fallback, and what there is instead."""
    with pytest.raises(NotImplementedError, match=f"has no .*{implementation}.*'xla'"):
        call(implementation=implementation)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what a CPU lacks")
@pytest.mark.parametrize("implementation", ["triton", "jax_triton", "mosaic_gpu"])
@pytest.mark.parametrize("call", [attend, prefill])
def test_kernels_are_refused_in_words_on_a_cpu(call, implementation):
    with pytest.raises(NotImplementedError, match=f"cannot run here: {implementation}: "):
        call(implementation=implementation)


@pytest.mark.quick(1)
@pytest.mark.parametrize("call", [attend, decode])
def test_xla_by_name_is_what_is_chosen(call):
    np.testing.assert_array_equal(call(implementation="xla"), call())


def test_shapes_are_checked_under_jit():
    """Errors that need no values come while tracing, with the same words."""
    with pytest.raises(ValueError, match="3 query.*multiple of 2"):
        jax.eval_shape(attend, QUERY[:, :, :3])
    with pytest.raises(TypeError, match=r"bfloat16.*cache.dtype=float32"):
        jax.eval_shape(lambda x: append(x), KEY.astype(HALF))
    with pytest.raises(ValueError, match=r"\[2, T, N, 16\]"):
        jax.eval_shape(lambda x: decode(x), QUERY[:1])


def test_lengths_out_of_range_under_jit_act_as_the_nearest_bound():
    """Nothing can be raised there, and nothing outside the array is read."""
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in (QUERY, KEY))
    call = jax.jit(lambda n: attend(q, k, key_value_seq_lengths=n))
    np.testing.assert_array_equal(call(lengths(99, -3)), call(lengths(5, 0)))


def test_append_lengths_out_of_range_under_jit():
    """Negative counts as nothing; tokens that were not given are reported, never invented."""
    rng = np.random.default_rng(1)
    key = jnp.asarray(rng.normal(size=KEY.shape), jnp.float32)
    call = jax.jit(lambda n: tj.append(cache(0), key, key, lengths=n))
    got = call(lengths(-4, 2))
    np.testing.assert_array_equal(got.lengths, [0, 2])
    got.validate()
    got = call(lengths(9, 2))
    want = tj.append(cache(0), key, key, lengths=lengths(5, 2))
    np.testing.assert_array_equal(got.overflowed, [True, False])
    for x, y in zip(
        jax.tree.leaves((got.key, got.value, got.lengths)),
        jax.tree.leaves((want.key, want.value, want.lengths)),
        strict=True,
    ):
        np.testing.assert_array_equal(x, y)


def test_an_error_leaves_the_cache_as_it_was():
    before = cache()
    kept = jax.tree.map(np.array, before)
    with pytest.raises(ValueError, match="max_length"):
        append(zeros(2, 38, 2, 16), into=before)
    for x, y in zip(jax.tree.leaves(kept), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(x, y)


def test_plain_numpy_is_ordinary_input():
    """Arrays of numpy are arrays; Python's own integers are lengths."""
    q, k = (np.asarray(x) for x in (QUERY, KEY))
    np.testing.assert_array_equal(attend(q, k), attend())
    np.testing.assert_array_equal(attend(key_value_seq_lengths=[5, 2]), jnp.zeros(QUERY.shape))


def test_configs_and_caches_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CONFIG.key_bits = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        cache().lengths = None
