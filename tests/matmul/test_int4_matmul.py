"""The contract of `fireq.matmul`: float64 sums over codes that the oracle quantizes itself.

The reference is exact up to float32 sums: the oracle says by how much those may be off.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests.contracts.implementations import ON_CPU, interpreted
from tests.grids import pairwise
from tests.kernels.kernel_helpers import lower_for_cuda
from tests.oracles import int4 as oracle
from turbojax.matmul.int4.api import MATMUL

SCALE_DTYPES = ("e4m3", "bf16", "f16")
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
# Odd ones, those around the tiles of kernels, and a long one; each has another epilogue.
ROWS = (257, 1, 16, 66, 128, 4095)
EPILOGUES = (
    {},
    {"activation": "silu"},
    {"activation": "gelu", "bias": True},
    {"activation": "geglu"},
    {"activation": "swiglu", "bias": True, "residual": True},
    {"bias": True, "residual": True},
)


def normal(shape, seed, dtype=jnp.float32):
    x = np.random.default_rng(seed).normal(size=shape)
    return jnp.asarray(x, jnp.float32).astype(dtype)


@dataclasses.dataclass
class Call:
    """Operands of a call, and what the oracle takes."""

    x: jax.Array
    weight: tj.fireq.Int4Weight
    options: dict
    values: np.ndarray
    output_scale: np.ndarray | float

    def __call__(self, x=None, implementation=None, **options):
        x, options = self.x if x is None else x, {**self.options, **options}
        if implementation != "triton":
            return tj.fireq.matmul(x, self.weight, implementation=implementation, **options)
        with interpreted(implementation):
            return tj.fireq.matmul(x, self.weight, implementation=implementation, **options)

    def oracle(self):
        """The result in float64 and what it may be off by, the result's own rounding included."""
        options = {k: v if k == "activation" else wide(v) for k, v in self.options.items()}
        y, error = oracle.matmul(
            *oracle.quantize_tokens(wide(self.x)),
            self.values,
            output_scale=self.output_scale,
            **options,
        )
        info = jnp.finfo(self.x.dtype)
        return y, error + 0.51 * float(info.eps) * np.abs(y) + float(info.smallest_subnormal)


def wide(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def make(rows, inputs, outputs, scale_dtype="e4m3", dtype=jnp.float32, epilogue=None, **options):
    """A call with `outputs` results; in a gated one each of the two weights has as many."""
    epilogue = dict(epilogue or {})
    gated = epilogue.get("activation") in oracle.GATES
    arrays = [normal((outputs, inputs), seed) * 0.1 for seed in ((1, 2) if gated else (1,))]
    weights = [
        tj.fireq.quantize_weight(w, scale_dtype=scale_dtype, output_scale=2.0**-i, **options)
        for i, w in enumerate(arrays)
    ]
    group = options.get("group_size", 128)
    values = [oracle.quantize_weight(np.asarray(w), group, scale_dtype).values for w in arrays]
    if epilogue.pop("bias", False):
        epilogue["bias"] = normal((outputs * len(arrays),), 3)
    if epilogue.pop("residual", False):
        epilogue["residual"] = normal((rows, outputs), 4, dtype)
    return Call(
        normal((rows, inputs), 5, dtype),
        tj.fireq.gate_and_up(*weights) if gated else weights[0],
        epilogue,
        np.concatenate(values),
        np.repeat([1.0, 0.5], outputs) if gated else 1.0,
    )


def assert_near(got, want, allowed):
    finite = np.isfinite(want)
    np.testing.assert_array_equal(np.isfinite(got), finite)
    assert (np.abs(wide(got) - want) <= allowed)[finite].all()


def assert_as_the_oracle(call, implementation="xla"):
    got, (want, allowed) = call(implementation=implementation), call.oracle()
    assert (got.dtype, got.shape) == (call.x.dtype, want.shape)
    assert np.isfinite(want).all()
    assert_near(got, want, allowed)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("rows", ROWS)
def test_rows(rows):
    """Any number of tokens, with 200 inputs (no multiple of 128) and 72 outputs (none of 64)."""
    scale_dtype = SCALE_DTYPES[rows % 2]
    epilogue = EPILOGUES[rows % len(EPILOGUES)]
    assert_as_the_oracle(make(rows, 200, 72, scale_dtype, jnp.bfloat16, epilogue))


# Tokens, inputs and outputs: one of each, around the tiles of kernels, and several tiles.
SIZES = [
    (5, 300, 70),
    (1, 128, 64),
    (17, 130, 1),
    (70, 520, 200),
    (5, 1, 1),
    (300, 256, 65),
]
SIZE_GRID = [
    (*case, EPILOGUES[i % 6], DTYPES[i % 3])
    for i, case in enumerate(pairwise(size=SIZES, implementation=ON_CPU, scale_dtype=SCALE_DTYPES))
]


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize(
    ("size", "implementation", "scale_dtype", "epilogue", "dtype"),
    SIZE_GRID,
)
def test_sizes(size, implementation, scale_dtype, epilogue, dtype):
    """Epilogues and dtypes rotate through them."""
    assert_as_the_oracle(make(*size, scale_dtype, dtype, epilogue), implementation)


@pytest.mark.quick(3, slow=0)
@pytest.mark.parametrize(
    ("number", "implementation", "scale_dtype"),
    pairwise(number=range(len(EPILOGUES)), implementation=ON_CPU, scale_dtype=SCALE_DTYPES),
)
def test_epilogues(number, implementation, scale_dtype):
    """Dtypes rotate through them."""
    dtype = DTYPES[(number + (scale_dtype == "e4m3")) % 3]
    call = make(9, 200, 40, scale_dtype, dtype, EPILOGUES[number])
    assert_as_the_oracle(call, implementation)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(
    ("group_size", "scale_dtype"), [(32, "e4m3"), (32, "bf16"), (64, "bf16"), (256, "e4m3")]
)
def test_group_sizes(group_size, scale_dtype):
    assert_as_the_oracle(make(4, 300, 20, scale_dtype, group_size=group_size))


def test_the_oracle_is_close_to_the_product_itself():
    """It could be as wrong as the library: both agree with plain float products as FireQ expects.

    Weights are off by 12 % (see `test_int4_weight`), activations by 2.6 %: e4m3 has a step of
    1/16 to 1/8 of a value, uniform within it.
    """
    call = make(64, 512, 64)
    want = wide(call.x) @ wide(normal((64, 512), 1) * 0.1).T
    got, _ = call.oracle()
    assert 0.10 < np.linalg.norm(got - want) / np.linalg.norm(want) < 0.14


@pytest.mark.quick(1)
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_zero_groups_and_tokens(scale_dtype):
    """Zero weights, zero tokens: ordinary input, exact zeros, and the bias alone."""
    w = normal((40, 384), 1).at[3].set(0).at[:, 128:256].set(0)
    weight = tj.fireq.quantize_weight(w, scale_dtype=scale_dtype)
    x = normal((6, 384), 2).at[2].set(0)
    y = np.asarray(tj.fireq.matmul(x, weight))
    assert not y[:, 3].any()
    assert not y[2].any()
    assert np.abs(y[:2, :3]).min() > 0
    only = x.at[:, :128].set(0).at[:, 256:].set(0)
    assert not np.asarray(tj.fireq.matmul(only, weight)).any()
    bias = normal((40,), 3)
    np.testing.assert_array_equal(tj.fireq.matmul(only, weight, bias=bias)[1], bias)


@pytest.mark.quick(1)
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_saturating_activations(scale_dtype):
    """A scale that was rounded down makes the largest values saturate; outliers hide the rest."""
    call = make(6, 300, 40, scale_dtype)
    x = call.x.at[0].set(jnp.where(call.x[0] > 0, 448 * (1 + 2**-8), -448))
    x = x.at[1, 7].set(1e30).at[2, 9].set(-3e38).at[3, 0].set(1e5)
    call = dataclasses.replace(call, x=x)
    codes, scale = oracle.quantize_tokens(wide(x))
    assert (scale[0] * 448 < np.abs(wide(x[0]))).any()
    assert (np.abs(codes[0]) == 448).all()
    assert_as_the_oracle(call)


def test_saturating_weights():
    """Codes of -8 times the largest scale are beyond e4m3, and saturate in the table."""
    w = normal((2, 128), 1) * 10
    weight = tj.fireq.quantize_weight(w.at[:, 0].set(448))
    block = jnp.full((1, 1, 1, 64), 0x88, jnp.uint8)
    weight = dataclasses.replace(weight, codes=weight.codes.at[:, :, :1].set(block))
    values = tj.fireq.dequantize(weight)
    assert (values[0] == -448).all()
    x = jnp.full((1, 128), 448.0)
    assert tj.fireq.matmul(x, weight)[0, 0] == -448 * 448 * 128


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize(
    ("activation", "scale_dtype", "bad"),
    [
        (None, "e4m3", np.nan),
        (None, "bf16", np.inf),
        ("silu", "e4m3", -np.inf),
        ("gelu", "bf16", np.nan),
        ("swiglu", "e4m3", np.inf),
        ("geglu", "bf16", -np.inf),
    ],
)
def test_what_is_not_finite_reaches_the_result(activation, scale_dtype, bad):
    """Of a token its row, of a weight its column; of nothing else a bit changes."""
    call = make(5, 300, 40, scale_dtype, epilogue={"activation": activation})
    clean = np.asarray(call())
    x = call.x.at[3, 299].set(bad)
    wrong = normal((40, 300), 1).at[11, 299].set(bad) * 0.1
    weight = tj.fireq.quantize_weight(wrong, scale_dtype=scale_dtype)
    if activation in oracle.GATES:
        up = tj.fireq.quantize_weight(
            normal((40, 300), 2) * 0.1, scale_dtype=scale_dtype, output_scale=0.5
        )
        weight = tj.fireq.gate_and_up(weight, up)
    got = np.asarray(tj.fireq.matmul(x, weight, activation=activation))
    is_nan = np.zeros((5, 40), bool)
    is_nan[3] = is_nan[:, 11] = True
    np.testing.assert_array_equal(np.isnan(got), is_nan)
    np.testing.assert_array_equal(got[~is_nan], clean[~is_nan])


def test_what_is_not_finite_in_bias_and_residual():
    call = make(5, 300, 40, epilogue={"bias": True, "residual": True})
    bias, residual = (call.options[name] for name in ("bias", "residual"))
    got = tj.fireq.matmul(
        call.x,
        call.weight,
        bias=bias.at[1].set(jnp.nan),
        residual=residual.at[2, 3].set(jnp.inf),
    )
    assert np.isnan(got[:, 1]).all()
    assert got[2, 3] == jnp.inf
    assert np.isfinite(got).sum() == 5 * 40 - 5 - 1


@pytest.mark.slow
def test_quantized_tokens_and_leading_axes():
    call = make(24, 200, 40, dtype=jnp.bfloat16, epilogue=EPILOGUES[5])
    want = np.asarray(call())
    x = call.x.reshape(2, 3, 4, 200)
    options = {**call.options, "residual": call.options["residual"].reshape(2, 3, 4, 40)}
    for tokens in (x, tj.fireq.quantize_tokens(x)):
        got = tj.fireq.matmul(tokens, call.weight, **options)
        assert (got.shape, got.dtype) == ((2, 3, 4, 40), jnp.bfloat16)
        np.testing.assert_array_equal(np.asarray(got).reshape(24, 40), want)
    one = tj.fireq.matmul(call.x[0], call.weight, bias=call.options["bias"])
    assert one.shape == (40,)


@pytest.mark.slow
def test_transforms():
    """jit, vmap over tokens and over weights, scan over layers: the same values, twice the same."""
    calls = [make(6, 200, 200)]
    weight = tj.fireq.quantize_weight(normal((200, 200), 9))
    calls.append(dataclasses.replace(calls[0], weight=weight))
    x, weights = calls[0].x, [call.weight for call in calls]
    want = [np.asarray(call()) for call in calls]
    allowed = calls[0].oracle()[1]
    np.testing.assert_array_equal(calls[0](), want[0])
    np.testing.assert_array_equal(jax.jit(tj.fireq.matmul)(x, weights[0]), want[0])
    rows = jax.vmap(tj.fireq.matmul, in_axes=(0, None))(x, weights[0])
    assert_near(rows, wide(want[0]), 2 * allowed)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *weights)
    both = jax.vmap(tj.fireq.matmul, in_axes=(None, 0))(x, stacked)
    assert_near(both[0], wide(want[0]), 2 * allowed)

    def step(x, weight):
        x = tj.fireq.matmul(x, weight)
        return x, x

    _, layers = jax.lax.scan(step, x, stacked)
    first = tj.fireq.matmul(x, weights[0])
    np.testing.assert_array_equal(layers[0], first)
    np.testing.assert_array_equal(layers[1], tj.fireq.matmul(first, weights[1]))


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("epilogue", "scale_dtype"),
    [(EPILOGUES[4], "e4m3"), ({}, "bf16")],
)
def test_the_reference_lowers_for_a_gpu_as_bfloat16(scale_dtype, epilogue):
    """The operands are exact in it, and a GPU multiplies float32 slowly."""
    call = make(16, 256, 128, scale_dtype, jnp.bfloat16, epilogue)
    text = lower_for_cuda(lambda x: call(x, implementation="xla"), call.x)
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 1
    assert "bf16>, tensor" in products[0]
    assert "f32>" in products[0].split("->")[1]


def test_implementations():
    call = make(3, 200, 40)
    np.testing.assert_array_equal(call(implementation="xla"), call())
    assert [i.name for i in MATMUL.implementations] == ["mosaic_gpu", "triton", "xla"]
    with pytest.raises(ValueError, match="implementation='cuda' must be None or one of"):
        call(implementation="cuda")
    with pytest.raises(NotImplementedError, match="int4_matmul has no implementation='jax_triton'"):
        call(implementation="jax_triton")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what a CPU lacks")
def test_kernels_say_what_a_cpu_lacks():
    call = make(3, 200, 40)
    for name in ("triton", "mosaic_gpu"):
        with pytest.raises(NotImplementedError, match=f"int4_matmul cannot run here: {name}: "):
            tj.fireq.matmul(call.x, call.weight, implementation=name)


@pytest.mark.quick(1)
@pytest.mark.parametrize("precision", ["default", jax.lax.Precision.HIGHEST])
def test_precision_changes_nothing_in_float32(precision):
    call = make(130, 200, 40, epilogue=EPILOGUES[5])
    want = call(implementation="xla")
    np.testing.assert_array_equal(call(implementation="xla", precision=precision), want)
    both = (call(tj.fireq.quantize_tokens(call.x), precision=p) for p in (None, precision))
    np.testing.assert_array_equal(*both)

    def total(x):
        return jnp.sum(call(x, implementation="xla", precision=precision) ** 2)

    def plain(x):
        return jnp.sum(call(x, implementation="xla") ** 2)

    np.testing.assert_array_equal(jax.grad(total)(call.x), jax.grad(plain)(call.x))


@pytest.mark.parametrize(
    "precision",
    ["exact", "HIGHEST", 2, True, ("highest", "highest"), jax.lax.DotAlgorithmPreset.F32_F32_F32],
)
def test_bad_precision(precision):
    call = make(3, 200, 40)
    with pytest.raises(
        ValueError, match=r"precision=.* must be None, 'default', 'high', 'highest'"
    ):
        call(precision=precision)


def test_bad_input():
    call = make(3, 200, 40)
    x, weight = call.x, call.weight
    matmul = tj.fireq.matmul
    gated = tj.fireq.gate_and_up(weight, weight)
    with pytest.raises(TypeError, match="weight is a ArrayImpl, must be an Int4Weight"):
        matmul(x, x)
    with pytest.raises(TypeError, match="x.dtype=int32 must be"):
        matmul(x.astype(jnp.int32), weight)
    for wrong in (x[:, :-1], x[:0], jnp.float32(1)):
        with pytest.raises(ValueError, match=r"must be \[..., 200\], no axis empty"):
            matmul(wrong, weight)
    with pytest.raises(ValueError, match="activation='relu' must be None or one of"):
        matmul(x, weight, activation="relu")
    for one, activation in ((weight, "swiglu"), (weight, "geglu"), (gated, None), (gated, "silu")):
        with pytest.raises(ValueError, match="must be one of .*'geglu'.* for gated weights"):
            matmul(x, one, activation=activation)
    with pytest.raises(ValueError, match=r"bias.shape=\(40,\) must be \(80,\)"):
        matmul(x, gated, activation="swiglu", bias=jnp.ones(40))
    with pytest.raises(TypeError, match="bias.dtype=int32 must be"):
        matmul(x, weight, bias=jnp.ones(40, jnp.int32))
    with pytest.raises(ValueError, match=r"residual.shape=\(3, 41\) must be \(3, 40\)"):
        matmul(x, weight, residual=jnp.ones((3, 41)))
    with pytest.raises(TypeError, match="residual.dtype=.* must equal that of x, float32"):
        matmul(x, weight, residual=jnp.ones((3, 40), jnp.bfloat16))
    with pytest.raises(ValueError, match=r"codes.shape=\(0, 2, 64, 64\) must be"):
        matmul(x, dataclasses.replace(weight, codes=weight.codes[1:]))
    tokens = tj.fireq.quantize_tokens(x)
    with pytest.raises(TypeError, match="must be float8_e4m3fn and bfloat16"):
        matmul(dataclasses.replace(tokens, scale=tokens.scale.astype(jnp.float32)), weight)
    with pytest.raises(ValueError, match=r"x.scale.shape=\(2,\) must be \(3,\)"):
        matmul(dataclasses.replace(tokens, scale=tokens.scale[1:]), weight)
