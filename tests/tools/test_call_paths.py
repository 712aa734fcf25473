"""From a public verb to the launch of its kernel a reader goes through few files."""

import collections
import contextlib
import dataclasses
import functools
import inspect
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import turbojax as tj
from turbojax import _device, fireq, k8v4, paged
from turbojax._registry import Registry
from turbojax.caches.exact import cache as exact

ROOT = Path(__file__).parents[2]
OURS = tuple(str(ROOT / package) for package in ("turbojax", "pallas_kernels"))
MOST = 5
REFERENCE = "the reference"

WRAPPERS = {
    "turbojax/_gradient.py": "refuses gradients of a function",
    "turbojax/sharding/per_device.py": "runs a function on each device's part",
    "turbojax/attention/sinks.py": "adds sinks to a function's result",
    "pallas_kernels/varying.py": "launches, with types for `shard_map`",
    "pallas_kernels/mosaic/pipeline.py": "launches",
    "pallas_kernels/mosaic/warp.py": "launches",
    "pallas_kernels/mosaic/lanes.py": "launches",
}
"""What runs any function it is given, as `jax.jit` does, and what launches any kernel."""


def own_files(frame: Any) -> tuple[str, ...]:
    """Our files on the stack, each once, from the public verb down."""
    found: list[str] = []
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(OURS):
            found.append(Path(name).relative_to(ROOT).as_posix())
        frame = frame.f_back
    return tuple(x for x in dict.fromkeys(reversed(found)) if x not in WRAPPERS)


def file_of(function: Any) -> str:
    while hasattr(function, "func"):  # a `functools.partial`
        function = function.keywords.get("attend", function.func)
    return Path(inspect.unwrap(function).__code__.co_filename).relative_to(ROOT).as_posix()


class ReferenceReached(Exception):
    """Says that what follows is plain JAX."""


@contextlib.contextmanager
def launches(name: str):
    """What is launched while functions are traced as for an H100: by its name, paths of files.

    Kernels are replaced by zeros, and a reference, which is nobody's kernel, is where a trace ends
    unless a gradient follows.
    """
    found: dict[str, set[tuple[str, ...]]] = collections.defaultdict(set)

    def note(what: str, *more: str) -> None:
        found[what].add((*own_files(sys._getframe(1)), *more))

    def zeros(out: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out)

    def kernel(*_: Any, out_type: Any, kernel_name: str, **__: Any) -> Any:
        note(kernel_name)
        return lambda *_: zeros(out_type)

    def update(*_: Any, name: str, **__: Any) -> Any:
        note(name)
        return lambda *_: None

    def pallas_call(*_: Any, out_shape: Any, name: str, **__: Any) -> Any:
        note(name)
        return lambda *_: zeros(out_shape)

    def select(self: Registry, *given: Any, **arguments: Any) -> Any:
        chosen = real(self, *given, **arguments)
        if chosen.name != "xla":
            return chosen

        def run(*arrays: Any, **static: Any) -> Any:
            note(REFERENCE, file_of(chosen.run))
            if name.endswith("xla"):
                raise ReferenceReached
            return chosen.run(*arrays, **static)

        return dataclasses.replace(chosen, run=run)

    real = Registry.select
    # A device of its own: what is traced here is neither found in jax's caches nor found by others.
    device = jax.sharding.AbstractDevice(device_kind=name, num_cores=132, platform="cuda")
    axes = {"axis_types": (jax.sharding.AxisType.Auto,), "abstract_device": device}
    with (
        mock.patch.object(_device, "gpu_compute_capability", return_value=9.0),
        mock.patch.object(plgpu, "kernel", kernel),
        mock.patch.object(pl, "kernel", update),
        mock.patch.object(pl, "pallas_call", pallas_call),
        mock.patch.object(Registry, "select", select),
        contextlib.suppress(ReferenceReached),
        jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("device",), **axes)),
    ):
        yield found


B, T, N, K, H = 2, 150, 8, 2, 128


def array(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def shapes(make: Any, *given: Any, **options: Any) -> Any:
    return jax.eval_shape(functools.partial(make, *given, **options))


QUERY, KEY, ONE, NEW = array(B, T, N, H), array(B, T, K, H), array(B, 1, N, H), array(B, 1, K, H)
TABLES, LENGTHS = array(B, 40, dtype=jnp.int32), array(B, dtype=jnp.int32)
FEW = array(B, 1, 128, 512), array(B, 1, 128, 64)  # latent queries


def gradient(call: Any) -> Any:
    def both(*arrays: Any) -> Any:
        out, pull = jax.vjp(call, *arrays)
        return pull(out)

    return both


Calls = dict[str, tuple[Any, tuple[Any, ...]]]
ALL, HOPPER = ("mosaic_gpu", "triton", "xla"), ("mosaic_gpu", "xla")


def by(names: tuple[str, ...], what: str, verb: Any, *given: Any, **options: Any) -> Calls:
    """A call by each of these implementations."""
    return {
        f"{what}, {name}": (functools.partial(verb, implementation=name, **options), given)
        for name in names
    }


def attention_calls() -> Calls:
    made: Calls = {}
    for mode in ("int8_fp8", "fp8"):
        config = tj.TurboConfig(mode=mode, gradient="8bit")
        call = functools.partial(tj.turbo_attention, config=config, is_causal=True)
        made |= by(ALL, f"turbo_attention, {mode}", call, QUERY, KEY, KEY)
        made[f"gradient of turbo_attention, {mode}"] = gradient(call), (QUERY, KEY, KEY)
    bias = jnp.zeros((1, 1, T, T), jnp.bfloat16)
    biased = functools.partial(tj.turbo_attention, config=tj.TurboConfig(mode="fp8"))
    with_bias = gradient(lambda *x: biased(*x[:3], bias=x[3]))
    made["gradient of turbo_attention, bias"] = with_bias, (QUERY, KEY, KEY, array(*bias.shape))
    levels = jnp.array([[8, 4], [2, 1]], jnp.int8)[None, None]
    options = {"levels": levels, "block_q": 128, "block_kv": 128, "is_causal": True}
    for name, (call, given) in by(
        ALL, "pooled_attention", tj.pooled_attention, QUERY, KEY, KEY, **options
    ).items():
        made |= {name: (call, given), f"gradient, {name}": (gradient(call), given)}
    return made


def cache_calls() -> Calls:
    progressive = shapes(tj.init_cache, B, 400, K, H)
    kv4, e4m3_keys = (shapes(x, B, 400, K, H) for x in (fireq.init_cache, k8v4.init_cache))
    made: Calls = {}
    for kind, cache, appends, attends in (
        ("progressive", progressive, ALL, ALL),
        ("kv4", kv4, HOPPER, ALL),
        ("k8v4", e4m3_keys, HOPPER, ALL),
    ):
        made |= by(appends, f"append, {kind}", tj.append, cache, NEW, NEW)
        made |= by(attends, f"prefill, {kind}", tj.prefill, QUERY, KEY, KEY, cache)
        made |= by(attends, f"decode, {kind}", tj.decode, ONE, cache)
        made[f"dequantize, {kind}"] = tj.dequantize, (cache,)
    plain = shapes(exact.init_cache, B, 400, K, H)
    made |= by(HOPPER[:1], "decode, exact", tj.decode, ONE, plain)
    long = shapes(tj.init_cache, 1, 20_000, 1, 64)
    made |= by(ALL, "decode, merged", tj.decode, array(1, 1, 4, 64), long)
    made |= by(ALL, "decode, 8 tokens", tj.decode, array(B, 8, N, H), progressive)
    return made


def page_calls() -> Calls:
    made: Calls = {}
    for kind, appends in (("auto", HOPPER), ("fp8_e4m3", HOPPER), ("turbo4", ALL)):
        pool = shapes(paged.init_cache, 80, 16, K, H, kv_dtype=kind)
        where = TABLES, LENGTHS
        made |= by(appends, f"paged.append, {kind}", paged.append, pool, NEW, NEW, *where)
        for query in (ONE, QUERY):
            what = f"paged.attention, {kind}, {query.shape[1]}"
            made |= by(ALL, what, paged.attention, query, pool, *where)
    return made


def latent_calls() -> Calls:
    made: Calls = {}
    queries, new = (
        (array(B, 1, 128, 512), array(B, 1, 128, 64)),
        (array(B, 1, 512), array(B, 1, 64)),
    )
    for kind in ("bfloat16", "turbo4"):
        cache = shapes(tj.init_latent_cache, B, 400, kv_dtype=kind)
        pool = shapes(tj.init_latent_pages, 80, 16, kv_dtype=kind)
        calls = (
            ("latent_attention", tj.latent_attention, *queries, cache),
            ("paged.latent_attention", paged.latent_attention, *queries, pool, TABLES, LENGTHS),
        )
        for what, *call in calls:
            made |= by(HOPPER, f"{what}, {kind}", *call, scale=0.1)
        made[f"append_latents, {kind}"] = tj.append_latents, (cache, *new)
        made[f"paged.append_latents, {kind}"] = paged.append_latents, (pool, *new, TABLES, LENGTHS)
    return made


def product_calls() -> Calls:
    of_inputs = array(512, 512, dtype=jnp.float32)
    weight = jax.eval_shape(fireq.quantize_weight, of_inputs)
    experts = jax.eval_shape(fireq.quantize_experts, array(4, 512, 512, dtype=jnp.float32))
    made: Calls = {}
    for tokens in (1, 100, 500, 5000):
        made |= by(ALL, f"fireq.matmul, {tokens}", fireq.matmul, array(tokens, 512), weight)
    for tokens in (1, 500):
        given = array(tokens, 512), weight
        made |= by(HOPPER, f"w4a16, {tokens}", fireq.matmul, *given, activations="bf16")
    call = gradient(functools.partial(fireq.matmul, gradient="e4m3"))
    made["gradient of fireq.matmul"] = call, (array(500, 512), weight)
    x, sizes = array(500, 512), array(4, dtype=jnp.int32)
    made |= by(ALL, "fireq.grouped_matmul", fireq.grouped_matmul, x, experts, sizes)
    made |= by(ALL, "fireq.quantize_activation", fireq.quantize_activation, x)
    norm = fireq.rms_norm_quantize
    return made | by(ALL, "fireq.rms_norm_quantize", norm, x, array(512), eps=1e-5)


CALLS = attention_calls() | cache_calls() | page_calls() | latent_calls() | product_calls()
MORE = {"turbojax_decode_merge_hopper": 6}
"""The merge of a long cache's parts: a launch after the launch, by the frame of two kernels."""


@pytest.mark.parametrize("name", CALLS)
def test_few_files_from_verb_to_launch(name):
    call, given = CALLS[name]
    with launches(name) as found:
        jax.eval_shape(call, *given)
    if name.endswith(("mosaic_gpu", "triton")):
        assert set(found) - {REFERENCE}
    for launched, paths in found.items():
        longest = max(paths, key=len)
        assert len(longest) <= MORE.get(launched, MOST), f"{launched}: {' > '.join(longest)}"
