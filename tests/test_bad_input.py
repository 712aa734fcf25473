"""Wrong calls: one clear error of the right kind, naming the value and what is required."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj


def array(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


Q, K = array(2, 8, 4, 16), array(2, 24, 2, 16)


def cache_for(batch=2, max_length=32, heads=2, head_dim=16, **options):
    options = {
        "config": tj.TurboConfig(block_kv=16, buffer_size=16),
        "dtype": jnp.float32,
        **options,
    }
    return tj.init_cache(batch, max_length, heads, head_dim, **options)


# Configurations ----------------------------------------------------------------------------------

CONFIGS = {
    "key_bits 5": ({"key_bits": 5}, r"key_bits=5.*\(2, 3, 4\)"),
    "key_bits 8": ({"key_bits": 8}, r"key_bits=8.*\(2, 3, 4\)"),
    "value_bits 1": ({"value_bits": 1}, r"value_bits=1.*\(2, 3, 4\)"),
    "low_bits 0": ({"low_bits": 0}, r"low_bits=0.*\(2, 3, 4\)"),
    "negative heads": ({"num_low_bit_key_heads": -1}, r"num_low_bit_key_heads=-1"),
    "negative value heads": ({"num_low_bit_value_heads": -2}, r"num_low_bit_value_heads=-2"),
    "block_q 0": ({"block_q": 0}, r"block_q=0.*multiple of 8"),
    "block_kv 12": ({"block_kv": 12, "buffer_size": 24}, r"block_kv=12.*multiple of 8"),
    "block_kv negative": ({"block_kv": -64}, r"block_kv=-64"),
    "buffer_size": ({"buffer_size": 100}, r"buffer_size=100.*block_kv=64"),
    "buffer_size 0": ({"buffer_size": 0}, r"buffer_size=0"),
    "softmax": ({"softmax": "fast"}, r"softmax='fast'.*'exact'"),
    "mode": ({"mode": "int4"}, r"mode='int4'.*int8_fp8"),
    "head_priority": ({"head_priority": "loudness"}, r"head_priority='loudness'.*gap_std"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config(name):
    options, message = CONFIGS[name]
    with pytest.raises(ValueError, match=message):
        tj.TurboConfig(**options)


@pytest.mark.parametrize("threshold", [0.0, 1.0, float("nan"), float("-inf")])
def test_sas_threshold(threshold):
    with pytest.raises(ValueError, match=rf"threshold={threshold}.*negative"):
        tj.SAS(threshold=threshold)


def test_sas():
    with pytest.raises(ValueError, match=r"base='10'.*'e'.*'2'"):
        tj.SAS(base="10")
    with pytest.raises(TypeError, match="int32"):
        tj.SAS()(jnp.zeros((3,), jnp.int32))
    with pytest.raises(TypeError, match="int32"):
        tj.sas_softmax(jnp.zeros((3,), jnp.int32))
    with pytest.raises(TypeError, match=r"float32.*bool"):
        tj.sas_softmax(array(3), where=array(3))
    with pytest.raises(ValueError, match=r"\(4,\).*\(3,\)"):
        tj.sas_softmax(array(3), where=jnp.ones((4,), bool))


# Attention ---------------------------------------------------------------------------------------

ATTENTION = {
    "query rank": (lambda: tj.turbo_attention(Q[0], K, K), ValueError, r"\(8, 4, 16\).*B, T, N, H"),
    "key rank": (lambda: tj.turbo_attention(Q, K[0], K[0]), ValueError, r"\(24, 2, 16\).*B, S, K"),
    "value rank": (lambda: tj.turbo_attention(Q, K, K[0]), ValueError, r"value.*\(24, 2, 16\)"),
    "key and value": (lambda: tj.turbo_attention(Q, K, K[:, :9]), ValueError, r"\(2, 9, 2, 16\)"),
    "empty": (lambda: tj.turbo_attention(Q[:, :0], K, K), ValueError, r"\(2, 0, 4, 16\)"),
    "heads": (lambda: tj.turbo_attention(Q[:, :, :3], K, K), ValueError, r"3 .*multiple of 2"),
    "batch": (lambda: tj.turbo_attention(Q[:1], K, K), ValueError, r"\(1, 8, 4, 16\).*batch"),
    "head dim": (lambda: tj.turbo_attention(Q[..., :8], K, K), ValueError, r"\(2, 8, 4, 8\).*head"),
    "integer query": (lambda: tj.turbo_attention(Q.astype(jnp.int32), K, K), TypeError, "int32"),
    "integer keys": (lambda: tj.turbo_attention(Q, K.astype(jnp.int8), K), TypeError, "int8"),
    "mixed dtypes": (
        lambda: tj.turbo_attention(Q.astype(jnp.bfloat16), K, K),
        TypeError,
        r"float32.*bfloat16",
    ),
    "mixed values": (
        lambda: tj.turbo_attention(Q, K, K.astype(jnp.float16)),
        TypeError,
        r"float16.*float32",
    ),
    "lengths' shape": (
        lambda: tj.turbo_attention(Q, K, K, key_value_seq_lengths=jnp.ones(3, int)),
        ValueError,
        r"\(3,\).*\(2,\)",
    ),
    "lengths' dtype": (
        lambda: tj.turbo_attention(Q, K, K, key_value_seq_lengths=array(2)),
        TypeError,
        r"float32.*integer",
    ),
    "lengths too long": (
        lambda: tj.turbo_attention(Q, K, K, key_value_seq_lengths=jnp.asarray([3, 25])),
        ValueError,
        r"25.*24",
    ),
    "lengths negative": (
        lambda: tj.turbo_attention(Q, K, K, key_value_seq_lengths=jnp.asarray([-1, 3])),
        ValueError,
        r"-1.*24",
    ),
    "window negative": (
        lambda: tj.turbo_attention(Q, K, K, local_window_size=-1),
        ValueError,
        r"local_window_size=-1",
    ),
    "window of three": (
        lambda: tj.turbo_attention(Q, K, K, local_window_size=(1, 2, 3)),
        ValueError,
        r"local_window_size=\(1, 2, 3\)",
    ),
    "window of floats": (
        lambda: tj.turbo_attention(Q, K, K, local_window_size=(1.5, 2)),
        ValueError,
        r"local_window_size=\(1.5, 2\)",
    ),
    "soft cap": (
        lambda: tj.turbo_attention(Q, K, K, logits_soft_cap=-2.0),
        ValueError,
        r"logits_soft_cap=-2.0",
    ),
    "soft cap zero": (
        lambda: tj.turbo_attention(Q, K, K, logits_soft_cap=0.0),
        ValueError,
        r"logits_soft_cap=0.0",
    ),
    "implementation": (
        lambda: tj.turbo_attention(Q, K, K, implementation="cudnn"),
        ValueError,
        r"'cudnn'.*xla",
    ),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_turbo_attention(name):
    call, kind, message = ATTENTION[name]
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("implementation", ["triton", "mosaic_gpu"])
def test_known_implementations_that_cannot_run_here(implementation):
    """Named implementations never fall back: a refusal in words."""
    for call in (
        lambda: tj.turbo_attention(Q, K, K, implementation=implementation),
        lambda: tj.decode(Q[:, :1], cache_for(), implementation=implementation),
        lambda: tj.prefill(
            Q[:, :1], K[:, :1], K[:, :1], cache_for(), implementation=implementation
        ),
    ):
        with pytest.raises(NotImplementedError, match=implementation):
            call()


def test_errors_are_the_same_under_jit():
    """What shapes alone decide is decided while tracing."""
    with pytest.raises(ValueError, match=r"3 .*multiple of 2"):
        jax.jit(tj.turbo_attention)(Q[:, :, :3], K, K)
    with pytest.raises(TypeError, match="int8"):
        jax.jit(tj.turbo_attention)(Q, K.astype(jnp.int8), K)


def test_lengths_out_of_range_under_jit():
    """Values cannot raise there: they act as the nearest bound."""
    attend = jax.jit(tj.turbo_attention)
    got = attend(Q, K, K * 2, key_value_seq_lengths=jnp.asarray([-5, 99]))
    want = attend(Q, K, K * 2, key_value_seq_lengths=jnp.asarray([0, 24]))
    np.testing.assert_array_equal(got, want)


# Caches ------------------------------------------------------------------------------------------

CACHES = {
    "batch 0": (lambda: cache_for(batch=0), ValueError, r"batch_size=0.*1"),
    "max_length 0": (lambda: cache_for(max_length=0), ValueError, r"max_length=0.*1"),
    "no heads": (lambda: cache_for(heads=0), ValueError, r"num_kv_heads=0.*1"),
    "negative": (lambda: cache_for(max_length=-3), ValueError, r"max_length=-3"),
    "head dim": (lambda: cache_for(head_dim=20), ValueError, r"head_dim=20.*multiple of 8"),
    "low-bit key heads": (
        lambda: cache_for(config=tj.TurboConfig(num_low_bit_key_heads=3)),
        ValueError,
        r"num_low_bit_key_heads=3.*num_kv_heads=2",
    ),
    "low-bit value heads": (
        lambda: cache_for(config=tj.TurboConfig(num_low_bit_value_heads=9)),
        ValueError,
        r"num_low_bit_value_heads=9.*num_kv_heads=2",
    ),
    "dtype": (lambda: cache_for(dtype=jnp.int8), TypeError, r"int8.*bfloat16"),
    "scale's shape": (lambda: cache_for(key_scale=array(3)), ValueError, r"\(3,\).*\(2, 2\)"),
    "scale 0": (lambda: cache_for(key_scale=jnp.zeros(())), ValueError, r"key_scale=.*positive"),
    "scale negative": (
        lambda: cache_for(value_scale=jnp.asarray([[1.0, -1.0]])),
        ValueError,
        r"value_scale=.*-1.*positive",
    ),
    "scale NaN": (
        lambda: cache_for(value_scale=jnp.asarray(jnp.nan)),
        ValueError,
        r"value_scale=.*nan.*",
    ),
}


@pytest.mark.parametrize("name", CACHES)
def test_init_cache(name):
    call, kind, message = CACHES[name]
    with pytest.raises(kind, match=message):
        call()


ONE = array(2, 1, 2, 16)
USE = {
    "append rank": (lambda: tj.append(cache_for(), ONE[0], ONE[0]), ValueError, r"\(1, 2, 16\)"),
    "append batch": (
        lambda: tj.append(cache_for(), ONE[:1], ONE[:1]),
        ValueError,
        r"\(1, 1, 2, 16\).*2",
    ),
    "append heads": (
        lambda: tj.append(cache_for(), ONE[:, :, :1], ONE[:, :, :1]),
        ValueError,
        r"\(2, 1, 1, 16\).*2",
    ),
    "append head dim": (
        lambda: tj.append(cache_for(), ONE[..., :8], ONE[..., :8]),
        ValueError,
        r"\(2, 1, 2, 8\).*16",
    ),
    "append key and value": (
        lambda: tj.append(cache_for(), ONE, array(2, 3, 2, 16)),
        ValueError,
        r"\(2, 3, 2, 16\)",
    ),
    "append dtype": (
        lambda: tj.append(cache_for(), *[ONE.astype(jnp.bfloat16)] * 2),
        TypeError,
        r"bfloat16.*float32",
    ),
    "append mixed": (
        lambda: tj.append(cache_for(), ONE, ONE.astype(jnp.bfloat16)),
        TypeError,
        r"bfloat16.*float32",
    ),
    "append lengths": (
        lambda: tj.append(cache_for(), ONE, ONE, lengths=jnp.asarray([2, 0])),
        ValueError,
        r"2.*1",
    ),
    "append negative": (
        lambda: tj.append(cache_for(), ONE, ONE, lengths=jnp.asarray([-1, 0])),
        ValueError,
        r"-1",
    ),
    "append lengths' shape": (
        lambda: tj.append(cache_for(), ONE, ONE, lengths=jnp.ones(3, int)),
        ValueError,
        r"\(3,\).*\(2,\)",
    ),
    "append lengths' dtype": (
        lambda: tj.append(cache_for(), ONE, ONE, lengths=array(2)),
        TypeError,
        r"float32.*integer",
    ),
    "append to no cache": (
        lambda: tj.append((1, 2), ONE, ONE),
        TypeError,
        r"tuple.*ProgressiveCache",
    ),
    "decode rank": (lambda: tj.decode(Q[0], cache_for()), ValueError, r"\(8, 4, 16\)"),
    "decode batch": (lambda: tj.decode(Q[:1], cache_for()), ValueError, r"\(1, 8, 4, 16\)"),
    "decode heads": (lambda: tj.decode(Q[:, :, :3], cache_for()), ValueError, r"3"),
    "decode head dim": (lambda: tj.decode(Q[..., :8], cache_for()), ValueError, r"\(2, 8, 4, 8\)"),
    "decode dtype": (
        lambda: tj.decode(Q.astype(jnp.bfloat16), cache_for()),
        TypeError,
        r"bfloat16.*float32",
    ),
    "decode without a cache": (lambda: tj.decode(Q, K), TypeError, r"ProgressiveCache"),
    "decode window": (
        lambda: tj.decode(Q, cache_for(), local_window_size=-4),
        ValueError,
        r"local_window_size=-4",
    ),
    "decode soft cap": (
        lambda: tj.decode(Q, cache_for(), logits_soft_cap=-1.0),
        ValueError,
        r"logits_soft_cap=-1.0",
    ),
    "decode implementation": (
        lambda: tj.decode(Q, cache_for(), implementation="cudnn"),
        ValueError,
        r"'cudnn'.*xla",
    ),
    "prefill heads": (
        lambda: tj.prefill(Q, K[:, :8], K[:, :8], cache_for(heads=4)),
        ValueError,
        r"\(2, 8, 2, 16\).*4",
    ),
    "prefill head dim": (
        lambda: tj.prefill(Q, K[:, :8], K[:, :8], cache_for(head_dim=32)),
        ValueError,
        r"\(2, 8, 2, 16\).*32",
    ),
    "prefill dtype": (
        lambda: tj.prefill(Q, K[:, :8], K[:, :8], cache_for(dtype=jnp.bfloat16)),
        TypeError,
        r"float32.*bfloat16",
    ),
    "prefill lengths": (
        lambda: tj.prefill(
            Q, K[:, :8], K[:, :8], cache_for(), key_value_seq_lengths=jnp.asarray([9, 1])
        ),
        ValueError,
        r"9.*8",
    ),
    "prefill without a cache": (
        lambda: tj.prefill(Q, K[:, :8], K[:, :8], None),
        TypeError,
        r"NoneType.*ProgressiveCache",
    ),
    "dequantize dtype": (lambda: tj.dequantize(cache_for(), jnp.int8), TypeError, "int8"),
    "dequantize no cache": (lambda: tj.dequantize(K), TypeError, "ProgressiveCache"),
}


@pytest.mark.parametrize("name", USE)
def test_use_of_a_cache(name):
    call, kind, message = USE[name]
    with pytest.raises(kind, match=message):
        call()


def test_a_failed_call_leaves_the_cache_alone():
    cache = cache_for()
    with pytest.raises(ValueError, match="lengths"):
        tj.append(cache, ONE, ONE, lengths=jnp.asarray([2, 0]))
    cache.validate()
    np.testing.assert_array_equal(cache.lengths, [0, 0])


def test_configs_and_caches_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        tj.TurboConfig().key_bits = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        cache_for().lengths = None
