"""Kernels over a mesh, lowered for CUDA and split on a CPU: local shapes, nothing gathered."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding

import turbojax as tj
from tests.meshes.per_device_helpers import AUTO, BOTH, EXPLICIT, HEADS, QKV, Call, mesh_of, specs
from turbojax import _device, fireq, paged
from turbojax.caches.exact import cache as exact

pytestmark = pytest.mark.mesh

B, N, K, H, TOKENS = 8, 32, 8, 128, 256
COLLECTIVES = r"all[-_]gather|collective[-_]permute|all[-_]to[-_]all"
FAST = ("append", "decode", "pages", "pages append")
NAMES = (
    "turbo", "turbo gradient", "prefill", "kv4 append", "kv4 decode", "exact", "latents", "pooled",
    "pooled gradient", "int4", "int4 few", "int4 gradient", "grouped", "tokens",
)  # fmt: skip


@functools.cache
def calls():
    """Calls of every op, of shapes, and what is in the shape of one device's kernel."""
    kernel = {"implementation": "mosaic_gpu"}

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    query, key, newest, new = (
        shape(B, t, h, H) for t, h in ((TOKENS, N), (TOKENS, K), (1, N), (1, K))
    )
    cache, codes, tokens, latents, pool, weight = (
        jax.eval_shape(make)
        for make in (
            lambda: tj.init_cache(B, 1024, K, H),
            lambda: fireq.init_cache(B, 1024, K, H),
            lambda: exact.init_cache(B, 1024, K, H),
            lambda: tj.init_latent_cache(B, 1024),
            lambda: tj.init_paged_cache(64, 64, K, H),
            lambda: fireq.quantize_weight(jnp.zeros((4096, 1024), jnp.bfloat16)),
        )
    )
    experts = jax.tree.map(lambda x: shape(4, *x.shape, dtype=x.dtype), weight)
    tables, lengths = shape(B, 8, dtype=jnp.int32), shape(B, dtype=jnp.int32)
    levels = shape(B, N, 2, 2, dtype=jnp.int8)
    turbo = functools.partial(tj.turbo_attention, is_causal=True, **kernel)
    pooled = functools.partial(tj.pooled_attention, is_causal=True, **kernel)
    multiply = functools.partial(fireq.matmul, **kernel)
    bind = functools.partial

    def gradient(op, count=3):
        def loss(*given):
            return jnp.sum(op(*given).astype(jnp.float32))

        return jax.grad(loss, argnums=tuple(range(count)))

    of_queries, of_one = "4x256x8x128", "4x1x8x128"
    found = {
        "turbo": (turbo, (query, key, key), QKV, of_queries),
        "turbo gradient": (gradient(turbo), (query, key, key), QKV, of_queries),
        "prefill": (bind(tj.prefill, **kernel), (query, key, key, cache), (*QKV, "*"), of_queries),
        "append": (bind(tj.append, **kernel), (cache, new, new), ("*", *QKV[1:]), "4x2x16x64x64"),
        "decode": (bind(tj.decode, **kernel), (newest, cache), ("BTNH", "*"), of_one),
        "kv4 append": (
            bind(fireq.append, **kernel), (codes, new, new), ("*", *QKV[1:]), "4x2x1024x64"
        ),
        "kv4 decode": (bind(fireq.decode, **kernel), (newest, codes), ("BTNH", "*"), of_one),
        "pages": (
            bind(tj.paged_attention, **kernel),
            (newest, pool, tables, lengths),
            ("BTNH", "*", "BL", "B"),
            of_one,
        ),
        "pages append": (
            bind(paged.append, **kernel),
            (pool, new, new, tables, lengths),
            ("*", "BTKH", "BTKH", "BL", "B"),
            "64x2x64x64",
        ),
        "exact": (bind(tj.decode, **kernel), (newest, tokens), ("BTNH", "*"), of_one),
        "latents": (
            bind(tj.latent_attention, scale=0.1, **kernel),
            (shape(B, 1, 64, 512), shape(B, 1, 64, 64), latents),
            ("BTNC", "BTNR", "*"),
            "4x16x512",
        ),
        "pooled": (pooled, (query, key, key, levels), (*QKV, "BNTS"), of_queries),
        "pooled gradient": (
            gradient(pooled), (query, key, key, levels), (*QKV, "BNTS"), of_queries
        ),
        "int4": (multiply, (shape(B, 64, 1024), weight), ("BTI", "*"), "256x1024"),
        "int4 few": (multiply, (shape(B, 1, 1024), weight), ("BTI", "*"), "4x1024"),
        "int4 gradient": (
            gradient(bind(multiply, gradient="e4m3"), 1),
            (shape(B, 64, 1024), weight),
            ("BTI", "*"),
            "256x1024",
        ),
        "grouped": (
            bind(fireq.grouped_matmul, **kernel),
            (shape(512, 1024), experts, shape(4, dtype=jnp.int32)),
            ("MI", "E*", "E"),
            "512x1024",
        ),
        "tokens": (
            bind(fireq.quantize_activation, **kernel), (shape(B, 64, 1024),), ("BTI",), "256x1024"
        ),
    }  # fmt: skip
    return {
        name: (Call(run, arrays, dims, HEADS if name == "pages append" else BOTH), part)
        for name, (run, arrays, dims, part) in found.items()
    }


def lowered(call, kind):
    """The call of split arrays, lowered for an H100; `trace` needs no devices of that kind."""
    gpu = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="cuda")
    abstract = AbstractMesh((2, 4), ("data", "model"), axis_types=(kind, kind), abstract_device=gpu)
    mesh = mesh_of(2, 4, kind) if kind == AUTO else abstract
    arrays = [
        jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
            ),
            value,
            specs(value, dims, call.axes),
        )
        for value, dims in zip(call.arrays, call.dims, strict=True)
    ]
    with jax.sharding.use_abstract_mesh(abstract):
        return jax.jit(call.run).trace(*arrays).lower(lowering_platforms=("cuda",))


def partitioned(program, folder):
    """What each device would do: the program after the compiler has split it.

    A CPU's compiler splits a program for a GPU, and fails later, at the kernels.
    """
    options = {"xla_dump_to": str(folder), "xla_dump_hlo_pass_re": "spmd.*"}
    with pytest.raises(RuntimeError, match="mosaic_gpu|AllocateBuffer"):
        program.compile(compiler_options=options)
    files = sorted(folder.glob("*after_spmd-partitioning*.txt"))
    assert files, f"no program was split: {list(folder.iterdir())}"
    return files[-1].read_text()


def check(name, monkeypatch, tmp_path):
    monkeypatch.setattr(_device, "gpu_compute_capability", lambda: 9.0)
    call, part = calls()[name]
    split = partitioned(lowered(call, AUTO), tmp_path)
    explicit = lowered(call, EXPLICIT).as_text()
    for text, kernel in ((split, "mosaic_gpu_v2"), (explicit, "@mosaic_gpu_v2")):
        assert not re.findall(COLLECTIVES, text)
        shapes = [line.replace(",", "x") for line in text.splitlines() if kernel in line]
        assert shapes
        assert any(part in line for line in shapes)


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("name", FAST)
def test_kernels_get_local_shapes(name, monkeypatch, tmp_path):
    check(name, monkeypatch, tmp_path)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", NAMES)
def test_other_kernels_get_local_shapes(name, monkeypatch, tmp_path):
    check(name, monkeypatch, tmp_path)
