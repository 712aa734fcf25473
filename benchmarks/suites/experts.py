"""Grouped INT4 products of experts against XLA's `ragged_dot` in bfloat16 and in e4m3.

Each row is one product of a layer of experts: as many rows as tokens times experts of each token,
sorted by expert, in groups whose sizes are drawn uniformly, the same for every method.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import tables, timing
from benchmarks.measuring import calls
from benchmarks.measuring.calls import Arrays, Call, Case, Group, compared_rows
from benchmarks.measuring.work import Needs
from benchmarks.suite import Suite, over_baselines
from benchmarks.suites.fireq import cases as fireq_cases
from benchmarks.tables import Result, Row
from turbojax import fireq
from turbojax.fireq import Int4Weight

OPERATION = "experts"
BASELINES = {"bf16": "over bf16", "fp8": "over e4m3"}
"""What rows are compared with, by family, and what columns call it."""
KERNELS = ("mosaic_gpu", "triton")
_BFLOAT16 = 2
# A dense stack beyond this is not made: beside its copies it would not fit.
_LARGEST_DENSE = 12 * 2**30


class Product(NamedTuple):
    """One of the products of a layer of experts."""

    name: str
    experts: int
    top_k: int
    inputs: int
    outputs: int
    gated: bool

    @property
    def rows(self) -> int:
        """Of an expert's weight."""
        return self.outputs * (2 if self.gated else 1)


PRODUCTS = (
    Product("qwen3-30b-a3b-gate-up", 128, 8, 2048, 768, True),
    Product("qwen3-30b-a3b-down", 128, 8, 768, 2048, False),
    Product("mixtral-8x7b-gate-up", 8, 2, 4096, 14336, True),
    Product("mixtral-8x7b-down", 8, 2, 14336, 4096, False),
    Product("deepseek-v3-gate-up", 256, 8, 7168, 2048, True),
    Product("deepseek-v3-down", 256, 8, 2048, 7168, False),
)
TINY = Product("tiny", 5, 2, 192, 72, True)


def group_sizes(p: Product, tokens: int) -> jax.Array:
    """int32 ``[experts]``: every row's expert is drawn uniformly."""
    draw = np.random.default_rng(0).multinomial(tokens * p.top_k, [1 / p.experts] * p.experts)
    return jnp.asarray(draw, jnp.int32)


@functools.partial(jax.jit, static_argnums=0)
def int4(p: Product) -> Int4Weight:
    """The stack in 4 bits, one expert at a time."""

    def one(seed: jax.Array) -> Int4Weight:
        halves = [
            fireq.quantize_weight(_normal(2 * seed + i, p), output_scale=p.inputs**-0.5)
            for i in range(2 if p.gated else 1)
        ]
        return fireq.gate_and_up(*halves) if p.gated else halves[0]

    weights: Int4Weight = jax.lax.map(one, jnp.arange(p.experts))
    return weights


@functools.partial(jax.jit, static_argnums=(0, 1))
def dense(p: Product, dtype: Any) -> jax.Array:
    """The stack as `ragged_dot` takes it, ``[experts, inputs, rows]``, the gate's rows first."""

    def one(seed: jax.Array) -> jax.Array:
        halves = [_normal(2 * seed + i, p) for i in range(2 if p.gated else 1)]
        # e4m3 holds the weight times the root of its inputs.
        factor = 1.0 if dtype == jnp.float8_e4m3fn else p.inputs**-0.5
        return (jnp.concatenate(halves).T * factor).astype(dtype)

    return jax.lax.map(one, jnp.arange(p.experts))


def _normal(seed: Any, p: Product) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (p.outputs, p.inputs), jnp.float32)


def product(p: Product, tokens: int, *, implementations: tuple[str, ...] = KERNELS) -> Group:
    cases = [
        Case(unit, None, unit, functools.partial(_dense_product, p, tokens, unit))
        for unit in BASELINES
    ]
    for implementation in implementations:
        build = functools.partial(_int4_product, p, tokens, implementation)
        cases.append(Case("int4", implementation, "int4", build))
    facts = {name: getattr(p, name) for name in ("experts", "top_k", "inputs", "outputs")}
    facts = {"model": p.name, **facts, "tokens": tokens}
    return Group(OPERATION, f"{p.name}/m{tokens}", facts, tuple(cases))


def _needs(p: Product, sizes: jax.Array, x: Any, w: Any, unit: str) -> Needs:
    """Weights of experts that have tokens are read, and no others."""
    rows, used = int(jnp.sum(sizes)), int(jnp.sum(sizes > 0))
    moved = timing.nbytes(w) * used / p.experts + timing.nbytes(x) + rows * p.outputs * _BFLOAT16
    return Needs(moved, 2.0 * rows * p.rows * p.inputs, unit)


def _dense_product(p: Product, tokens: int, unit: str, arrays: Arrays) -> Call:
    dtype = jnp.bfloat16 if unit == "bf16" else jnp.float8_e4m3fn
    if p.experts * p.rows * p.inputs * jnp.dtype(dtype).itemsize > _LARGEST_DENSE:
        raise NotImplementedError(f"weights in {unit} would take more than 12 GiB")
    rows = tokens * p.top_k
    if unit == "bf16":
        x = arrays.get(fireq_cases.activations, rows, p.inputs)
    else:
        x = arrays.get(fireq_cases.tokens_of, rows, p.inputs).codes
    w, sizes = arrays.get(dense, p, dtype), group_sizes(p, tokens)

    def multiply(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        y = jax.lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.bfloat16)
        return _gated(y) if p.gated else y

    def check(out: jax.Array, x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        return _check(p, out, sizes, x.astype(jnp.float32), lambda e: w[e].astype(jnp.float32).T)

    return Call(multiply, (x, w, sizes), _needs(p, sizes, x, w, unit), check, (x, w))


def _int4_product(p: Product, tokens: int, implementation: str, arrays: Arrays) -> Call:
    x = arrays.get(fireq_cases.tokens_of, tokens * p.top_k, p.inputs)
    w, sizes = arrays.get(int4, p), group_sizes(p, tokens)

    def multiply(x: Any, w: Int4Weight, sizes: jax.Array) -> jax.Array:
        activation = "swiglu" if p.gated else None
        given: Any = {"activation": activation, "implementation": implementation}
        return fireq.grouped_matmul(x, w, sizes, **given)

    def check(out: jax.Array, x: Any, w: Int4Weight) -> tuple[jax.Array, ...]:
        def weight_of(expert: Any) -> jax.Array:
            return fireq.dequantize(fireq.expert_of(w, expert))

        return _check(p, out, sizes, fireq_cases.values(x), weight_of)

    return Call(multiply, (x, w, sizes), _needs(p, sizes, x, w, "fp8"), check, (x, w))


def _gated(y: jax.Array) -> jax.Array:
    gate, up = jnp.split(y, 2, axis=-1)
    return jax.nn.silu(gate) * up


def _check(p: Product, out: jax.Array, sizes: jax.Array, x: jax.Array, weight_of: Any) -> Any:
    """Some rows of an output, what they should be in float32, and whether all is finite."""
    rows = compared_rows(out.shape[0])
    experts = np.searchsorted(np.cumsum(np.asarray(sizes)), rows, side="right")

    def one(row: jax.Array) -> jax.Array:
        y = fireq_cases.product(x[row[0]][None], weight_of(row[1]))[0]
        return _gated(y) if p.gated else y

    want = jax.lax.map(one, jnp.asarray(np.stack([rows, experts], axis=1)))
    return out[rows], want, jnp.all(jnp.isfinite(out))


# What the docs show -------------------------------------------------------------------------------

_METHODS = {"bf16": "bf16", "fp8": "e4m3", "int4": "INT4"}


def _name(row: Row) -> str:
    shape = f"{row['experts']} experts, {row['top_k']} a token, {row['inputs']} to "
    return f"{row['model']} ({shape}{row['outputs']})"


_NAMES = (
    ("product", _name),
    ("tokens", tables.shown_as("tokens", "{:,}")),
    ("what", lambda row: _METHODS[row["method"]]),
    ("kernel", lambda row: row["implementation"] or "XLA"),
)
_COLUMNS = (tables.US, *tables.over(BASELINES), tables.GIGABYTES, tables.CEILING, tables.L1)


def table(result: Result) -> str:
    names = [p.name for p in (*PRODUCTS, TINY)]
    rows = sorted(result["rows"], key=lambda row: (names.index(row["model"]), row["tokens"]))
    return tables.operation_table({**result, "rows": rows}, OPERATION, _NAMES, _COLUMNS)


SUITE = Suite(
    name="experts",
    groups=lambda: [product(p, tokens) for p in PRODUCTS for tokens in (64, 512, 128, 256)],
    quick_groups=lambda: [product(TINY, 7, implementations=("xla", *KERNELS))],
    run=calls.run,
    with_ratios=over_baselines({OPERATION: tuple(BASELINES)}),
    formats=("bf16", "fp8"),
    tables={"experts": tables.section(table, rates=tables.COPY_AND_PRODUCTS)},
)
