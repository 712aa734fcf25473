"""What the tests of ops over a mesh share: calls of each op, and how their arrays are split."""

import contextlib
import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding

import turbojax as tj
from turbojax import fireq, paged
from turbojax.caches.exact import cache as exact
from turbojax.sharding.axes import Axes
from turbojax.sharding.notation import leaves_of

COLLECTIVES = r"all-gather|all-reduce|collective-permute|all-to-all"
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
B, N, K, H, TOKENS = 4, 8, 4, 32, 70
CONFIG = tj.TurboConfig(block_q=32, block_kv=32, buffer_size=32)
QKV = ("BTNH", "BSKH", "BSKH")
BATCH, HEADS, BOTH = Axes(batch="data"), Axes(heads="model"), Axes(batch="data", heads="model")


class Call(NamedTuple):
    """A call of an op: a function of arrays, these, their dims, and over what to split it."""

    run: Any
    arrays: tuple[Any, ...]
    dims: tuple[str, ...]
    axes: Axes = BOTH


@functools.cache
def mesh_of(data, model, kind):
    devices = np.array(jax.devices()[: data * model]).reshape(data, model)
    return jax.sharding.Mesh(devices, ("data", "model"), axis_types=(kind, kind))


def within(mesh):
    """The context in which a mesh with explicit axes is used."""
    is_explicit = mesh.axis_types[0] == EXPLICIT
    return jax.set_mesh(mesh) if is_explicit else contextlib.nullcontext()


def specs(value, dims, axes):
    """How each array is split, in the structure of the value."""
    leaves = leaves_of("x", dims, value)
    arrays, tree = jax.tree.flatten(value)
    pairs = zip(leaves, arrays, strict=True)
    return jax.tree.unflatten(tree, [axes.spec(leaf.dims, x.shape) for leaf, x in pairs])


def split(call, mesh, axes):
    """The call's arrays, placed on the mesh."""
    return tuple(
        jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), value, how)
        for value, how in (
            (value, specs(value, dims, axes))
            for value, dims in zip(call.arrays, call.dims, strict=True)
        )
    )


def piece(value, dims, parts, index):
    """One device's part of a value that is split into `parts` by letter."""
    arrays, tree = jax.tree.flatten(value)
    cut = []
    for leaf, x in zip(leaves_of("x", dims, value), arrays, strict=True):
        for axis, (letter, size) in enumerate(zip(leaf.dims, x.shape, strict=True)):
            if parts.get(letter, 1) > 1 and size > 1:
                width = size // parts[letter]
                x = jax.lax.slice_in_dim(
                    x, width * index[letter], width * (index[letter] + 1), axis=axis
                )
        cut.append(x)
    return jax.tree.unflatten(tree, cut)


def check(call, mesh, axes=None):
    """No collective, and every device's results are the bits of the same call of its slices."""
    axes = axes or call.axes
    with within(mesh):
        arrays = split(call, mesh, axes)
        program = jax.jit(call.run).lower(*arrays).compile()
        found = jax.tree.leaves(program(*arrays))
    assert not re.findall(COLLECTIVES, program.as_text())
    count = {
        letter: mesh.shape[axis]
        for field, axis, dims in ((axes.batch, "data", "B"), (axes.heads, "model", "NKF"))
        for letter in dims
        if field
    }
    data, model = (mesh.shape[axis] for axis in mesh.axis_names)
    own = jax.jit(call.run)
    # One device of the middle and the last.
    for i, j in {(data // 2, 0), (data - 1, model - 1)}:
        index = {"B": i, **dict.fromkeys("NKF", j)}
        pairs = zip(call.arrays, call.dims, strict=True)
        mine = [piece(x, dims, count, index) for x, dims in pairs]
        local = (
            x.local(lambda letter: count.get(letter, 1)) if isinstance(x, fireq.Int4Weight) else x
            for x in mine
        )
        want = jax.tree.leaves(own(*local))
        device = mesh.devices[i, j]
        for x, y in zip(found, want, strict=True):
            (part,) = (s.data for s in x.addressable_shards if s.device == device)
            np.testing.assert_array_equal(np.asarray(part), np.asarray(y))


@functools.cache
def calls(dtype="float32", channels=H):
    """Calls by name; made once."""

    def normal(seed, *shape):
        return jax.random.normal(jax.random.key(seed), shape).astype(dtype)

    query, key = normal(0, B, TOKENS, N, channels), normal(1, B, TOKENS, K, channels)
    value, newest, new = (
        normal(2, B, TOKENS, K, channels),
        normal(3, B, 1, N, channels),
        normal(4, B, 1, K, channels),
    )
    empty = tj.init_cache(B, 256, K, channels, config=CONFIG, dtype=dtype)
    full = jax.jit(tj.append)(empty, key, value)
    codes = jax.jit(fireq.append)(fireq.init_cache(B, 128, K, channels, dtype=dtype), key, value)
    pool = tj.init_paged_cache(32, 16, K, channels, dtype=dtype)
    tables, lengths = jnp.arange(32).reshape(B, 8), jnp.array([70, 3, 9, 64])
    pool = jax.jit(paged.append)(pool, key, value, tables, jnp.zeros(B, jnp.int32))
    tokens = exact.append(exact.init_cache(B, 128, K, channels, dtype=dtype), key, value)
    latents = tj.append_latents(
        tj.init_latent_cache(B, 128, 64, 16, dtype=dtype),
        normal(5, B, 50, 64),
        normal(6, B, 50, 16),
    )
    queries = normal(7, B, 1, N, 64), normal(8, B, 1, N, 16)
    levels = jnp.ones((B, 1, 2, 2), jnp.int8).at[:, :, 1, 0].set(2)
    weight, x, bias = (
        fireq.quantize_weight(normal(9, 512, 256)),
        normal(10, B, 6, 256),
        normal(11, 512),
    )
    part = {"return_residual": True}
    turbo = functools.partial(tj.turbo_attention, config=CONFIG, is_causal=True, **part)
    pooled = functools.partial(tj.pooled_attention, block_q=64, block_kv=64, is_causal=True, **part)

    def squares(op):
        return lambda *given: jnp.sum(op(*given)[0].astype(jnp.float32) ** 2)

    def gradient(op, count):
        return jax.grad(squares(op), argnums=tuple(range(count)))

    return {
        "turbo": Call(turbo, (query, key, value), QKV),
        "turbo gradient": Call(gradient(turbo, 3), (query, key, value), QKV),
        "turbo bounds": Call(
            gradient(lambda q, k, v, *bounds: turbo(q, k, v, key_bounds=bounds), 3),
            (query, key, value, *tj.bounds.window(B, TOKENS, (40, 9))),
            (*QKV, "BT", "BT"),
        ),
        "prefill": Call(
            functools.partial(tj.prefill, **part), (query, key, value, empty), (*QKV, "*")
        ),
        "append": Call(tj.append, (full, new, new), ("*", "BSKH", "BSKH")),
        "decode": Call(functools.partial(tj.decode, **part), (newest, full), ("BTNH", "*")),
        "kv4 append": Call(fireq.append, (codes, new, new), ("*", "BSKH", "BSKH")),
        "kv4 decode": Call(functools.partial(fireq.decode, **part), (newest, codes), ("BTNH", "*")),
        "pages": Call(
            functools.partial(tj.paged_attention, **part),
            (newest, pool, tables, lengths),
            ("BTNH", "*", "BL", "B"),
        ),
        "pages append": Call(
            paged.append, (pool, new, new, tables, lengths), ("*", "BTKH", "BTKH", "BL", "B"), HEADS
        ),
        "exact": Call(functools.partial(tj.decode, **part), (newest, tokens), ("BTNH", "*")),
        "exact append": Call(exact.append, (tokens, new, new), ("*", "BSKH", "BSKH")),
        "latents": Call(
            functools.partial(tj.latent_attention, scale=0.1, **part),
            (*queries, latents),
            ("BTNC", "BTNR", "*"),
        ),
        "latents append": Call(
            tj.append_latents,
            (latents, queries[0][:, :, 0], queries[1][:, :, 0]),
            ("*", "BTC", "BTR"),
            BATCH,
        ),
        "pooled": Call(pooled, (query, key, value, levels), (*QKV, "BNTS")),
        "pooled gradient": Call(gradient(pooled, 3), (query, key, value, levels), (*QKV, "BNTS")),
        "int4": Call(
            lambda x, weight, bias: fireq.matmul(x, weight, bias=bias, activation="silu"),
            (x, weight, bias),
            ("BTI", "*", "F"),
        ),
        "tokens": Call(fireq.quantize_activation, (x,), ("BTI",)),
    }
