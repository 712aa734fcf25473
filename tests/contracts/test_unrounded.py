"""Short calls on Hopper, which cuDNN answers sooner: which ones, and what stays as it is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import turbojax as tj
from tests.attention.attention_helpers import SAS_E, tensors
from turbojax import _device
from turbojax.attention import cudnn
from turbojax.attention.options import Options
from turbojax.attention.turbo import unrounded

CAUSAL = Options(True, scale=0.1)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(_device, "gpu_compute_capability", lambda: 9.0)
    monkeypatch.setattr(cudnn, "missing", lambda: None)


@pytest.fixture
def calls(monkeypatch):
    """Shapes that cuDNN was called with, on a device that would call it; XLA answers."""
    seen = []

    def attend(query, key, value, *, options):
        seen.append(query.shape)
        return cudnn_attend(query, key, value, options=options, implementation="xla")

    cudnn_attend = cudnn.attend
    monkeypatch.setattr(cudnn, "attend", attend)
    monkeypatch.setattr(unrounded, "is_faster", lambda *_, **__: True)
    return seen


def chosen(tokens, group=4, head_dim=128, size=None, options=CAUSAL, dtype=jnp.bfloat16, **config):
    query, key = (
        jax.ShapeDtypeStruct((2, n, heads, head_dim), dtype)
        for n, heads in ((tokens, 2 * group), (size or tokens, 2))
    )
    return unrounded.is_faster(query, key, tj.TurboConfig(**config), options)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("least", "group", "head_dim"),
    [
        (1024, 4, 128),
        (2048, 2, 128),
        (2048, 1, 128),
        (4096, 4, 64),
        (4096, 1, 64),
        (4096, 1, 80),
        (8192, 2, 256),
        (8192, 2, 200),
    ],
)
def test_from_how_many_tokens_rounding_pays(least, group, head_dim):
    """Of causal calls; half as many where every query sees all."""
    for options, tokens in ((CAUSAL, least), (Options(False, scale=0.1), least // 2)):
        assert not chosen(tokens, group, head_dim, options=options)
        assert chosen(tokens - 1, group, head_dim, options=options)
    assert chosen(1, group, head_dim)


@pytest.mark.usefixtures("hopper")
def test_a_window_counts_as_what_is_visible():
    assert chosen(2**15, options=Options(True, (510, 0), scale=0.1))
    assert not chosen(2**15, options=Options(True, (511, 0), scale=0.1))
    assert chosen(2**15, options=Options(True, (510, 510), scale=0.1))  # causal: none to the right


@pytest.mark.usefixtures("hopper")
def test_few_queries_do_not_pay_for_many_keys():
    assert chosen(16, size=2**15, options=Options(False, scale=0.1))


@pytest.mark.usefixtures("hopper")
def test_where_nothing_is_rounded_cudnn_attends_at_every_length():
    assert chosen(2**15, mode="float")


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "changes",
    [
        {"softmax": SAS_E},
        {"dtype": jnp.float32},
        {"head_dim": 12},
        {"size": 65},
        {"options": Options(True, scale=0.1, logits_soft_cap=5.0)},
        {"options": Options(False, (5, 0), scale=0.1)},
        {"options": Options(True, scale=-0.1)},
        {"options": Options(True, scale=0.0)},
    ],
    ids=str,
)
def test_what_cudnn_does_not_take(changes):
    assert chosen(64)
    assert not chosen(64, **changes)


@pytest.mark.usefixtures("hopper")
def test_processes_with_several_devices_round(monkeypatch):
    """Arrays may be sharded in ways that cuDNN refuses."""
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert not chosen(64)


@pytest.mark.usefixtures("hopper")
def test_without_cudnn_it_rounds(monkeypatch):
    monkeypatch.setattr(cudnn, "missing", lambda: "cuDNN is not detected.")
    assert not chosen(64)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there may be a cuDNN")
def test_jax_says_that_cudnn_is_missing():
    assert "cuDNN" in cudnn.missing()


def test_other_devices_round(monkeypatch):
    monkeypatch.setattr(cudnn, "missing", lambda: None)
    for capability in (None, 8.0, 8.9, 10.0):
        monkeypatch.setattr(_device, "gpu_compute_capability", lambda c=capability: c)
        assert not chosen(64)


def test_a_short_call_is_exact_attention(calls):
    q, k, v = tensors(1, 2, 40, 40, 4, 2, 16, jnp.bfloat16)
    for window in ((7, 0), (7, 7)):
        options = {"is_causal": True, "local_window_size": window, "scale": 0.3}
        got = tj.turbo_attention(q, k, v, **options)
        with jax.numpy_dtype_promotion("standard"):
            want = jax.nn.dot_product_attention(q, k, v, **options)
        np.testing.assert_array_equal(got, want)
    assert calls == [q.shape] * 2


@pytest.mark.parametrize(
    "changes",
    [
        {"implementation": "xla"},
        {"return_residual": True},
        {"query_seq_lengths": jnp.asarray([40, 3])},
        {"key_value_seq_lengths": jnp.asarray([40, 3])},
    ],
    ids=lambda x: next(iter(x)),
)
def test_calls_that_stay_rounded(calls, changes):
    q, k, v = tensors(1, 2, 40, 40, 4, 2, 16, jnp.bfloat16)
    got = tj.turbo_attention(q, k, v, **changes)
    want = tj.turbo_attention(q, k, v, **(changes | {"implementation": "xla"}))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert calls == []


@pytest.mark.slow
def test_a_gradient_is_that_of_the_rounded_call(calls):
    arrays = tensors(2, 2, 40, 40, 4, 2, 16, jnp.bfloat16)
    d_out = jnp.ones(arrays[0].shape, jnp.bfloat16)

    def pulled(implementation):
        call = functools.partial(tj.turbo_attention, implementation=implementation, is_causal=True)
        out, pull = jax.vjp(call, *arrays)
        return out, pull(d_out)

    jax.tree.map(np.testing.assert_array_equal, pulled(None), pulled("xla"))
    assert calls == []

    def loss(q):
        return tj.turbo_attention(q, *arrays[1:]).astype(jnp.float32).sum()

    with pytest.raises(NotImplementedError, match="only first derivatives are supported"):
        jax.grad(lambda q: jax.grad(loss)(q).astype(jnp.float32).sum())(arrays[0])


def test_a_short_prompt_is_stored_as_any_other(calls):
    q, k, v = tensors(3, 2, 40, 40, 4, 2, 16, jnp.bfloat16)
    new = tj.init_cache(2, 64, 2, 16, dtype=jnp.bfloat16)
    out, cache = tj.prefill(q, k, v, new)
    assert calls == [q.shape]
    (rounded, _), want = tj.prefill(q, k, v, new, return_residual=True)
    assert calls == [q.shape]
    jax.tree.map(np.testing.assert_array_equal, cache, want)
    # Rounding moves outputs by a few percent, and exact attention is another number.
    error = np.abs(np.asarray(out - rounded, np.float32)).mean()
    assert 0 < error < 0.1 * np.abs(np.asarray(rounded, np.float32)).mean()


@pytest.mark.slow
def test_a_module_attends_to_short_sequences_exactly(calls):
    module = tj.flax.TurboAttention(
        64, num_heads=4, num_kv_heads=2, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    )
    x = tensors(6, 2, 40, 40, 4, 4, 16, jnp.bfloat16)[0].reshape(2, 40, 64)
    out = module(x)
    assert calls == [(2, 40, 4, 16)]
    rounded = module(x, lengths=jnp.asarray([40, 40]))
    assert len(calls) == 1
    error = np.abs(np.asarray(out - rounded, np.float32)).mean()
    assert 0 < error < 0.1 * np.abs(np.asarray(rounded, np.float32)).mean()


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, 1, 0), (3, None, 2)], ids=str)
def test_mapped_axes_are_part_of_the_batch(calls, axes):
    """For cuDNN, which takes four axes; a mapped call is the stack of its calls."""
    arrays = tensors(5, 2, 40, 40, 4, 2, 16, jnp.bfloat16)
    mapped = [
        x if axis is None else jnp.stack([x, 2 * x, -x], axis)
        for x, axis in zip(arrays, axes, strict=True)
    ]
    call = functools.partial(tj.turbo_attention, is_causal=True)
    got = jax.vmap(call, axes)(*mapped)
    assert (6, *arrays[0].shape[1:]) in calls
    for i in range(3):
        one = (x if a is None else x.take(i, a) for x, a in zip(mapped, axes, strict=True))
        np.testing.assert_array_equal(got[i], call(*one))


@pytest.mark.quick(5)
@pytest.mark.gpu
@pytest.mark.skipif(_device.needs_hopper() is not None, reason=str(_device.needs_hopper()))
@pytest.mark.parametrize(
    ("tokens", "head_dim", "dtype", "window"),
    [
        (1, 128, jnp.bfloat16, None),
        (7, 64, jnp.float16, None),
        (100, 80, jnp.bfloat16, (30, 0)),
        (513, 256, jnp.bfloat16, None),
        (1000, 128, jnp.bfloat16, (200, 0)),
    ],
)
@pytest.mark.parametrize("is_causal", [True, False])
def test_on_a_gpu(tokens, head_dim, dtype, window, is_causal):
    """Near the definition in float32, by the default call, which can be differentiated, too."""
    q, k, v = tensors(4, 3, tokens, tokens, 4, 2, head_dim, dtype)
    options = {"is_causal": is_causal, "local_window_size": window if is_causal else None}
    got = np.asarray(jax.jit(functools.partial(tj.turbo_attention, **options))(q, k, v), np.float64)
    exact = tj.TurboConfig(mode="float")
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    want = tj.turbo_attention(*wide, config=exact, implementation="xla", **options)
    want = np.asarray(want, np.float64)
    assert np.abs(got - want).mean() <= 2.0**-8 * np.abs(want).mean()
    mapped = jax.vmap(functools.partial(tj.turbo_attention, **options), (0, None, None))
    twice = np.asarray(mapped(jnp.stack([q, q]), k, v), np.float64)
    assert np.abs(twice - got).max() <= 2.0**-7 * np.abs(got).max()
    _, pull = jax.vjp(functools.partial(tj.turbo_attention, **options), q, k, v)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in pull(jnp.ones_like(q)))
