"""What XLA makes of a model's two programs, by compiling them for an H100 that is not there.

`python -m benchmarks.device.programs --out FILE` needs no GPU: jax's CUDA plugin compiles for a
device that it is told about. Of a decode step it counts the kernels of one layer, by compiling
models of two and of three layers; of a prefill it tells the temporary memory that XLA asks for.
Neither depends on how fast something is, with one exception: XLA chooses its own products by timing
them, which it cannot here, and what they take beside their operands may differ by some megabytes.
"""

import collections
import dataclasses
import datetime
import functools
import os
import platform
import re
from typing import Any

from benchmarks import stored
from benchmarks.device.registers import described, lowering_for

SHAPE = "llama-3-8b"
KINDS = {"int4-kv4": "kv4", "bf16": "exact"}
"""Models, and the caches that they fill."""
_DECODED = (1, 16)
_PROMPTS, _TOKENS, _CAPACITY = 4, 4096, 8192
# A line of a compiled program that is one kernel, or a call of a library.
_KERNEL = re.compile(
    r"^\s+(?:ROOT )?%?(?P<name>[\w.-]+) = .*? (?P<kind>fusion|custom-call|copy|dot|sort|scatter)\("
)
_NUMBER = re.compile(r"[.\d]+$")


def kernels(text: str) -> collections.Counter[str]:
    """How many kernels of each name a compiled program starts, from its text."""
    entry = text[text.index("\nENTRY") :]
    found = (_KERNEL.match(line) for line in entry.splitlines())
    return collections.Counter(_NUMBER.sub("", x["name"]) for x in found if x)


def decode(kind: str, layers: int, batch: int, device: Any) -> collections.Counter[str]:
    """The kernels of a step for one token of each sequence."""
    import jax.numpy as jnp

    from turbojax.models.generation.steps import decode_step

    model, caches, shape = _model(kind, layers, batch, _CAPACITY, device)
    tokens = lengths = shape((batch,), jnp.int32)
    with lowering_for("9.0"):
        lowered = decode_step.lower(model, caches, tokens, lengths, implementation=None)
    return kernels(lowered.compile().as_text() or "")


def prefill_bytes(kind: str, device: Any) -> int:
    """Temporary memory of prompts through the whole model."""
    import jax.numpy as jnp

    from turbojax import models
    from turbojax.models.generation.steps import run_prompts

    layers = models.SHAPES[SHAPE].num_layers
    model, caches, shape = _model(kind, layers, _PROMPTS, _TOKENS, device)
    numbers = [shape(size, jnp.int32) for size in ((_PROMPTS, _TOKENS), (_PROMPTS,), ())]
    with lowering_for("9.0"):
        lowered = run_prompts.lower(model, caches, *numbers, implementation=None, pooled=None)
    memory: Any = lowered.compile().memory_analysis()
    return int(memory.temp_size_in_bytes)


def _model(kind: str, layers: int, batch: int, capacity: int, device: Any) -> Any:
    """A model and its caches as shapes on the device, and what makes more of them."""
    import jax

    from turbojax import models

    there = jax.sharding.SingleDeviceSharding(device)
    shape = functools.partial(jax.ShapeDtypeStruct, sharding=there)
    config = dataclasses.replace(models.SHAPES[SHAPE], num_layers=layers)
    make = models.random_decoder if kind == "bf16" else models.random_quantized_decoder

    def made() -> Any:
        model = make(config)
        return model, models.init_caches(model, batch, capacity, KINDS[kind])

    return *jax.tree.map(lambda x: shape(x.shape, x.dtype), jax.eval_shape(made)), shape


def measure() -> dict[str, Any]:
    import jax

    device = described()
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        for batch in _DECODED:
            three, two = (decode(kind, layers, batch, device) for layers in (3, 2))
            each = dict(sorted((three - two).items()))
            row = {"kind": kind, "program": "decode", "batch": batch, "capacity": _CAPACITY}
            rows.append({**row, "kernels_of_a_layer": sum(each.values()), "kernels": each})
        row = {"kind": kind, "program": "prefill", "batch": _PROMPTS, "tokens": _TOKENS}
        rows.append({**row, "temporary_bytes": prefill_bytes(kind, device)})
    return {
        "what": f"programs of {SHAPE}, compiled for an H100 without one",
        "device": "none",
        "jax": jax.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "rows": rows,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = stored.parser(__doc__)
    out = parser.parse_args(arguments).out
    os.environ["JAX_PLATFORMS"] = "cpu"
    result = measure()
    stored.write(out, result)
    for row in result["rows"]:
        print(*row.values(), flush=True)


if __name__ == "__main__":
    main()
