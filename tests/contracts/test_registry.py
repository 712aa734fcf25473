"""The choice of an implementation, refusals in words; other GPUs than Hopper; numbers."""

import functools
import importlib.util
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from benchmarks.device import registers
from benchmarks.device.sanitizer_cases import CASES
from pallas_kernels import varying
from pallas_kernels.mosaic import lanes
from tests.kernels.kernel_helpers import lower_for_cuda
from turbojax import _checks, _device, caches
from turbojax._device import interpret_kernels
from turbojax._registry import Implementation, Registry
from turbojax.attention.options import Options
from turbojax.attention.turbo.api import ATTENTION
from turbojax.caches.paged import mosaic_gpu as paged
from turbojax.caches.progressive import decode_mosaic
from turbojax.caches.progressive.api import DECODE


def _registry() -> Registry:
    fast = Implementation(
        "triton", lambda: "triton", lambda *, size: None if size % 2 == 0 else f"{size=} is odd"
    )
    never = Implementation("mosaic_gpu", lambda: "mosaic", lambda **_: "needs Hopper")
    return Registry("op", (never, fast))


def test_none_takes_the_first_that_can():
    assert _registry().select(None, size=2).name == "triton"


def test_kernels_of_mosaic_that_were_never_run_here_go_after_others(monkeypatch):
    def all_of(*names):
        return Registry("op", tuple(Implementation(n, lambda: None) for n in names))

    registry = all_of("mosaic_gpu", "triton", "xla")
    for capability, chosen in ((9.0, "mosaic_gpu"), (8.0, "triton"), (10.0, "triton")):
        monkeypatch.setattr(_device, "gpu_compute_capability", lambda c=capability: c)
        assert registry.select(None).name == chosen
    # Rather than none.
    assert all_of("mosaic_gpu", "xla").select(None).name == "mosaic_gpu"
    assert registry.select("mosaic_gpu").name == "mosaic_gpu"


def test_a_named_implementation_never_falls_back():
    with pytest.raises(NotImplementedError, match="op cannot run here: mosaic_gpu: needs Hopper$"):
        _registry().select("mosaic_gpu", size=2)


def test_when_nothing_can_every_refusal_is_named():
    with pytest.raises(
        NotImplementedError, match="mosaic_gpu: needs Hopper; triton: size=3 is odd"
    ):
        _registry().select(None, size=3)


def test_unknown_and_absent_names_differ():
    with pytest.raises(ValueError, match="implementation='cuda' must be None or one of"):
        _registry().select("cuda", size=2)
    with pytest.raises(NotImplementedError, match="op has no implementation='xla'; it has"):
        _registry().select("xla", size=2)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what a CPU lacks")
def test_kernels_say_what_a_cpu_lacks():
    x = jnp.ones((1, 8, 2, 64))
    for name in ("mosaic_gpu", "triton", "jax_triton"):
        with pytest.raises(NotImplementedError, match=f"turbo_attention cannot run here: {name}: "):
            tj.turbo_attention(x, x, x, implementation=name)
    cache = tj.append(tj.init_cache(1, 8, 2, 64, dtype=jnp.float32), x, x)
    words = "triton: needs an NVIDIA GPU of compute capability 8.0 or newer; jax's default backend"
    with pytest.raises(NotImplementedError, match=words):
        tj.decode(x, cache, implementation="triton")


def test_an_implementation_that_an_op_has_not():
    x = jnp.ones((1, 8, 2, 64))
    cache = tj.append(tj.init_cache(1, 8, 2, 64, dtype=jnp.float32), x, x)
    with pytest.raises(NotImplementedError, match="decode has no implementation='jax_triton'"):
        tj.decode(x, cache, implementation="jax_triton")


def _calls(dtype=jnp.bfloat16, **options):
    """What the two registries are asked: 8 query heads on 2 KV heads of 128 channels."""
    config = tj.TurboConfig(**options)
    query, key = (jax.ShapeDtypeStruct((2, 300, n, 128), dtype) for n in (8, 2))
    cache = jax.eval_shape(lambda: tj.init_cache(2, 512, 2, 128, config=config, dtype=dtype))
    static = {"options": Options(True, scale=0.1)}
    return (
        (ATTENTION, {"query": query, "key": key, "value": key, "config": config, **static}),
        (DECODE, {"query": query.update(shape=(2, 1, 8, 128)), "cache": cache, **static}),
    )


def _pretend(monkeypatch, capability):
    """There is such a GPU, and no jax-triton."""
    monkeypatch.setattr(_device, "gpu_compute_capability", lambda: capability)
    monkeypatch.setattr(_device, "has_pallas_triton", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.mark.parametrize(
    ("capability", "expected"),
    [(9.0, "mosaic_gpu"), (10.0, "triton"), (9.1, "triton"), (8.9, "triton"), (7.5, "xla")],
)
def test_hopper_and_nothing_else_chooses_mosaic(monkeypatch, capability, expected):
    _pretend(monkeypatch, capability)
    for registry, arguments in _calls():
        assert registry.select(None, **arguments).name == expected
        if registry is DECODE and capability in (
            8.9,
            10.0,
        ):  # by name, since it was never run there
            assert registry.select("mosaic_gpu", **arguments).name == "mosaic_gpu"
        elif expected != "mosaic_gpu":
            words = f"mosaic_gpu: needs an NVIDIA GPU of compute capability .*has {capability}$"
            with pytest.raises(NotImplementedError, match=words):
                registry.select("mosaic_gpu", **arguments)


@pytest.mark.parametrize("mode", ["int8_fp8", "fp8"])
def test_ampere_decodes_in_every_mode(monkeypatch, mode):
    """It multiplies no e4m3: prompts are plain JAX's there, caches are read in int8."""
    _pretend(monkeypatch, 8.0)
    (attend, prompt), (decode, newest) = _calls(mode=mode)
    assert attend.select(None, **prompt).name == "xla"
    assert decode.select(None, **newest).name == "triton"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "float"}, "mode='float'"),
        ({"block_kv": 32, "value_bits": 2}, "block_kv=32"),
    ],
)
def test_on_hopper_the_next_takes_what_mosaic_refuses(monkeypatch, options, words):
    _pretend(monkeypatch, 9.0)
    for registry, arguments in _calls(**options):
        assert registry.select(None, **arguments).name == "triton"
        with pytest.raises(NotImplementedError, match=f"cannot run here: mosaic_gpu: .*{words}"):
            registry.select("mosaic_gpu", **arguments)


def test_mosaic_is_not_interpreted():
    for registry, arguments in _calls():
        with interpret_kernels():
            assert registry.select(None, **arguments).name == "triton"
            with pytest.raises(NotImplementedError, match="mosaic_gpu: its kernel cannot be"):
                registry.select("mosaic_gpu", **arguments)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("mode", ["int8", "int8_fp8", "fp8"])
def test_what_none_chooses_lowers_for_hopper(monkeypatch, mode):
    """Attention with its quantization, a prompt that shares it with the cache, and decode."""
    _pretend(monkeypatch, 9.0)
    config = tj.TurboConfig(mode=mode)
    query, key = (jax.ShapeDtypeStruct((2, 300, n, 128), jnp.bfloat16) for n in (8, 2))
    cache = jax.eval_shape(lambda: tj.init_cache(2, 512, 2, 128, config=config))
    attend = functools.partial(tj.turbo_attention, config=config, is_causal=True)
    text = lower_for_cuda(attend, query, key, key)
    assert "turbojax_attention_hopper" in text
    assert "turbojax_quantize_hopper" in text
    text = lower_for_cuda(tj.prefill, query, key, key, cache)
    assert "turbojax_attention_hopper" in text
    # What updates arrays in place has its name in the program only.
    assert "turbojax_compress_hopper" in str(jax.make_jaxpr(tj.prefill)(query, key, key, cache))
    new = key.update(shape=(2, 1, 2, 128))
    lower_for_cuda(tj.append, cache, new, new)
    assert "turbojax_append_hopper" in str(jax.make_jaxpr(tj.append)(cache, new, new))
    text = lower_for_cuda(tj.decode, query.update(shape=(2, 1, 8, 128)), cache)
    assert "turbojax_decode_hopper" in text


KINDS = (float, np.float16, np.float32, np.float64, np.longdouble)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_every_kind(kind):
    """Warnings are errors here: numpy warns where a comparison would round to infinity."""
    for check in (_checks.check_number, _checks.check_positive):
        check("scale", kind(0.125))
        for bad in ("inf", "-inf", "nan"):
            with pytest.raises(ValueError, match="scale=.*must be"):
                check("scale", kind(bad))


@pytest.mark.parametrize("number", [3, np.int8(3), np.uint64(3), None])
def test_integers_are_numbers(number):
    _checks.check_number("scale", number)
    _checks.check_positive("scale", number)


def test_what_no_float_holds():
    for bad in (10**400, -(10**400)):
        with pytest.raises(ValueError, match="scale=.*must be finite"):
            _checks.check_number("scale", bad)
        assert not _checks.is_finite_number(bad)
    for bad in (1j, np.complex64(1), "1", [1]):
        with pytest.raises(TypeError, match="must be a Python number"):
            _checks.check_number("scale", bad)


def test_the_longest_axis_is_cudas_first():
    """Pallas hands axes over in reverse."""
    mesh = lanes._mesh("kernel", {"tile": 70_000, "side": 2}, 1)
    assert mesh["grid_names"] == varying.all_own(["side", "tile"])
    assert mesh["grid"] == (2, 70_000)


def test_two_long_axes_are_refused():
    with pytest.raises(NotImplementedError, match="all axes but one of .* must be at most 65535"):
        lanes._mesh("kernel", {"tile": 70_000, "sequence": 80_000}, 1)


WRITING = ("cache, written, Hopper", "paged append, k8v4, Hopper", "k8v4, Hopper")


def step_with_pages():
    """A token of each sequence is stored by the kernel that attends to it."""
    cache = caches.init_layer_cache(2, 256, 2, 64, kind="turbo4", dtype=jnp.bfloat16)
    x = jnp.ones((2, 1, 2, 64), jnp.bfloat16)
    return lambda cache, x: tj.append_and_decode(x, x, x, cache), (cache, x)


@pytest.mark.parametrize(
    "build", [*(CASES[name].build for name in WRITING), step_with_pages], ids=[*WRITING, "step"]
)
def test_what_updates_arrays_is_apart_from_slices(build):
    """XLA makes one call of it and of slices beside it, whose updates are lost, but for barriers.

    GPU tests see what is lost; here each input and each result of such a call has its barrier.
    """
    call, arguments = build()
    with registers.lowering_for("9.0"):
        lowered = jax.jit(call).trace(*arguments).lower(lowering_platforms=("cuda",))
    lines = lowered.as_text().splitlines()
    updating = [x for x in lines if "@mosaic_gpu" in x and "output_operand_alias<" in x]
    assert updating
    for line in updating:
        name, count, operands = re.match(r" *(%\d+)(?::(\d+))? = .*?\((.*?)\) {", line).groups()
        results = [f"{name}#{i}" for i in range(int(count))] if count else [name]
        barriers = "\n".join(x for x in lines if "optimization_barrier" in x)
        for operand in operands.split(", "):
            assert re.search(rf"{operand} = stablehlo.optimization_barrier", barriers), operand
        for result in results:
            assert re.search(rf"optimization_barrier {result} :", barriers), result


# One case of each kernel without products of warpgroups, and the GPUs that it is offered on.
LOWERED = {
    "cache, decode, merged, Hopper": ("8.0", "8.9", "10.0"),
    "cache, 8 tokens, Hopper": ("8.0", "8.9", "10.0"),
    "paged, turbo4, Hopper": ("8.0", "8.9", "10.0"),
    "paged, bf16, Hopper": ("8.0", "8.9", "10.0"),
    "exact cache, window, Hopper": ("8.0", "8.9", "10.0"),
    "k8v4, Hopper": ("8.9", "10.0"),
}


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize(
    ("name", "capability"),
    [(name, capability) for name, found in LOWERED.items() for capability in found],
)
def test_lowers(name, capability):
    call, arguments = CASES[name].build()
    with registers.lowering_for(capability):
        lowered = jax.jit(call).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize("capability", [8.0, 8.9, 10.0])
def test_default_launches_fit_the_shared_memory(monkeypatch, capability):
    """Whatever decode takes there; what it does not take, it names."""
    monkeypatch.setattr(_device, "gpu_compute_capability", lambda: capability)
    refused = set()
    sizes = itertools.product((64, 128, 256), (4, 2), (64, 128), (1, 8, 32), (1, 32))
    for head_dim, bits, block, tokens, batch in sizes:
        config = tj.TurboConfig(key_bits=bits, value_bits=bits, block_kv=block, buffer_size=block)
        cache = jax.eval_shape(
            lambda config=config, sizes=(batch, 4096, 2, head_dim): tj.init_cache(
                *sizes, config=config
            )
        )
        query = jax.ShapeDtypeStruct((batch, tokens, 2, head_dim), jnp.bfloat16)
        refusal = decode_mosaic.unsupported(
            query=query, cache=cache, options=Options(True, scale=1.0)
        )
        if refusal is not None:
            assert refusal.endswith(f"must be at most {_device.shared_memory()}"), refusal
            refused.add((head_dim, bits, block, tokens))
        assert decode_mosaic.default_launch(query, cache).cluster == 1 or capability >= 9
    # A block of so many channels is more than an Ada holds for each of four warps.
    of_one = {x[:3] for x in refused if x[3] == 1}
    assert of_one == ({(256, 4, 128)} if capability == 8.9 else set())
    assert capability == 8.9 or not refused


@pytest.mark.parametrize("capability", [8.0, 8.9, 9.0, 10.0])
@pytest.mark.parametrize("kv_dtype", ["turbo4", "fp8_e4m3", "int8", "k8v4", "turbo_k3v4", "auto"])
def test_pages_fit_the_shared_memory(monkeypatch, capability, kv_dtype):
    monkeypatch.setattr(_device, "gpu_compute_capability", lambda: capability)
    for head_dim, tokens, batch in itertools.product((64, 128, 256), (1, 8), (1, 32)):
        cache = jax.eval_shape(
            lambda head_dim=head_dim: tj.init_paged_cache(512, 16, 2, head_dim, kv_dtype=kv_dtype)
        )
        query = jax.ShapeDtypeStruct((batch, tokens, 4, head_dim), jnp.bfloat16)
        tables = jax.ShapeDtypeStruct((batch, 256), jnp.int32)
        options = Options(True, scale=1.0)
        arguments = {"query": query, "cache": cache, "block_tables": tables, "options": options}
        refusal = paged.unsupported(**arguments)
        if capability == 8.0 and kv_dtype in ("fp8_e4m3", "k8v4"):
            assert refusal == "needs compute capability 8.9 for 8-bit floats"
            continue
        assert refusal is None
        launch = paged.default_launch(paged.call_of(query, cache, tables, options))
        s = paged.fitting(paged.settings_of(query, cache, options, launch), head_dim)
        assert s.copies_words == (capability < 9)
        assert s.warps * s.warp_bytes(head_dim) <= _device.shared_memory()
