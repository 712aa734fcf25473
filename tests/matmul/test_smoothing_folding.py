"""A whole layer stays the same under every combination of smoothing, and under planted outliers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.grids import pairwise
from turbojax import smoothing as sm
from turbojax.smoothing import LayerWeights, Projection, Smoothing

WIDTH, INNER, SIZE, TOKENS = 24, 40, 8, 20
PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
SWITCH = [False, True]


def random_layer(heads=4, kv_heads=2, biases=True, seed=0, dtype=np.float64) -> LayerWeights:
    """Rows and columns of every weight differ in size."""
    rng = np.random.default_rng(seed)

    def projection(out: int, inputs: int) -> Projection:
        w = rng.standard_normal((out, inputs)) / np.sqrt(inputs)
        w = w * np.exp(rng.standard_normal((out, 1))) * np.exp(rng.standard_normal(inputs))
        return Projection(
            w.astype(dtype), rng.standard_normal(out).astype(dtype) if biases else None
        )

    return LayerWeights(
        attention_norm=rng.uniform(0.5, 2, WIDTH).astype(dtype),
        q=projection(heads * SIZE, WIDTH),
        k=projection(kv_heads * SIZE, WIDTH),
        v=projection(kv_heads * SIZE, WIDTH),
        o=projection(WIDTH, heads * SIZE),
        mlp_norm=rng.uniform(0.5, 2, WIDTH).astype(dtype),
        gate=projection(INNER, WIDTH),
        up=projection(INNER, WIDTH),
        down=projection(WIDTH, INNER),
        num_kv_heads=kv_heads,
        head_dim=SIZE,
    )


# The layer in float64, independent of turbojax. RoPE is Llama 3's scaled kind.


def frequencies() -> np.ndarray:
    plain = 500000.0 ** (-np.arange(SIZE // 2) / (SIZE // 2))
    ramp = np.clip((8192 * plain / (2 * np.pi) - 1) / 3, 0, 1)
    return plain * ((1 - ramp) / 8 + ramp)


def rotate(x: np.ndarray) -> np.ndarray:
    angle = (np.arange(x.shape[0])[:, None] * frequencies())[:, None, :]
    i, j = np.split(x, 2, axis=-1)
    return np.concatenate(
        [i * np.cos(angle) - j * np.sin(angle), j * np.cos(angle) + i * np.sin(angle)], axis=-1
    )


def linear(p: Projection, x: np.ndarray) -> np.ndarray:
    y = x @ np.asarray(p.weight, np.float64).T
    if p.output_scale is not None:
        y = y * float(p.output_scale)
    return y if p.bias is None else y + np.asarray(p.bias, np.float64)


def norm(x: np.ndarray, factor: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(factor, np.float64)


def query_key(layer: LayerWeights, hidden: np.ndarray) -> tuple[np.ndarray, ...]:
    """Key before RoPE, query and key as they are attended with."""
    x = norm(hidden, layer.attention_norm)
    query, key = (linear(p, x).reshape(len(x), -1, SIZE) for p in (layer.q, layer.k))
    rotated_query, rotated = rotate(query), rotate(key)
    if layer.key_channel_scale is not None:
        scale = np.asarray(layer.key_channel_scale, np.float64)
        rotated = rotated / scale
        rotated_query = rotated_query * np.repeat(scale, query.shape[1] // key.shape[1], axis=0)
    return key, rotated_query, rotated


def layer_output(layer: LayerWeights, hidden: np.ndarray) -> np.ndarray:
    """[T, D] -> [T, D]."""
    _, query, key = query_key(layer, hidden)
    value = linear(layer.v, norm(hidden, layer.attention_norm)).reshape(key.shape)
    key, value = (np.repeat(x, query.shape[1] // key.shape[1], axis=1) for x in (key, value))
    logits = np.einsum("tnh,snh->nts", query, key) / np.sqrt(SIZE)
    logits = np.where(np.tri(len(hidden), dtype=bool), logits, -np.inf)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    out = np.einsum("nts,snh->tnh", p / p.sum(-1, keepdims=True), value)
    hidden = hidden + linear(layer.o, out.reshape(len(hidden), -1))
    x = norm(hidden, layer.mlp_norm)
    gate = linear(layer.gate, x)
    return hidden + linear(layer.down, gate / (1 + np.exp(-gate)) * linear(layer.up, x))


def hidden_states(seed=9) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((TOKENS, WIDTH))


def key_statistics(layer: LayerWeights, hidden: np.ndarray) -> sm.KeyStatistics:
    key, _, rotated = query_key(layer, hidden)
    return sm.KeyStatistics.init(layer.num_kv_heads, SIZE).update(
        jnp.asarray(key), jnp.asarray(rotated)
    )


def smooth64(layer: LayerWeights, smoothing: Smoothing) -> LayerWeights:
    """Smoothed in float64, as numpy arrays, with statistics of `hidden_states`."""
    with jax.enable_x64(True):
        statistics = key_statistics(layer, hidden_states())
        smoothed = sm.smooth_layer(jax.tree.map(jnp.asarray, layer), statistics, smoothing)
        return jax.tree.map(np.asarray, smoothed)


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """Largest, relative to the largest value."""
    return float(np.abs(a - b).max() / np.abs(b).max())


# Equality.


@pytest.mark.quick(1, slow=1)
@pytest.mark.parametrize(
    ("inputs", "cas", "pts", "rpn", "crs"),
    [
        ("all", True, True, True, True),
        *pairwise(inputs=["constant", "all"], cas=SWITCH, pts=SWITCH, rpn=SWITCH, crs=SWITCH),
    ],
)
def test_the_layer_stays_the_same(inputs, cas, pts, rpn, crs):
    smoothing = Smoothing(cas=cas, pts=pts, rpn=rpn, crs=crs, num_pairs=2, cas_inputs=inputs)
    layer = random_layer()
    smoothed = smooth64(layer, smoothing)
    assert all(leaf.dtype == np.float64 for leaf in jax.tree.leaves(smoothed))
    # Other tokens than the statistics are of.
    hidden = hidden_states(1)
    assert difference(layer_output(smoothed, hidden), layer_output(layer, hidden)) < 1e-12
    smoothed.validate()

    # And something happened, where it should and nowhere else.
    if not pts:
        through_norm = cas and inputs == "all"
        expected = dict.fromkeys(PROJECTIONS, cas) | {
            "q": rpn or through_norm,
            "k": rpn or through_norm,
            "gate": through_norm,
        }
        for name, changed in expected.items():
            same = np.array_equal(getattr(smoothed, name).weight, getattr(layer, name).weight)
            assert same != changed
        assert np.array_equal(smoothed.mlp_norm, layer.mlp_norm) != through_norm
        assert np.array_equal(smoothed.attention_norm, layer.attention_norm) != through_norm
    assert (smoothed.key_channel_scale is not None) == crs
    assert all((getattr(smoothed, name).output_scale is not None) == pts for name in PROJECTIONS)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads", "biases"), [(3, 1, True)])
def test_the_layer_stays_the_same_whatever_its_heads(heads, kv_heads, biases):
    layer = random_layer(heads, kv_heads, biases)
    smoothed = smooth64(layer, Smoothing(num_pairs=1, cas_inputs="all"))
    hidden = hidden_states(1)
    assert difference(layer_output(smoothed, hidden), layer_output(layer, hidden)) < 1e-12
    assert (smoothed.v.bias is None) == (not biases)


def test_a_projection_computes_what_it_says():
    layer = smooth64(random_layer(), Smoothing(num_pairs=2))
    x = hidden_states()
    with jax.enable_x64(True):
        got = jax.tree.map(jnp.asarray, layer.up)(jnp.asarray(x)[None])
    np.testing.assert_allclose(got[0], linear(layer.up, x), rtol=1e-12, atol=1e-12)


# What the methods promise of what is quantized.


def test_cas_makes_columns_even_and_leaves_biases_with_their_rows():
    layer = random_layer()
    smoothed = smooth64(layer, Smoothing(pts=False, rpn=False, crs=False, cas_inputs="all"))

    def means(weight: np.ndarray) -> np.ndarray:
        return np.abs(weight).mean(0)

    down = means(smoothed.down.weight)
    np.testing.assert_allclose(down, down.mean(), rtol=1e-12)
    # The heads of a group share their values' factor: their columns are even on average.
    o = means(smoothed.o.weight).reshape(2, 2, SIZE).mean(1)
    np.testing.assert_allclose(o, o.mean(), rtol=1e-12)
    # q, k and v share an input; but CAS of the values scaled v's rows first.
    qkv = means(np.concatenate([smoothed.q.weight, smoothed.k.weight, smoothed.v.weight]))
    np.testing.assert_allclose(qkv, qkv.mean(), rtol=1e-12)
    gate_up = means(np.concatenate([smoothed.gate.weight, smoothed.up.weight]))
    np.testing.assert_allclose(gate_up, gate_up.mean(), rtol=1e-12)
    for name, rows in (("v", means(layer.o.weight).reshape(2, 2, SIZE).mean(1)), ("up", None)):
        rows = means(layer.down.weight) if rows is None else rows
        ratio = getattr(smoothed, name).bias / getattr(layer, name).bias
        np.testing.assert_allclose(ratio, (rows / rows.mean()).ravel(), rtol=1e-12)
    for name in ("q", "k", "gate", "o", "down"):
        np.testing.assert_array_equal(getattr(smoothed, name).bias, getattr(layer, name).bias)


def test_pts_is_per_tensor_and_scales_no_bias():
    layer = random_layer()
    layer = dataclasses.replace(layer, k=Projection(layer.k.weight * 1e-4, layer.k.bias))
    smoothed = smooth64(layer, Smoothing(cas=False, rpn=False, crs=False))
    for name in PROJECTIONS:
        before, after = getattr(layer, name), getattr(smoothed, name)
        with jax.enable_x64(True):
            delta = float(sm.per_tensor_scale(jnp.asarray(before.weight)))
        assert float(after.output_scale) == 1 / delta
        np.testing.assert_array_equal(after.weight, before.weight * delta)
        np.testing.assert_array_equal(after.bias, before.bias)
    assert len({float(getattr(smoothed, name).output_scale) for name in PROJECTIONS}) > 1


def test_pts_keeps_an_output_scale_that_is_there():
    projection = Projection(jnp.full((3, 2), 1e-4), output_scale=jnp.float16(3))
    delta = float(sm.per_tensor_scale(projection.weight))
    folded = sm.fold_per_tensor(projection)
    assert delta > 1
    assert folded.output_scale == np.float32(3 / delta)
    x = jnp.ones((1, 2))
    np.testing.assert_array_equal(folded(x), projection(x))
    twice = sm.fold_per_tensor(folded)  # nothing underflows any more
    assert twice.output_scale == folded.output_scale


@pytest.mark.parametrize(("rpn", "crs"), [(True, False), (True, True), (False, True)])
def test_keys_of_calibration_are_within_the_bound(rpn, crs):
    smoothing = Smoothing(cas_inputs="all", rpn=rpn, crs=crs, alpha=4.0, beta=2.0, num_pairs=2)
    layer = random_layer()
    smoothed = smooth64(layer, smoothing)
    _, _, before = query_key(layer, hidden_states())
    _, _, after = query_key(smoothed, hidden_states())
    largest = np.abs(after).max(0)
    chosen = np.zeros(largest.shape, bool)
    if crs:
        chosen = smoothed.key_channel_scale != 1
        assert chosen.sum() == 2 * 2 * 2
    if rpn:
        pairs = np.hypot(*np.split(after, 2, axis=-1)).max(0)
        unscaled = ~chosen[:, : SIZE // 2]
        np.testing.assert_allclose(pairs[unscaled], 1 / 4, rtol=1e-12)
        np.testing.assert_allclose(largest[chosen], 1 / 2, rtol=1e-12)
    else:
        others = np.where(chosen, np.nan, np.abs(before).max(0))
        size = np.broadcast_to(np.nanmedian(others, 1, keepdims=True), chosen.shape)
        np.testing.assert_allclose(largest[chosen], size[chosen], rtol=1e-12)
        np.testing.assert_allclose(largest[~chosen], others[~chosen], rtol=1e-12)


def test_zero_columns_pairs_and_projections_stay_finite():
    layer = random_layer(biases=False)
    weights = {name: getattr(layer, name).weight.copy() for name in PROJECTIONS}
    weights["o"][:, 3] = 0
    weights["down"][:] = 0
    weights["k"][[1, 1 + SIZE // 2]] = 0  # a pair of the first head
    weights["k"][SIZE:] = 0  # the second head
    weights["gate"][:, 5] = weights["up"][:, 5] = 0
    zeroed = {name: Projection(w) for name, w in weights.items()}
    layer = dataclasses.replace(layer, **zeroed)
    for crs in (False, True):
        smoothing = Smoothing(cas_inputs="all", crs=crs, num_pairs=2)
        smoothed = smooth64(layer, smoothing)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(smoothed))
        hidden = hidden_states(1)
        assert difference(layer_output(smoothed, hidden), layer_output(layer, hidden)) < 1e-12


# Dtypes, transforms, refusals.


@pytest.mark.slow
def test_smoothing_under_jit():
    layer = random_layer(dtype=np.float32)
    statistics = key_statistics(layer, hidden_states())
    smoothing = Smoothing(num_pairs=2, cas_inputs="all")
    want = sm.smooth_layer(layer, statistics, smoothing)
    got = jax.jit(sm.smooth_layer, static_argnums=2)(layer, statistics, smoothing)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)


def test_smoothing_nothing_changes_nothing():
    layer = random_layer(dtype=np.float32)
    none = Smoothing(cas=False, pts=False, rpn=False, crs=False)
    jax.tree.map(np.testing.assert_array_equal, sm.smooth_layer(layer, None, none), layer)
    with_cas = sm.smooth_layer(layer, None, Smoothing(rpn=False, crs=False))
    assert with_cas.key_channel_scale is None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"alpha": 0.0}, ValueError),
        ({"beta": float("inf")}, ValueError),
        ({"beta": None}, TypeError),
        ({"alpha": "8"}, TypeError),
        ({"num_pairs": -1}, ValueError),
        ({"num_pairs": 1.5}, TypeError),
        ({"cas_inputs": "some"}, ValueError),
    ],
)
def test_smoothing_is_validated_at_birth(options, error):
    with pytest.raises(error, match=next(iter(options))):
        Smoothing(**options)


def test_what_norms_write_is_smoothed_unless_it_shall_stay():
    layer = random_layer(dtype=np.float32)
    parts = {"pts": False, "rpn": False, "crs": False}
    default, every, constant = (
        sm.smooth_layer(layer, None, Smoothing(**parts, **inputs))
        for inputs in ({}, {"cas_inputs": "all"}, {"cas_inputs": "constant"})
    )
    jax.tree.map(np.testing.assert_array_equal, default, every)
    np.testing.assert_array_equal(constant.mlp_norm, layer.mlp_norm)
    assert not np.array_equal(default.mlp_norm, layer.mlp_norm)


def test_smooth_layer_refuses():
    layer = random_layer(dtype=np.float32)
    statistics = key_statistics(layer, hidden_states())
    fitting = Smoothing(num_pairs=2)
    with pytest.raises(ValueError, match="statistics=None"):
        sm.smooth_layer(layer, None, fitting)
    with pytest.raises(ValueError, match="tokens=0"):
        sm.smooth_layer(layer, sm.KeyStatistics.init(2, SIZE), fitting)
    with pytest.raises(ValueError, match=r"must be \(2, 8\)"):
        sm.smooth_layer(layer, key_statistics(random_layer(4, 4), hidden_states()), fitting)
    with pytest.raises(ValueError, match="num_pairs=8 must be between 0 and the head's 4"):
        sm.smooth_layer(layer, statistics, Smoothing())
    bad = dataclasses.replace(statistics, absmax=statistics.absmax.at[0, 0].set(jnp.nan))
    with pytest.raises(ValueError, match="absmax must be finite"):
        sm.smooth_layer(layer, bad, fitting)
    for part in (Smoothing(cas=False, pts=False, num_pairs=2), Smoothing(rpn=False, crs=False)):
        with pytest.raises(ValueError, match="not be smoothed before"):
            sm.smooth_layer(sm.smooth_layer(layer, statistics, part), statistics, fitting)
    broken = layer.up.weight.copy()
    broken[3, 4] = np.nan
    for name, projection, error in [
        ("up", Projection(broken), ValueError),
        ("up", Projection(layer.up.weight[:-1]), ValueError),
        ("k", Projection(layer.k.weight, layer.q.bias), ValueError),
        ("o", Projection(layer.o.weight.astype(np.int32)), TypeError),
    ]:
        with pytest.raises(error, match=f"{name}.* must"):
            sm.smooth_layer(dataclasses.replace(layer, **{name: projection}), statistics, fitting)
    for heads in (3, 0):
        with pytest.raises(ValueError, match="multiple"):
            sm.smooth_layer(dataclasses.replace(layer, num_kv_heads=heads), statistics, fitting)
    with pytest.raises(ValueError, match="even"):
        sm.smooth_layer(dataclasses.replace(layer, head_dim=7), statistics, fitting)


# Planted outliers.


@jax.jit
def layer_output32(layer: LayerWeights, hidden: jax.Array) -> jax.Array:
    """The layer in float32, for comparing bits; attention without RoPE will do."""

    def norm32(x: jax.Array, factor: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)) * factor[None]

    x = norm32(hidden, layer.attention_norm)
    query, key, value = (p(x).reshape(TOKENS, -1, SIZE) for p in (layer.q, layer.k, layer.v))
    out = jax.nn.dot_product_attention(query[None], key[None], value[None])
    hidden = hidden + layer.o(out.reshape(TOKENS, -1))
    x = norm32(hidden, layer.mlp_norm)
    return hidden + layer.down(jax.nn.silu(layer.gate(x)) * layer.up(x))


@pytest.mark.parametrize("inputs", ["constant", "all"])
def test_planted_outliers_change_no_bit(inputs):
    layer = random_layer(dtype=np.float32)
    planted = sm.plant_outliers(layer, seed=3, outliers=sm.Outliers(inputs=inputs))
    hidden = jnp.asarray(hidden_states(), jnp.float32)
    np.testing.assert_array_equal(layer_output32(planted, hidden), layer_output32(layer, hidden))
    exact = difference(layer_output(planted, hidden_states()), layer_output(layer, hidden_states()))
    assert exact < 1e-12
    ratio = np.abs(np.asarray(planted.down.weight)).mean(0) / np.abs(layer.down.weight).mean(0)
    assert ratio.max() >= 16
    assert ratio.min() <= 0.5
    assert np.array_equal(planted.attention_norm, layer.attention_norm) == (inputs == "constant")
    assert np.array_equal(planted.mlp_norm, layer.mlp_norm) == (inputs == "constant")


def test_planted_keys_are_larger_in_the_pairs_asked_for():
    layer = random_layer(dtype=np.float32)
    outliers = sm.Outliers(
        key_pairs=1, key_factors=(16.0,), spread=0.0, channel_share=0.0, inputs="constant"
    )
    planted = sm.plant_outliers(layer, outliers=outliers)
    key, other = (query_key(x, hidden_states())[0] for x in (planted, layer))
    ratio = (key / other).max(0)
    np.testing.assert_array_equal(ratio[:, :4], ratio[:, 4:])
    assert sorted(ratio[0].tolist()) == sorted(ratio[1].tolist()) == [1] * 6 + [16] * 2
    np.testing.assert_array_equal(planted.up.weight, layer.up.weight)
    again, another = (sm.plant_outliers(layer, seed=s, outliers=outliers) for s in (0, 1))
    np.testing.assert_array_equal(again.k.weight, planted.k.weight)
    assert not np.array_equal(another.k.weight, planted.k.weight)


@pytest.mark.slow
def test_smoothing_takes_planted_outliers_back():
    """CAS evens out columns however they were scaled; RPN does it with pairs."""
    layer = random_layer()
    with jax.enable_x64(True):
        planted = sm.plant_outliers(jax.tree.map(jnp.asarray, layer), seed=1)
        planted = jax.tree.map(np.asarray, planted)
    for crs in (False, True):
        smoothing = Smoothing(pts=False, crs=crs, num_pairs=1)
        a, b = (smooth64(x, smoothing) for x in (layer, planted))
        for name in ("o", "down"):
            # Up to the target, which is the mean of the columns.
            ratio = getattr(b, name).weight / getattr(a, name).weight
            np.testing.assert_allclose(ratio, ratio[0, 0], rtol=1e-12)
        if not crs:
            key, other = (query_key(x, hidden_states())[2] for x in (a, b))
            np.testing.assert_allclose(key, other, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"key_pairs": -1}, ValueError),
        ({"key_pairs": 1.0}, TypeError),
        ({"key_factors": (3.0,)}, ValueError),
        ({"key_factors": ()}, ValueError),
        ({"channel_factors": (0.0,)}, ValueError),
        ({"spread": -1.0}, ValueError),
        ({"channel_share": 1.5}, ValueError),
        ({"inputs": "none"}, ValueError),
    ],
)
def test_outliers_are_validated_at_birth(options, error):
    with pytest.raises(error, match="must"):
        sm.Outliers(**options)


def test_planting_refuses_more_pairs_than_there_are():
    with pytest.raises(ValueError, match="key_pairs=5 must be at most the head's 4"):
        sm.plant_outliers(random_layer(dtype=np.float32), outliers=sm.Outliers(key_pairs=5))
