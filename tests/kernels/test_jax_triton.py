"""`implementation="jax_triton"` without a GPU: refusals, imports, and what reaches the launcher.

The kernel itself runs in `test_gpu_mosaic_attention.py`. Here a stand-in for
`jax_triton.triton_call` computes, in float64 numpy, what the launcher asks the kernel for: the
adapter and the launcher are then held to the reference, and layouts, units and masks with them.
"""

import ast
import functools
import importlib.util
import math
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from pallas_kernels.upstream_triton import attention as launcher
from tests.attention.attention_helpers import EXACT, SAS_2, SAS_E, tensors
from tests.oracles.softmax import exponential as oracle_exponential
from turbojax import _device
from turbojax.attention.options import Options
from turbojax.attention.turbo import jax_triton, reference
from turbojax.attention.turbo.operands import quantize_operands

KERNEL = "pallas_kernels.upstream_triton._kernel"
MODES = ("int8", "int8_fp8", "fp8")
SEES_ALL = Options(False, scale=0.15)
PAPER = tj.TurboConfig.paper()


# Refusals and imports ----------------------------------------------------------------------------


def refusal(config=PAPER, shape=(1, 8, 2, 64)):
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    options = {"options": SEES_ALL}
    return jax_triton.unsupported(query=x, key=x, value=x, config=config, **options)


@pytest.fixture
def machine(monkeypatch):
    """A function that pretends which packages and which GPU there are."""

    def pretend(packages=("jax_triton", "triton"), capability=9.0):
        found = lambda name: name if name in packages else None  # noqa: E731
        monkeypatch.setattr(importlib.util, "find_spec", found)
        monkeypatch.setattr(_device, "gpu_compute_capability", lambda: capability)

    return pretend


@pytest.mark.parametrize("mode", MODES)
def test_a_hopper_gpu_with_the_packages_runs_it(machine, mode):
    machine()
    assert refusal(tj.TurboConfig.paper(mode=mode)) is None


@pytest.mark.parametrize(
    ("config", "shape", "words"),
    [
        (tj.TurboConfig.paper(mode="float"), (1, 8, 2, 64), "mode='float' must be an 8-bit mode"),
        (
            tj.TurboConfig.paper(block_kv=48, buffer_size=48),
            (1, 8, 2, 64),
            r"block_kv=48 must be one of \(32, 64, 128\)",
        ),
        (tj.TurboConfig.paper(), (1, 8, 2, 320), "head_dim=320 must be at most 256"),
        (tj.TurboConfig.paper(), (1, 2**25, 2, 64), "too long for 32-bit offsets"),
    ],
)
def test_refusals_name_the_value(machine, config, shape, words):
    machine()
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(refusal(config, shape))


def test_missing_packages_are_named(machine):
    machine(packages=())
    assert refusal() == "not installed: jax_triton and triton; pip install 'jax-triton>=0.3.1'"
    machine(packages=("triton",))
    assert refusal() == "not installed: jax_triton; pip install 'jax-triton>=0.3.1'"


def test_the_gpu_must_have_the_number_format(machine, monkeypatch):
    machine(capability=None)
    assert "needs an NVIDIA GPU of compute capability 8.0 or newer" in refusal()
    gpu = types.SimpleNamespace(device_kind="A100")
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    machine(capability=8.0)
    assert refusal() is None
    assert "8.9 or newer; A100 has 8.0" in refusal(tj.TurboConfig.paper(mode="fp8"))


def test_it_cannot_be_interpreted(machine):
    machine()
    with _device.interpret_kernels():
        assert refusal() == "its kernel cannot be interpreted"


@pytest.mark.slow
def test_importing_does_not_import_triton():
    modules = f"turbojax, {jax_triton.__name__}, {launcher.__name__}"
    wanted = "sorted({'triton', 'jax_triton'} & set(sys.modules))"
    code = f"import sys, {modules}; print({wanted})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_kernel_is_python_and_the_launcher_names_its_constants():
    """The constants that the launcher passes are the kernel's, where triton cannot check it."""
    path = Path(launcher.__file__).with_name("_kernel.py")
    functions = {
        node.name: node
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    kernel = functions["attention_kernel"]
    constants = {a.arg for a in kernel.args.args if a.annotation is not None}
    operands = [a.arg for a in kernel.args.args if a.annotation is None]
    calls = launched(lambda: run(*small(), tj.TurboConfig.paper()))
    assert set(calls[0].constants) == constants
    # What is not a constant comes in this order, results last.
    assert len(operands) == len(calls[0].arguments) + 2
    assert operands[-2:] == ["out", "lse"]


# The launcher's contract -------------------------------------------------------------------------


def attend_in_float64(arguments, constants, out_types):
    """What the kernel is asked for, in float64 and block by block."""
    q, q_scale, k, k_scale, v, v_scale, query_length, key_length = (
        np.asarray(x, np.float64) for x in arguments[:8]
    )
    heads, kv_heads, tokens, q_blocks, kv_blocks = arguments[8:]
    block_q, block_kv = constants["BLOCK_Q"], constants["BLOCK_N"]
    assert q.shape[1:] == (heads, q_blocks * block_q, constants["BLOCK_H"])
    assert k.shape[1:] == (kv_heads, kv_blocks * block_kv, constants["BLOCK_H"])
    assert v.shape[1:] == (kv_heads, constants["BLOCK_H"], kv_blocks * block_kv)
    group, batch, mode = heads // kv_heads, len(q), arguments[4].dtype
    k, k_scale, v, v_scale = (np.repeat(x, group, 1) for x in (k, k_scale, v, v_scale))
    rows = np.arange(tokens)
    q_scale = np.repeat(q_scale, block_q, 2)[:, :, :tokens]
    m = np.full((batch, heads, tokens), -np.inf)
    l, o = np.zeros(m.shape), np.zeros((*m.shape, constants["BLOCK_H"]))
    exp = np.exp
    if constants["POLICY"] is not None:
        _, threshold, is_base_2 = constants["POLICY"]
        unit = math.log2(math.e) if is_base_2 else 1.0
        exp = oracle_exponential((threshold / unit, "2" if is_base_2 else "e"))
    for j in range(kv_blocks):
        keys = np.arange(j * block_kv, (j + 1) * block_kv)
        s = q[:, :, :tokens] @ np.swapaxes(k[:, :, keys], 2, 3) * constants["SCALE"]
        s = s * q_scale[..., None] * k_scale[:, :, j, None, None]
        if constants["SOFT_CAP"] is not None:
            s = constants["SOFT_CAP"] * np.tanh(s / constants["SOFT_CAP"])
        see = keys < key_length[:, None, None, None]
        see = see & (rows < query_length[:, None])[:, None, :, None]
        if constants["LEFT"] is not None:
            see = see & (keys >= rows[:, None] - constants["LEFT"])
        if constants["RIGHT"] is not None:
            see = see & (keys <= rows[:, None] + constants["RIGHT"])
        s = np.where(see, s, -np.inf)
        top = s.max(-1)
        new = np.maximum(m, top)
        base = np.where(np.isneginf(new), 0.0, new)
        p = np.where(see, exp(np.minimum(s - base[..., None], 0)), 0.0)
        if mode == jnp.int8:
            scale = exp(np.minimum(top - base, 0))[..., None] / 119
            codes, scale = np.rint(p / np.where(scale == 0, 1, scale)), scale
        else:
            codes, scale = np.asarray(jnp.asarray(p * 448, jnp.float32), np.float32), 1 / 448
            codes = codes.astype(jnp.float8_e4m3fn).astype(np.float64)
        product = codes @ np.swapaxes(v[..., keys], 2, 3) * scale * v_scale[:, :, j, None, None]
        alpha = np.exp(m - base)
        o, l, m = o * alpha[..., None] + product, l * alpha + p.sum(-1), new
    some = l > 0
    l = np.where(some, l, 1)
    o = np.moveaxis(o / l[..., None], 1, 2)[..., : constants["HEAD_DIM"]]
    residual = np.where(some, m + np.log(l), -np.inf)
    residual = np.moveaxis(residual, 1, 2)
    return tuple(x.astype(t.dtype) for x, t in zip((o, residual), out_types, strict=True))


def launched(call):
    """The launches that `call` makes, with the stand-in in triton's place."""
    calls = []

    def triton_call(*arguments, kernel, out_type, grid, num_warps, num_stages, **constants):
        calls.append(types.SimpleNamespace(**locals()))

        def on_host(*arrays):
            return attend_in_float64((*arrays, *arguments[8:]), constants, out_type)

        assert all(isinstance(x, int) for x in arguments[8:])
        return jax.pure_callback(on_host, out_type, *arguments[:8])

    fakes = {
        "jax_triton": types.SimpleNamespace(triton_call=triton_call),
        KERNEL: types.SimpleNamespace(attention_kernel="the kernel"),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, module in fakes.items():
            patch.setitem(sys.modules, name, module)
        call()
    return calls


def small(seed=0, shape=(2, 40, 70, 4, 2, 48), dtype=jnp.float32):
    lengths = jnp.asarray([70, 33], jnp.int32), jnp.asarray([40, 21], jnp.int32)
    return *tensors(seed, *shape, dtype), *reversed(lengths)


def run(*operands, options=SEES_ALL):
    """`jax_triton.attention` traced anew: its own cache must not keep the stand-in."""
    *operands, config = operands
    return jax_triton.attention.__wrapped__(*operands, config=config, options=options)


CASES = {
    "plain": Options(False, scale=0.15),
    "causal": Options(True, scale=0.15),
    "causal window": Options(True, (9, 4), scale=0.15),
    "window": Options(False, (9, 4), scale=0.15),
    "soft cap": Options(False, scale=0.15, logits_soft_cap=3.0),
    "negative scale": Options(False, scale=-0.2),
}


PAIRS = [
    (case, (EXACT, SAS_E, SAS_2)[i % 3], MODES[(i + i // 3) % 3]) for i, case in enumerate(CASES)
]


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(("case", "softmax", "mode"), PAIRS)
def test_what_is_launched_is_the_reference(case, softmax, mode):
    config = tj.TurboConfig(mode=mode, softmax=softmax, block_q=16, block_kv=32, buffer_size=32)
    options = {"options": CASES[case]}
    got = []
    launched(lambda: got.extend(run(*small(), config, **options)))
    want = reference.attention(*small(), config=config, **options)
    # Weights are rounded to codes of 8 bits: a few may fall to the other side of a tie.
    np.testing.assert_allclose(got[1], want[1], atol=2e-6)
    difference = np.abs(np.asarray(got[0], np.float64) - np.asarray(want[0]))
    assert np.median(difference) < 1e-6
    assert difference.max() < 0.02


def test_the_grid_covers_all_queries_and_results_come_as_the_caller_wants_them():
    config = tj.TurboConfig.paper(block_q=16)
    q, k, v, *lengths = small(dtype=jnp.bfloat16)
    (call,) = launched(lambda: run(q, k, v, *lengths, config))
    assert call.grid == -(-40 // call.constants["BLOCK_M"]) * 2 * 4
    assert [(x.shape, x.dtype) for x in call.out_type] == [
        ((2, 40, 4, 48), jnp.bfloat16),
        ((2, 40, 4), jnp.float32),
    ]
    assert (call.constants["HEAD_DIM"], call.constants["BLOCK_H"]) == (48, 64)


def test_older_jax_triton_is_told_the_shape_by_its_old_name():
    def triton_call(*arguments, kernel, out_shape, grid, **constants):
        return [jnp.zeros(x.shape, x.dtype) for x in out_shape]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "jax_triton", types.SimpleNamespace(triton_call=triton_call))
        patch.setitem(sys.modules, KERNEL, types.SimpleNamespace(attention_kernel=None))
        out, residual = run(*small(), tj.TurboConfig.paper())
    assert (out.shape, residual.shape) == ((2, 40, 4, 48), (2, 40, 4))


@pytest.mark.fuzz
def test_vmap_folds_the_axis_into_the_batch():
    config = tj.TurboConfig(mode="int8", softmax=EXACT, block_q=16, block_kv=32, buffer_size=32)
    q, k, v, query_length, key_length = small()
    many = jnp.stack([q, 2 * q, -q])
    results = {}

    def both():
        over = functools.partial(run, options=CASES["causal"])
        mapped = jax.vmap(lambda q, n: over(q, k, v, n, key_length, config))
        lengths = jnp.stack([query_length, query_length - 1, query_length])
        results["mapped"] = jax.jit(mapped)(many, lengths)
        results["looped"] = [
            over(q, k, v, n, key_length, config) for q, n in zip(many, lengths, strict=True)
        ]
        twice = jax.vmap(jax.vmap(lambda q, k: over(q, k, v, query_length, key_length, config)[0]))
        results["twice"] = twice(many[:, None], jnp.stack([k, k, k])[:, None])

    calls = launched(both)
    # Traced once as it is, then launched with three times the batch.
    assert {call.arguments[0].shape[0] for call in calls} == {2, 3 * 2}
    for i, looped in enumerate(results["looped"]):
        for a, b in zip(results["mapped"], looped, strict=True):
            np.testing.assert_array_equal(a[i], b)
    np.testing.assert_array_equal(results["twice"][0, 0], results["looped"][0][0])


@pytest.mark.slow
def test_the_launcher_names_what_it_cannot_do():
    operands = quantize_operands(*small(), tj.TurboConfig.paper(block_kv=16, buffer_size=16))
    call = functools.partial(
        launcher.attention,
        *operands,
        *small()[3:],
        tokens=40,
        out_dtype=jnp.float32,
        left=None,
        right=None,
        soft_cap=None,
        exponential=None,
    )
    with pytest.raises(ValueError, match=r"block_kv=16 must be one of \(32, 64, 128\)"):
        call(scale=1.0)
    with pytest.raises(ValueError, match=r"scale=-1.0 must not be negative"):
        call(scale=-1.0)
