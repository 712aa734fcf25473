"""Every op through `jax.export`, and through what jax has to find errors with."""

import functools
import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

import turbojax as tj
from benchmarks.device.sanitize import as_on_an_h100
from benchmarks.device.sanitizer_cases import CASES as KERNELS
from tests.contracts.manual_cases import TOKENS, B
from tests.contracts.op_cases import CASES, decoder
from turbojax import _pytrees, models, parallel
from turbojax.flax import linen
from turbojax.models.generation.sampling import Sampling, sample, sampling_rows
from turbojax.models.lora import Adapters

TRITON = export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")


# What files say of pytrees -----------------------------------------------------------------------

# Files that were written once must be read: these names never change.
NAMES = """
Adapter Adapters CacheSide Decoder E4m3Cache ExactCache Fp8Tokens Images Int4Cache Int4Weight
Int8Cache K8v4Cache KeyStatistics KiviCache Kv4Cache LatentCache LatentPages LayerWeights LoraLinear
ModelCaches PagedCache PagedLayer ProgressiveCache Projection QuantizedDecoder QuantizedExperts
QuantizedLayer QuantizedLinear QuantizedMlp Rotation SamplingRows SoftTokens VisionModel
"""
PROGRESSIVE = (
    '{"static": {"config": {"class": "TurboConfig", "fields": {"block_kv": 16, "block_q": 16, '
    '"buffer_size": 32, "first_tokens": null, "flush": "oldest", "gradient": "float", '
    '"head_priority": "gap_std", "heads_per_group": null, "key_bits": 4, "low_bits": 2, '
    '"mode": "int8_fp8", "num_low_bit_key_heads": 0, "num_low_bit_value_heads": 0, '
    '"softmax": {"class": "SAS", "fields": {"base": "2", "threshold": -6.0}}, "value_bits": 4}}, '
    '"dtype": {"dtype": "bfloat16"}, "max_length": 40, "window": null}, "version": 1}'
)


def both_ways(cls):
    """What `jax.export` calls to write and to read the static fields of a class."""
    name, fields = f"turbojax.{cls.__name__}", _pytrees.static_fields(cls)
    write = functools.partial(_pytrees._write, name, fields)
    return write, functools.partial(_pytrees._read, name, fields)


def test_names_stay():
    assert sorted(_pytrees.PYTREES) == [f"turbojax.{name}" for name in sorted(NAMES.split())]


def test_the_format_stays():
    write, read = both_ways(tj.ProgressiveCache)
    config = tj.TurboConfig(block_q=16, block_kv=16, softmax=tj.SAS(base="2"))
    cache = tj.init_cache(1, 40, 1, 16, config=config)
    fields = (cache.config, cache.max_length, cache.dtype, cache.window)
    assert write(fields) == PROGRESSIVE.encode()
    assert read(PROGRESSIVE.encode()) == fields
    later = json.loads(PROGRESSIVE)
    del later["static"]["window"], later["static"]["config"]["fields"]["flush"]
    assert read(json.dumps(later).encode()) == fields  # what an older version did not know


def test_what_is_no_such_format_is_refused():
    _, read = both_ways(tj.ProgressiveCache)
    good = json.loads(PROGRESSIVE)

    def refused(words, **change):
        with pytest.raises(ValueError, match=words):
            read(json.dumps(good | change).encode())

    refused(
        "turbojax.ProgressiveCache of an exported function has version 2, must have 1", version=2
    )
    static = good["static"]
    refused("must hold .'config', 'max_length'", static=static | {"color": 1})
    refused("has no max_length", static={"config": static["config"]})
    refused("config=.*Kv9.* is unknown here", static=static | {"config": {"class": "Kv9"}})
    wrong = {"class": "TurboConfig", "fields": {"key_bits": 7}}
    refused("key_bits=7 must be one of", static=static | {"config": wrong})
    write, _ = both_ways(models.Decoder)
    axes = parallel.Axes("data", mesh=jax.make_mesh((1,), ("data",)))
    with pytest.raises(TypeError, match="turbojax.Decoder.axes=Axes.* cannot be serialized"):
        write((None, None, axes))


def test_numbers_and_dtypes_come_back():
    write, read = both_ways(Adapters)
    assert read(write((0.25,))) == (0.25,)
    write, read = both_ways(tj.CacheSide)
    assert read(write(((4, 2), True, None))) == ((4, 2), True, None)
    write, read = both_ways(tj.LatentCache)
    static = (np.int64(64), "turbo4", 128, jnp.dtype("float8_e4m3fn"), 0)
    assert read(write(static)) == static


# Files -------------------------------------------------------------------------------------------


def exported(name, arguments=None):
    call, given = CASES[name]()
    return export.export(jax.jit(call))(*(given if arguments is None else arguments))


@pytest.mark.quick(slow=4)
@pytest.mark.parametrize("name", CASES)
def test_pytrees_come_back(name):
    pytest.importorskip("flatbuffers")
    before = exported(name)
    after = export.deserialize(before.serialize())
    for part in ("in_tree", "out_tree", "in_avals", "out_avals"):
        assert getattr(after, part) == getattr(before, part)


OTHER_PROCESS = """
import pickle, sys
from pathlib import Path
import jax
from jax import export
import turbojax.models, turbojax.smoothing

for path in sorted(Path(sys.argv[1]).glob("*.exported")):
    leaves = pickle.loads(path.with_suffix(".in").read_bytes())
    call = export.deserialize(bytearray(path.read_bytes()))
    arguments, _ = jax.tree.unflatten(call.in_tree, leaves)
    found = [jax.device_get(x) for x in jax.tree.leaves(call.call(*arguments))]
    path.with_suffix(".out").write_bytes(pickle.dumps(found))
"""


def same_elsewhere(names, folder):
    """Calls of exported functions in a process that knows nothing but their files."""
    import pickle

    pytest.importorskip("flatbuffers")
    for i, name in enumerate(names):
        call, arguments = CASES[name]()
        (folder / f"{i}.exported").write_bytes(exported(name).serialize())
        leaves = [np.asarray(x) for x in jax.tree.leaves(arguments)]
        (folder / f"{i}.in").write_bytes(pickle.dumps(leaves))
    subprocess.run([sys.executable, "-c", OTHER_PROCESS, str(folder)], check=True)
    for i, name in enumerate(names):
        call, arguments = CASES[name]()
        found = pickle.loads((folder / f"{i}.out").read_bytes())
        wanted = jax.tree.leaves(jax.jit(call)(*arguments))
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other, name)


@pytest.mark.slow
def test_a_models_step_is_the_same_in_another_process(tmp_path):
    same_elsewhere(["a model's step", "kv4", "pages of codes"], tmp_path)


@pytest.mark.fuzz
@pytest.mark.parametrize("part", range(6))
def test_everything_is_the_same_in_another_process(part, tmp_path):
    same_elsewhere(list(CASES)[part::6], tmp_path)


# Symbolic sizes ----------------------------------------------------------------------------------

# They make caches inside, or choose blocks of queries by how many sequences there are; the others
# have sequences elsewhere than in the first axis.
OF_KNOWN_SIZE = ("progressive of two bits", "window of pages", "layer of paged")
ELSEWHERE = ("scan over layers", "mapped", "merged", "smoothing")
ANY_NUMBER = [name for name in CASES if name not in OF_KNOWN_SIZE + ELSEWHERE]


def symbolic(name, axis, size, symbol):
    """A call exported with all arrays' sizes along one axis left open, where they are `size`."""
    call, arguments = CASES[name]()
    scope = export.SymbolicScope()
    (unknown,) = export.symbolic_shape(symbol, scope=scope)

    def shape(x):
        sizes = list(x.shape)
        if x.ndim > axis and sizes[axis] == size:
            sizes[axis] = unknown
        return jax.ShapeDtypeStruct(tuple(sizes), x.dtype)

    return export.export(jax.jit(call))(*jax.tree.map(shape, arguments))


@pytest.mark.quick(1, slow=4)
@pytest.mark.parametrize("name", ANY_NUMBER)
def test_there_may_be_any_number_of_sequences(name):
    found = symbolic(name, 0, B, "sequences")
    assert any("sequences" in str(x.shape) for x in found.out_avals)


@pytest.mark.quick(1, slow=3)
@pytest.mark.parametrize(
    ("name", "symbol"),
    [
        ("int4", "tokens"),
        ("exact prompt", "tokens"),
        ("exact cache", "tokens"),
        ("latent", "tokens"),
        ("turbo", "16*blocks"),
        ("kv4", "128*blocks"),
        ("pages of codes", "128*blocks"),
    ],
)
def test_there_may_be_any_number_of_tokens_or_of_blocks(name, symbol):
    size = 5 if name == "int4" else TOKENS
    assert symbol[-6:] in str(symbolic(name, 1, size, symbol).in_avals)


def test_kernels_take_no_symbolic_sizes():
    (batch,) = export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((batch, 16, 2, 16), jnp.float32)
    call = jax.jit(functools.partial(tj.turbo_attention, implementation="triton"))
    with pytest.raises(NotImplementedError, match="kernels take no symbolic sizes, such as b"):
        export.export(call)(x, x, x)


# GPUs --------------------------------------------------------------------------------------------


def for_cuda(name, **options):
    call, arguments = KERNELS[name].build()
    with as_on_an_h100():
        return export.export(jax.jit(call), platforms=["cuda"], **options)(*arguments)


@pytest.mark.quick(1, slow=2)
@pytest.mark.parametrize(
    "name", ["fp8 tokens, Hopper", "cache, written, Hopper", "attention, int8_fp8, Hopper"]
)
def test_kernels_of_hopper_are_exported_from_a_cpu(name):
    found = for_cuda(name)
    assert found.platforms == ("cuda",)
    assert "mosaic_gpu" in found.mlir_module()


@pytest.mark.quick(1, slow=1)
@pytest.mark.parametrize("name", ["fp8 tokens", "kv4, decode", "pooled"])
def test_kernels_of_triton_are_exported_where_they_may(name):
    """jax promises nothing of their format, so that it must be told to go on."""
    if name == "fp8 tokens":
        with pytest.raises(ValueError, match=re.escape("__gpu$xla.gpu.triton")):
            for_cuda(name)
    found = for_cuda(name, disabled_checks=[TRITON])
    assert found.platforms == ("cuda",)
    assert "triton" in found.mlir_module()


IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")


@pytest.mark.quick(1, slow=2)
@pytest.mark.parametrize("name", CASES)
def test_no_nan_is_made_and_thrown_away(name):
    """Outside `jit`, where jax looks at what every operation gives."""
    call, arguments = CASES[name]()
    with jax.debug_nans(True):
        found = call(*arguments)
    for x in jax.tree.leaves(found):
        assert not np.any(np.isnan(np.asarray(x, np.float32)))


def test_nan_trips():
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        tj.sas_softmax(jnp.full((1, 4), jnp.nan))


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("name", CASES)
def test_infinite_results_alone_trip(name):
    """Under `jit`: the log-sum-exp of a query that sees nothing is -inf, and nothing else is."""
    call, arguments = CASES[name]()
    call = jax.jit(call)
    found = [np.asarray(x, np.float32) for x in jax.tree.leaves(call(*arguments))]
    infinite = [x for x in found if np.isinf(x).any()]
    for x in infinite:
        assert np.all(x[np.isinf(x)] == -np.inf)
    with jax.debug_infs(True):
        if infinite:
            with pytest.raises(FloatingPointError, match="inf"):
                call(*arguments)
        else:
            call(*arguments)


def abstract(call, arguments):
    """Shapes and dtypes of results, traced anew."""
    traced = jax.eval_shape(lambda *x: call(*x), *arguments)
    return jax.tree.map(lambda x: (x.shape, x.dtype), traced)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", CASES)
def test_no_tracer_leaks_and_64_bits_change_no_dtype(name):
    call, arguments = CASES[name]()
    wanted = abstract(call, arguments)
    with jax.checking_leaks():
        assert abstract(call, arguments) == wanted
    # With 64 bits, numbers of Python and jax's counters are wide: promotion must be the usual one.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        assert abstract(call, arguments) == wanted


@pytest.mark.slow
def test_64_bits_change_no_bits():
    call, arguments = CASES["kv4"]()
    wanted = jax.jit(lambda *x: call(*x))(*arguments)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        found = jax.jit(lambda *x: call(*x))(*arguments)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)


# Keys --------------------------------------------------------------------------------------------


@functools.cache
def drawn(implementation):
    """Tokens that are sampled, a rotation of codes, and weights; with some default of keys."""
    with jax.default_prng_impl(implementation):
        logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 32)), jnp.float32)
        rows = sampling_rows([Sampling(temperature=1.0, seed=i) for i in range(4)])
        return sample(logits, rows, "draw"), tj.polar.rotation(64, seed=3).signs


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_samples_and_rotations_do_not_depend_on_the_kind_of_keys(implementation):
    """Random weights do, as jax's own numbers; nobody's text and no codes may."""
    for one, other in zip(*map(drawn, (implementation, IMPLEMENTATIONS[0])), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.quick(1, slow=1)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_modules_take_keys_of_any_kind(implementation):
    """Typed and raw ones, of which a raw one has the default's kind."""
    module, x = linen.TurboAttention(32, 2), jnp.zeros((1, 4, 32))
    with jax.default_prng_impl(implementation):
        typed, raw = jax.random.key(1), jax.random.PRNGKey(1)
        assert raw.shape == jax.random.key_data(typed).shape
        init = jax.jit(module.init)
        for one, other in zip(*map(jax.tree.leaves, (init(typed, x), init(raw, x))), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_random_models_are_made_with_any_kind(implementation):
    with jax.default_prng_impl(implementation):
        made = models.random_decoder(decoder().config, seed=1)
        drawn = models.Transformer(decoder().config, rngs=nnx.Rngs(0))
    for x in jax.tree.leaves((made, nnx.to_pure_dict(nnx.state(drawn)))):
        assert np.all(np.isfinite(np.asarray(x, np.float32)))
