"""Is it worth it to fuse projection, RoPE and stage-1 quantization (section 5.2 of the paper)?

`python -m benchmarks.device.fused_projection --out fused_projection.json` compares, at the shape of
Llama 3 8B (hidden size 4096, 32 query and 8 KV heads of 128 channels):

- separate: cuBLAS in bfloat16, RoPE by XLA, `pallas_kernels.triton.quantize`;
- fused: a matrix product through Pallas-Triton whose tile is a block of tokens of one or two heads,
  so that a scale is found within the program, with RoPE and rounding in its epilogue.

The product of 8192 tokens is 0.41 T operations, 0.57 ms at 720 T/s. What can be saved is what RoPE
and quantization move besides: 2 x 84 MB and 0.15 GB, 0.1 ms at 3.0 TB/s. So a fused product must
reach 85 % of cuBLAS's rate.

On an H100 it is not worth it, although every code is the same (jax 0.11.2,
`benchmarks/results/fused_projection_2026-11-21.json`; 8192 and 16,384 tokens, blocks of 128):

- separate 701 and 1311 us. At 8192 the product takes 522, the weights' concatenation, which
  constant weights would spare, 33, RoPE 66, slices of the product 11, quantization 69.
- fused 850 and 1650 us at best. The product alone takes 671 and 1280, where cuBLAS needs 516 and
  1028, and nothing runs under the epilogue, 180 and 370 us.

Channels are rotated in halves, `c` with ``c + 64``, and registers cannot be sliced: the epilogue
multiplies the tile, rounded to bfloat16 as the separate way rounds it, by the 128 x 128 matrix
of the rotation by a quarter rotation, which is exact and 3 % more operations.
"""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from benchmarks import stored
from benchmarks.timing import measure
from pallas_kernels.triton._common import WHOLE, parameters, rint
from pallas_kernels.triton._quantize import (
    magnitude_bits,
    maximum_from_bits,
    scale_from_maximum,
    stage1_codes,
)
from pallas_kernels.triton.quantize import quantize

HIDDEN, HEADS, KV_HEADS, DIM = 4096, 32, 8, 128
ALL_HEADS = HEADS + 2 * KV_HEADS
# Row tiles that are worked on at once, for the sake of the L2 cache.
_GROUP = 8
# Tokens and heads of a tile, warps, stages.
CANDIDATES = (
    (128, 2, 8, 3),
    (128, 2, 8, 4),
    (128, 1, 4, 4),
    (128, 1, 8, 4),
    (64, 2, 4, 4),
    (64, 1, 4, 4),
)
Row = dict[str, Any]
Six = tuple[jax.Array, ...]


def quarter_rotation() -> jax.Array:
    """bfloat16 ``[DIM, DIM]``: ``x @ quarter_rotation()`` is ``(-second half, first half)``."""
    rotation = np.zeros((DIM, DIM), np.float32)
    half = DIM // 2
    rotation[np.arange(half) + half, np.arange(half)] = -1
    rotation[np.arange(half), np.arange(half) + half] = 1
    return jnp.asarray(rotation, jnp.bfloat16)


def angles(tokens: int) -> tuple[jax.Array, jax.Array]:
    """float32 cosines and sines ``[tokens, DIM]``, each half the same."""
    frequency = 500000.0 ** (-np.arange(0, DIM, 2) / DIM)
    angle = np.arange(tokens)[:, None] * np.concatenate([frequency, frequency])[None]
    return jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)


def rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """RoPE of bfloat16 ``[B, T, N, DIM]``, in float32."""
    wide = x.astype(jnp.float32)
    first, second = jnp.split(wide, 2, axis=-1)
    rotated = jnp.concatenate([-second, first], axis=-1)
    return (wide * cos[None, :, None] + rotated * sin[None, :, None]).astype(jnp.bfloat16)


def projected(x: jax.Array, weights: Six, cos: jax.Array, sin: jax.Array) -> Six:
    """Query, key and value, bfloat16 ``[B, T, heads, DIM]``, by XLA."""
    batch, tokens, _ = x.shape
    q, k, v = (jnp.dot(x, w).reshape(batch, tokens, -1, DIM) for w in weights)
    return rotated(q, cos, sin), rotated(k, cos, sin), v


def separate(x: jax.Array, weights: Six, cos: jax.Array, sin: jax.Array, *, block: int) -> Six:
    """Codes and scales of queries, keys and values."""
    lengths = jnp.full(x.shape[0], x.shape[1], jnp.int32)
    q, k, v = projected(x, weights, cos, sin)
    run = functools.partial(quantize, lengths=lengths, block=block, dtype=jnp.int8)
    return *run(q), *run(k), *run(v, tokens_last=True)


def _kernel(
    x: Any,
    w: Any,
    rotation: Any,
    cos: Any,
    sin: Any,
    *outputs: Any,
    tile: int,
    heads: int,
    epilogue: bool,
    interpret: bool,
) -> None:
    """One block of tokens of some heads of one kind: queries, keys or values."""
    tiles, columns = x.shape[0] // tile, ALL_HEADS // heads
    program = pl.program_id(0)
    group, rest = program // (_GROUP * columns), program % (_GROUP * columns)
    rows_of_group = jnp.minimum(_GROUP, tiles - group * _GROUP)
    row, column = group * _GROUP + rest % rows_of_group, rest // rows_of_group
    token = row * tile + jnp.arange(tile, dtype=jnp.int32)
    channel = jnp.arange(DIM, dtype=jnp.int32)
    step = 64

    def product(i: jax.Array, sums: Six) -> Six:
        hidden = i * step + jnp.arange(step, dtype=jnp.int32)
        a = plgpu.load(x.at[token[:, None], hidden[None]])
        out = []
        for h in range(heads):
            b = plgpu.load(w.at[hidden[:, None], ((column * heads + h) * DIM + channel)[None]])
            out.append(sums[h] + jnp.dot(a, b, preferred_element_type=jnp.float32))
        return tuple(out)

    zeros = tuple(jnp.zeros((tile, DIM), jnp.float32) for _ in range(heads))
    sums = jax.lax.fori_loop(0, HIDDEN // step, product, zeros)
    if not epilogue:
        for h in range(heads):
            at = token[:, None], ((column * heads + h) * DIM + channel)[None]
            plgpu.store(outputs[0].at[at], sums[h].astype(jnp.bfloat16))
        return
    q, q_scale, k, k_scale, v, v_scale = outputs

    def store(h: int, codes: Any, scale: Any, rotate: bool, transpose: bool, first: int) -> None:
        rounded = sums[h].astype(jnp.bfloat16)
        wide = rounded.astype(jnp.float32)
        if rotate:
            at = token[:, None], channel[None]
            rotated = jnp.dot(rounded, rotation[...], preferred_element_type=jnp.float32)
            wide = wide * plgpu.load(cos.at[at]) + rotated * plgpu.load(sin.at[at])
            wide = wide.astype(jnp.bfloat16).astype(jnp.float32)
        block_scale = scale_from_maximum(maximum_from_bits(jnp.max(magnitude_bits(wide))))
        result = rint(stage1_codes(wide, block_scale, interpret)).astype(jnp.int8)
        head = column * heads + h - first
        scale[head, row] = block_scale
        if transpose:
            plgpu.store(codes.at[head, channel[:, None], token[None]], result.T)
        else:
            plgpu.store(codes.at[head, token[:, None], channel[None]], result)

    for h in range(heads):
        head = column * heads + h
        query = functools.partial(store, h, q, q_scale, True, False, 0)
        key = functools.partial(store, h, k, k_scale, True, False, HEADS)
        value = functools.partial(store, h, v, v_scale, False, True, HEADS + KV_HEADS)
        pl.when(head < HEADS)(query)
        pl.when((head >= HEADS) & (head < HEADS + KV_HEADS))(key)
        pl.when(head >= HEADS + KV_HEADS)(value)


def fused(
    x: jax.Array,
    w: jax.Array,
    rotation: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    tile: int,
    heads: int,
    num_warps: int,
    num_stages: int,
    epilogue: bool = True,
    interpret: bool = False,
) -> Six:
    """One sequence ``[T, HIDDEN]``: codes and scales as `separate`, without the batch.

    The weights are ``[HIDDEN, ALL_HEADS * DIM]``: queries, keys, values. Without `epilogue` the
    product alone, in bfloat16.
    """
    tokens = x.shape[0]
    shapes: list[Any] = []
    for count, order in (
        (HEADS, (tokens, DIM)),
        (KV_HEADS, (tokens, DIM)),
        (KV_HEADS, (DIM, tokens)),
    ):
        shapes.append(jax.ShapeDtypeStruct((count, *order), jnp.int8))
        shapes.append(jax.ShapeDtypeStruct((count, tokens // tile), jnp.float32))
    if not epilogue:
        shapes = [jax.ShapeDtypeStruct((tokens, ALL_HEADS * DIM), jnp.bfloat16)]
    return tuple(
        pl.pallas_call(
            functools.partial(
                _kernel, tile=tile, heads=heads, epilogue=epilogue, interpret=interpret
            ),
            grid=(tokens // tile * (ALL_HEADS // heads),),
            in_specs=[WHOLE] * 5,
            out_specs=[WHOLE] * len(shapes),
            out_shape=shapes,
            compiler_params=parameters(num_warps, num_stages),
            interpret=interpret,
            name="fused_projection",
        )(x, w, rotation, cos, sin)
    )


def inputs(tokens: int) -> tuple[jax.Array, Six, jax.Array, jax.Array]:
    make = lambda i, *shape: jax.random.normal(jax.random.key(i), shape, jnp.float32)  # noqa: E731
    x = make(0, 1, tokens, HIDDEN).astype(jnp.bfloat16)
    widths = (HEADS, KV_HEADS, KV_HEADS)
    weights = tuple(
        (make(i + 1, HIDDEN, n * DIM) * HIDDEN**-0.5).astype(jnp.bfloat16)
        for i, n in enumerate(widths)
    )
    return x, weights, *angles(tokens)


def agreement(got: Six, want: Six) -> Row:
    """Codes that are equal, and the relative L2 distance of what queries' codes stand for."""
    equal = [float(jnp.mean(a == b)) for a, b in zip(got[::2], want[::2], strict=True)]

    def values(codes: jax.Array, scale: jax.Array) -> jax.Array:
        blocks = codes.reshape(*scale.shape, -1).astype(jnp.float32)
        return jnp.ravel(blocks * scale[..., None])

    ours, theirs = values(*got[:2]), values(*want[:2])
    difference = float(jnp.linalg.norm(ours - theirs) / jnp.linalg.norm(theirs))
    return {"equal_codes": equal, "relative": difference}


def rows(tokens: int, deadline: float) -> list[Row]:
    x, weights, cos, sin = inputs(tokens)
    operations = 2.0 * tokens * HIDDEN * ALL_HEADS * DIM
    found: list[Row] = []

    def timed(name: str, function: Any, *arguments: Any) -> Any:
        if time.monotonic() > deadline:
            found.append({"tokens": tokens, "name": name, "failed": "no time left"})
            return None
        try:
            compiled = jax.jit(function).lower(*arguments).compile()
            out = compiled(*arguments)
            taken = measure(compiled, arguments, repetitions=8)
        except Exception as error:  # too much shared memory, for one: a fact to be recorded
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            found.append({"tokens": tokens, "name": name, "failed": reason})
            return None
        us = taken.microseconds
        found.append({"tokens": tokens, "name": name, "us": us, "tflops": operations / us / 1e6})
        found[-1]["kernels"] = [[kernel[:60], t] for kernel, t in taken.kernels[:8]]
        return out

    together = jnp.concatenate(weights, axis=1)
    rotation = quarter_rotation()
    timed("cuBLAS, three products", lambda x, w: [jnp.dot(x, a) for a in w], x, weights)
    timed("cuBLAS, one product", jnp.dot, x, together)
    timed("separate, products and RoPE", projected, x, weights, cos, sin)
    want = {}
    for block in (128, 64):
        run = functools.partial(separate, block=block)
        out = timed(f"separate, block {block}", run, x, weights, cos, sin)
        want[block] = out and [part[0] for part in out]
    for tile, heads, warps, stages in CANDIDATES:
        options = {"tile": tile, "heads": heads, "num_warps": warps, "num_stages": stages}
        label = f"{tile} tokens, {heads} heads, {warps} warps, {stages} stages"
        out = timed(
            f"fused, {label}",
            functools.partial(fused, **options),
            x[0],
            together,
            rotation,
            cos,
            sin,
        )
        if out is not None and want[tile] is not None:
            found[-1] |= agreement(out, want[tile])
    ran = [row for row in found if row["name"].startswith("fused") and "us" in row]
    if not ran:
        return found
    fast = min(ran, key=lambda row: row["us"])
    tile, heads, warps, stages = (int(part.split()[0]) for part in fast["name"][7:].split(", "))
    options = {"tile": tile, "heads": heads, "num_warps": warps, "num_stages": stages}
    product = functools.partial(fused, epilogue=False, **options)
    timed("fused, its product alone", product, x[0], together, rotation, cos, sin)
    return found


def main() -> None:
    parser = stored.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=80.0)
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    from turbojax._environment import environment

    report = {**environment(), "rows": []}
    for tokens in (8192, 16384):
        report["rows"] += rows(tokens, deadline)
        stored.save(arguments.out, report)
    for row in report["rows"]:
        result = row.get("failed") or f"{row['us']:.0f} us {row['tflops']:.0f} TFLOP/s"
        print(f"{row['tokens']} {row['name']}: {result}", row.get("relative", ""), flush=True)


if __name__ == "__main__":
    main()
