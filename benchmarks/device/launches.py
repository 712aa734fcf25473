"""Launches of Hopper's prompt attention beside each other: what `default_launch` is chosen by.

`python -m benchmarks.device.launches --out FILE [--filter PATTERN]` times every launch of every
shape, the attention kernel alone beside the whole call, after cuDNN in bfloat16 and in e4m3 in the
same run; and launches of its gradient, whose kernels are told apart in a row's `kernels`. An output
is checked against exact attention, and against the default launch's: stages and ping-pong must not
change a bit. Several processes with filters of their own compile side by side, and measure one at a
time.
"""

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import turbojax as tj
from benchmarks import machine, stored, timing
from benchmarks.shapes import Shape
from benchmarks.suite import timing_facts
from benchmarks.suites.attention import prefill
from turbojax.attention.options import Options
from turbojax.attention.turbo import mosaic_gpu, mosaic_gradient
from turbojax.attention.turbo.operands import Backward

Row = dict[str, Any]

_WIDE, _NARROW, _WIDEST = "llama3-8b", "mha-16-narrow", "gemma2-9b"
SHAPES = (
    Shape(_WIDE, 2, 8192),
    Shape(_WIDE, 2, 8192, is_causal=True),
    Shape(_WIDE, 8, 2048, is_causal=True),
    Shape(_WIDE, 1, 1024, is_causal=True),
    Shape(_NARROW, 1, 32768, is_causal=True),
    Shape(_WIDEST, 1, 8192, is_causal=True),
)
CONFIGS = {
    "fp8": tj.TurboConfig(mode="fp8"),
    "int8_fp8": tj.TurboConfig(mode="int8_fp8"),
    "paper": tj.TurboConfig.paper(),
}
_E4M3: tuple[Row, ...] = (
    {"ping_pong": False},
    {"stages": 3, "ping_pong": False},
    {"stages": 4, "ping_pong": False},
    {"stages": 3},
    {"stages": 4},
    {"quantizes": False},
    {"quantizes": False, "ping_pong": False},
    {"tile": 64, "ping_pong": False},
    {"tile": 64},
)
_OF_NARROW: tuple[Row, ...] = (
    {"ping_pong": True},
    {"consumers": 2, "intra_warpgroup_overlap": True},
    {"consumers": 2, "intra_warpgroup_overlap": True, "ping_pong": True},
    {"intra_warpgroup_overlap": True, "tile": 64},
    {"intra_warpgroup_overlap": True, "tile": 64, "ping_pong": True},
)
# Of the gradient, in these shapes.
GRADIENTS = {
    f"gradient {mode} {gradient}": tj.TurboConfig(mode=mode, gradient=gradient)
    for mode, gradient in (("fp8", "float"), ("fp8", "8bit"), ("int8_fp8", "8bit"))
}
_TRAINED = SHAPES[:2]
_INT8: tuple[Row, ...] = (
    {"ping_pong": True},
    {"intra_warpgroup_overlap": True},
    {"intra_warpgroup_overlap": True, "ping_pong": True},
)


def changes(shape: Shape, config: tj.TurboConfig) -> tuple[Row, ...]:
    """Of the default launch, itself first."""
    if shape.heads.dim > 128:
        return {}, {"ping_pong": False}
    if config.mode == "int8":
        return {}, *_INT8
    return {}, *(_E4M3 if shape.heads.dim == 128 else _OF_NARROW)


def rows(pattern: str) -> Iterator[tuple[Shape, str, Row | None]]:
    """Shape, what attends, and the changes of its launch; cuDNN first, where anything follows."""
    for shape in SHAPES:
        every = [(name, x) for name, config in CONFIGS.items() for x in changes(shape, config)]
        if shape in _TRAINED:
            every += [
                (name, x)
                for name, config in GRADIENTS.items()
                for x in ({}, {"ping_pong": config.gradient == "float"})
            ]
        mine = [(name, x) for name, x in every if re.search(pattern, f"{shape.label} {name} {x}")]
        for name, change in [("cudnn", None), ("cudnn e4m3", None), *mine] if mine else ():
            yield shape, name, change


def _peer(name: str, inputs: prefill.Inputs) -> tuple[Callable[..., Any], tuple[Any, ...], Any]:
    """cuDNN, its arguments, and what makes its output comparable."""
    arrays = (inputs.query, inputs.key, inputs.value)
    if name == "cudnn":
        return prefill.exact_of(inputs.shape, "cudnn"), arrays, lambda out: out
    heads = inputs.shape.heads
    query, *others = arrays
    codes = [prefill.quantized(x, heads.query // heads.kv) for x in others]
    attend = functools.partial(prefill.attend_in_e4m3, is_causal=inputs.shape.is_causal)
    return attend, (prefill.quantized(query), *codes), prefill.dequantized


def _ours(
    name: str, change: Row, inputs: prefill.Inputs
) -> tuple[Callable[..., Any], tuple[Any, ...], Any]:
    shape, config = inputs.shape, CONFIGS[name]
    launch = mosaic_gpu.default_launch(inputs.query, config)._replace(**change)
    attend = functools.partial(
        mosaic_gpu.attention,
        config=config,
        options=Options(shape.is_causal, scale=shape.heads.dim**-0.5),
        launch=launch,
    )
    lengths = jnp.full(shape.batch, shape.tokens, jnp.int32)
    return attend, (inputs.query, inputs.key, inputs.value, lengths, lengths), lambda out: out[0]


def _gradient(
    name: str, change: Row, inputs: prefill.Inputs
) -> tuple[Callable[..., Any], tuple[Any, ...], Any]:
    """The gradient alone, of an output that is there already."""
    shape, config = inputs.shape, GRADIENTS[name]
    options = Options(shape.is_causal, scale=shape.heads.dim**-0.5)
    lengths = jnp.full(shape.batch, shape.tokens, jnp.int32)
    arrays = (inputs.query, inputs.key, inputs.value, lengths, lengths)
    out, residual = mosaic_gpu.attention(*arrays, config=config, options=options)
    launch = mosaic_gradient.default_launch(shape.heads.dim, config)._replace(**change)
    call = functools.partial(
        mosaic_gradient.gradient, config=config, options=options, is_ragged=False, launch=launch
    )
    # Samples in place of a loss' gradient.
    gradients = (inputs.query, jnp.zeros_like(residual))
    return call, (Backward(*arrays, out, residual, *gradients),), _in_one


def _in_one(gradients: tuple[Any, ...]) -> jax.Array:
    """Those of query, key and value of the first sequence; those of modifiers: none."""
    return jnp.concatenate([x[:1].reshape(1, -1) for x in gradients[:3]], axis=1)


def measure(inputs: prefill.Inputs, name: str, change: Row | None, first: dict[str, Any]) -> Row:
    with timing.alone():
        if change is None:
            call, arguments, output = _peer(name, inputs)
        else:
            make = _gradient if name in GRADIENTS else _ours
            call, arguments, output = make(name, change, inputs)
        jax.block_until_ready(arguments)
    compiled = jax.jit(call).lower(*arguments).compile()
    with timing.alone():
        out = output(compiled(*arguments))
        facts: Row = {} if name in GRADIENTS else {"errors": inputs.error(out)}
        if change is not None:
            found = np.asarray(out[:1].astype(jnp.float32))
            facts["equals_default"] = bool((first.setdefault(name, found) == found).all())
        taken = timing.measure(compiled, arguments)
    facts |= timing_facts(taken)
    if name in GRADIENTS:
        return facts
    shape = inputs.shape
    work = 4 * shape.batch * shape.heads.query * shape.heads.dim * shape.tokens**2
    work //= 2 if shape.is_causal else 1
    attention = [us for kernel, us in taken.kernels if "attention_hopper" in kernel]
    alone = attention[0] if attention else taken.microseconds
    return facts | {
        "attention_us": alone,
        "tflops_per_second": work / taken.microseconds / 1e6,
        "attention_tflops_per_second": work / alone / 1e6,
    }


def run(pattern: str, out: Path) -> None:
    result = {**machine.describe(), "rows": []}
    inputs, first = None, {}
    for shape, name, change in rows(pattern):
        row: Row = {"shape": shape.label, "attends": name, "launch": change}
        try:
            if inputs is None or inputs.shape != shape:
                inputs, first = None, {}
                with timing.alone():
                    inputs = prefill.Inputs(shape)
            row |= {"status": "ok", **measure(inputs, name, change, first)}
        except Exception as error:  # a launch that does not fit: a fact to be recorded
            row |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:300]}
        result["rows"].append(row)
        stored.write(out, result)
        shown = ("shape", "attends", "launch", "status", "us", "attention_us", "equals_default")
        print(*(row.get(name, "") for name in (*shown, "reason")), sep="\t", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = stored.parser(__doc__)
    parser.add_argument("--filter", default="", help="regular expression on shape, name and launch")
    parsed = parser.parse_args(arguments)
    run(parsed.filter, parsed.out)


if __name__ == "__main__":
    main()
