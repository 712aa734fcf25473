"""What the buffer and the widths of a 4-bit cache cost: steps, appends, prompts beside each other.

`python -m benchmarks.device.buffers --out FILE` times one decode step of each cache, after cuDNN in
bfloat16 in the same run, and 27 appends, the last of which fills all buffers; then causal prompts
that go into an empty cache, after cuDNN and the same attention without a cache.
"""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

import turbojax as tj
from benchmarks import machine, stored, timing
from benchmarks.measuring.samples import sample_all
from benchmarks.shapes import Shape
from benchmarks.suite import timing_facts
from benchmarks.suites.attention import decode

Row = dict[str, Any]

SHAPES = (
    Shape("llama3-8b", 16, 32768),
    Shape("llama3-8b", 64, 4096),
    Shape("llama3-8b", 1, 8192),
    Shape("llama3-8b", 1, 131072),
    Shape("smollm-135m", 16, 4096),
)
PROMPTS = (
    Shape("llama3-8b", 2, 8192, is_causal=True),
    Shape("llama3-8b", 8, 1024, is_causal=True),
    Shape("llama3.2-1b", 2, 8192, is_causal=True),
)
CONFIGS = {
    "default": tj.TurboConfig(),
    "buffer of one block": tj.TurboConfig(buffer_size=64),
    "no first token": tj.TurboConfig(first_tokens=0),
    "k4v2": tj.TurboConfig(value_bits=2),
}
# As many as there is room for.
_STEPS = 27


@functools.partial(jax.jit, static_argnames="steps")
def appended(
    cache: tj.ProgressiveCache, key: jax.Array, value: jax.Array, *, steps: int
) -> tj.ProgressiveCache:
    """The cache after so many steps of one token."""
    return jax.lax.fori_loop(0, steps, lambda _, x: tj.append(x, key, value), cache)


def _rows(inputs: decode.Inputs, implementation: str) -> Iterator[tuple[str, str, Any]]:
    """Name, what is done, and the call with its arguments."""
    call = decode.exact(inputs, "cudnn" if timing.on_gpu() else "xla")
    yield "bfloat16", "decode", (call.function, call.arguments)
    for name, config in CONFIGS.items():
        call = decode.turbo(inputs, config, implementation)
        yield name, "decode", (call.function, call.arguments)
    token = [x[:, :1] for x in (inputs.key, inputs.value)]
    for name in ("default", "buffer of one block"):
        cache = inputs.turbo(CONFIGS[name])
        yield name, "append", (functools.partial(appended, steps=_STEPS), (cache, *token))


def _prompt_rows(shape: Shape) -> Iterator[tuple[str, str, Any]]:
    """The same of a prompt: attention by cuDNN, by itself, and with the cache that it fills."""
    prompt = sample_all(shape, queries=shape.tokens)
    name = "cudnn" if timing.on_gpu() else "xla"
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=name)
    yield "bfloat16", "attention", (attend, prompt)
    default = functools.partial(tj.turbo_attention, is_causal=True)
    yield "default", "attention", (default, prompt)
    for name in ("default", "no first token", "buffer of one block"):
        sizes = (shape.batch, shape.tokens + 64, shape.heads.kv, shape.heads.dim)
        cache = tj.init_cache(*sizes, config=CONFIGS[name], dtype=prompt[0].dtype)
        yield name, "prefill", (tj.prefill, (*prompt, cache))


def run(out: Path, shapes: tuple[Shape, ...], implementation: str) -> None:
    result: Row = {**machine.describe(), "steps_of_append": _STEPS, "rows": []}
    for shape in shapes:
        with timing.alone():
            rows = (
                _prompt_rows(shape)
                if shape.is_causal
                else _rows(decode.Inputs(shape), implementation)
            )
        for name, what, (function, arguments) in rows:
            jax.block_until_ready(arguments)
            compiled = jax.jit(function).lower(*arguments).compile()
            taken = timing_facts(timing.measure(compiled, arguments))
            row = {"shape": shape.label, "cache": name, "call": what, **taken}
            result["rows"].append(row)
            stored.write(out, result)
            print(shape.label, name, what, f"{row['us']:.1f} us", sep="\t", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = stored.parser(__doc__)
    parser.add_argument("--implementation", default="mosaic_gpu", help="of our caches")
    parser.add_argument("--filter", default="", help="regular expression on the shapes' names")
    parsed = parser.parse_args(arguments)
    every = (*SHAPES, *PROMPTS)
    shapes = tuple(shape for shape in every if re.search(parsed.filter, shape.label))
    run(parsed.out, shapes, parsed.implementation)


if __name__ == "__main__":
    main()
