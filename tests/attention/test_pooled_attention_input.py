"""Wrong calls of `pooled_attention`, one clear error each; and the choice of an implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from turbojax._registry import Implementation, Registry
from turbojax.attention.pooled import api

QUERY, KEY = jnp.zeros((2, 40, 4, 16)), jnp.zeros((2, 70, 2, 16))
LEVELS = jnp.ones((2, 4, 2, 3), jnp.int8)


def attend(query=QUERY, key=KEY, value=None, levels=LEVELS, **kwargs):
    value = key if value is None else value
    kwargs = {"block_q": 32, "block_kv": 32, **kwargs}
    return tj.pooled_attention(query, key, value, levels, **kwargs)


def lengths(*values):
    return jnp.asarray(values, jnp.int32)


# The call, the error, and what its message must say: value, then requirement.
CASES = {
    "query's rank": (lambda: attend(QUERY[0]), ValueError, r"\(40, 4, 16\).*\[B, T, N, H\]"),
    "key's rank": (lambda: attend(key=KEY[0]), ValueError, r"\(70, 2, 16\).*\[B, S, K, H\]"),
    "value's shape": (lambda: attend(value=KEY[:, 1:]), ValueError, r"\(2, 69, 2, 16\).*\(2, 70"),
    "batches": (lambda: attend(QUERY[:1]), ValueError, r"\(1, 40.*\(2, 70.*batch"),
    "head dims": (lambda: attend(QUERY[..., :8]), ValueError, r"4, 8\).*2, 16\).*head dim"),
    "heads": (lambda: attend(QUERY[:, :, :3]), ValueError, "3 query.*multiple of 2"),
    "no keys": (lambda: attend(key=KEY[:, :0]), ValueError, "no axis empty"),
    "integers": (lambda: attend(QUERY.astype(jnp.int8)), TypeError, "int8.*bfloat16"),
    "key's dtype": (lambda: attend(key=KEY.astype(jnp.bfloat16)), TypeError, "bfloat16.*float32"),
    "value's dtype": (lambda: attend(value=KEY.astype(jnp.float16)), TypeError, "float16.*float32"),
    "float levels": (
        lambda: attend(levels=LEVELS.astype(jnp.float32)),
        TypeError,
        "levels.dtype=float32.*integer",
    ),
    "boolean levels": (
        lambda: attend(levels=LEVELS.astype(jnp.bool)),
        TypeError,
        "levels.dtype=bool.*integer",
    ),
    "levels' rank": (
        lambda: attend(levels=LEVELS[0]),
        ValueError,
        r"levels.shape=\(4, 2, 3\).*\(2 or 1, 4 or 1, 2, 3\)",
    ),
    "levels per KV head": (
        lambda: attend(levels=LEVELS[:, :2]),
        ValueError,
        r"levels.shape=\(2, 2, 2, 3\).*4 or 1",
    ),
    "levels' batch": (
        lambda: attend(levels=jnp.concatenate([LEVELS, LEVELS])),
        ValueError,
        r"levels.shape=\(4, 4, 2, 3\).*\(2 or 1",
    ),
    "rows of levels": (
        lambda: attend(levels=LEVELS[:, :, :1]),
        ValueError,
        r"levels.shape=\(2, 4, 1, 3\).*2, 3\).*blocks of 32 queries",
    ),
    "columns of levels": (
        lambda: attend(block_kv=64),
        ValueError,
        r"levels.shape=\(2, 4, 2, 3\).*2, 2\).*blocks of 64 keys",
    ),
    "level 3": (lambda: attend(levels=3 * LEVELS), ValueError, r"\[3\].*\(0, 1, 2, 4, 8\)"),
    "level -1": (lambda: attend(levels=-LEVELS), ValueError, r"\[-1\].*\(0, 1, 2, 4, 8\)"),
    "level that wraps around": (
        lambda: attend(levels=LEVELS.astype(jnp.int32) + 256),
        ValueError,
        r"\[257\].*\(0, 1, 2, 4, 8\)",
    ),
    "no block_q": (lambda: attend(block_q=0), ValueError, "block_q=0.*at least 1"),
    "no block_kv": (lambda: attend(block_kv=0), ValueError, "block_kv=0.*at least 1"),
    "block_kv": (lambda: attend(block_kv=36), ValueError, "block_kv=36.*multiple of 8"),
    "block_q's type": (lambda: attend(block_q=32.0), TypeError, "block_q=32.0.*integer"),
    "block_kv's type": (lambda: attend(block_kv=True), TypeError, "block_kv=True.*integer"),
    "scale's type": (lambda: attend(scale=jnp.ones(())), TypeError, "scale.*Python number"),
    "infinite scale": (lambda: attend(scale=np.inf), ValueError, "scale=inf.*finite"),
    "keys' length": (
        lambda: attend(key_value_seq_lengths=lengths(70, 71)),
        ValueError,
        r"key_value_seq_lengths=\[70, 71\].*between 0 and 70",
    ),
    "queries' length": (
        lambda: attend(query_seq_lengths=lengths(-1, 40)),
        ValueError,
        r"query_seq_lengths=\[-1, 40\].*between 0 and 40",
    ),
    "lengths' shape": (
        lambda: attend(key_value_seq_lengths=lengths(7)),
        ValueError,
        r"key_value_seq_lengths.shape=\(1,\).*\(2,\)",
    ),
    "lengths' dtype": (
        lambda: attend(query_seq_lengths=jnp.ones(2)),
        TypeError,
        "query_seq_lengths.dtype=float32.*integer",
    ),
    "unknown implementation": (
        lambda: attend(implementation="cuda"),
        ValueError,
        "implementation='cuda'.*one of",
    ),
    "an implementation it has not": (
        lambda: attend(implementation="jax_triton"),
        NotImplementedError,
        "pooled_attention has no implementation='jax_triton'; it has .*'xla'",
    ),
}


@pytest.mark.quick(22, slow=0)
@pytest.mark.parametrize("name", CASES)
def test_error_names_value_and_requirement(name):
    call, error, words = CASES[name]
    with pytest.raises(error, match=words):
        call()


def test_the_good_call_is_good():
    """So that each case above fails for its own reason."""
    out, residual = attend(return_residual=True)
    np.testing.assert_allclose(residual, np.log(70), rtol=1e-6)
    assert (np.asarray(out) == 0).all()


def test_shapes_are_checked_under_jit_too():
    with pytest.raises(ValueError, match=r"levels.shape=\(2, 4, 1, 3\)"):
        jax.jit(lambda levels: attend(levels=levels))(LEVELS[:, :, :1])


def test_lengths_beyond_the_arrays_act_as_the_nearest_bound_under_jit():
    call = jax.jit(
        lambda a, b: attend(
            QUERY + 1, KEY + 1, query_seq_lengths=a, key_value_seq_lengths=b, return_residual=True
        )
    )
    got = call(lengths(99, -3), lengths(999, 70))
    want = call(lengths(40, 0), lengths(70, 70))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    got, want = (call(lengths(40, 40), lengths(n, 70))[1] for n in (-5, 0))
    np.testing.assert_array_equal(got, want)


def ones(query, key, value, levels, query_length, key_length, *, options, extras):
    """Stands for a kernel."""
    return jnp.ones_like(query), jnp.ones(query.shape[:3])


def never(**_):
    return "it never can"


def pretend(monkeypatch, registry, *implementations):
    old = getattr(api, registry)
    pretended = {x.name for x in implementations}
    rest = tuple(x for x in old.implementations if x.name not in pretended)
    monkeypatch.setattr(api, registry, Registry(old.op, (*implementations, *rest)))


def test_a_name_never_falls_back_nor_does_its_gradient(monkeypatch):
    """What cannot be differentiated is refused when it is called."""
    pretend(monkeypatch, "FORWARD", Implementation("triton", ones))
    pretend(monkeypatch, "GRADIENT", Implementation("triton", ones, never))
    words = "^the gradient of pooled_attention cannot run here: triton: it never can"
    with pytest.raises(NotImplementedError, match=words):
        attend(implementation="triton")
    assert (np.asarray(attend()) == 1).all()
    assert (np.asarray(attend(implementation="xla")) == 0).all()
    pretend(monkeypatch, "FORWARD", Implementation("triton", ones, never))
    with pytest.raises(NotImplementedError, match="^pooled_attention cannot run here: triton: it"):
        attend(implementation="triton")


def test_what_implementations_are_asked(monkeypatch):
    """Everything there is to know without looking at values."""
    asked = []

    def unsupported(*, query, key, value, levels, options, extras):
        asked.append((query.shape, key.shape, value.shape, levels.dtype, options))
        assert not extras.given
        return "not now"

    pretend(monkeypatch, "FORWARD", Implementation("triton", ones, unsupported))
    pretend(monkeypatch, "GRADIENT", Implementation("triton", ones, unsupported))
    attend(levels=LEVELS.astype(jnp.int32), is_causal=True, scale=2)
    static = api.PooledOptions(block_q=32, block_kv=32, scale=2.0, is_causal=True)
    want = (QUERY.shape, KEY.shape, KEY.shape, jnp.int8, static)
    assert asked == [want, want]
