"""How far gradients of 8-bit attention are from those of exact attention.

`python -m benchmarks.gradient_error --out benchmarks/results/gradient_error.json`

Relative norms of differences, in plain JAX: of the three gradients of random normal tensors, and of
all parameters of the embedded model, in float32, on windows of the modules that it was not trained
on. `--quick` is a small sample of the same: does everything run?
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks import stored, tables
from benchmarks.cache_quality import held_out_windows
from benchmarks.gradient_training import attention
from benchmarks.suite import Shown
from benchmarks.tables import Result
from turbojax import TurboConfig, models, turbo_attention
from turbojax._environment import environment

# Sequences, tokens, heads and head dim.
RANDOM = (3, 300, 2, 64)
WINDOWS, CONTEXT = 4, 1023
NAMES = [
    f"{mode}-{gradient}" for mode in ("int8", "int8_fp8", "fp8") for gradient in ("float", "8bit")
]


def of_random_tensors() -> dict[str, list[float]]:
    """Errors of the gradients of queries, keys and values, causal."""
    arrays = [jax.random.normal(key, RANDOM) for key in jax.random.split(jax.random.key(0), 4)]

    def gradients(config: TurboConfig) -> Any:
        call = functools.partial(
            turbo_attention, config=config, is_causal=True, implementation="xla"
        )
        return jax.vjp(call, *arrays[:3])[1](arrays[3])

    exact = gradients(TurboConfig(mode="float"))
    found = {}
    for name in NAMES:
        mode, _, gradient = name.partition("-")
        got = gradients(TurboConfig(mode=mode, gradient=gradient))
        found[name] = [_distance([x], [y]) for x, y in zip(got, exact, strict=True)]
    return found


def of_the_model(windows: int, context: int) -> dict[str, float]:
    """Errors of the gradient of all parameters, of the mean loss of some windows."""
    texts = np.concatenate(list(held_out_windows(context, 1).values()))[:windows]
    graph, params = nnx.split(models.load(dtype="float32"))

    def gradient(name: str) -> list[Any]:
        attend = attention(name)

        @jax.jit
        def of(params: nnx.State, tokens: jax.Array) -> Any:
            def loss(params: nnx.State) -> jax.Array:
                logits = nnx.merge(graph, params)(tokens[:, :-1], attend=attend)
                losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
                return jnp.mean(losses)

            return jax.grad(loss)(params)

        return jax.tree.leaves(of(params, jnp.asarray(texts, jnp.int32)))

    exact = gradient("exact")
    return {name: _distance(gradient(name), exact) for name in NAMES}


def _distance(got: Sequence[Any], want: Sequence[Any]) -> float:
    """The norm of a difference over that of `want`."""
    difference = norm = 0.0
    for x, y in zip(got, want, strict=True):
        difference += np.square(np.asarray(x, np.float64) - np.asarray(y, np.float64)).sum()
        norm += np.square(np.asarray(y, np.float64)).sum()
    return float(np.sqrt(difference / norm))


def measure(windows: int, context: int) -> dict[str, Any]:
    model = {"windows": windows, "context": context, "errors": of_the_model(windows, context)}
    return {**environment(), "random": of_random_tensors(), "model": model}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = stored.parser(__doc__.splitlines()[0], quick=True)
    given = parser.parse_args(arguments)
    result = measure(*((1, 127) if given.quick else (WINDOWS, CONTEXT)))
    stored.save(given.out, result)


def error_table(name: str, result: Result) -> str:
    """Errors in percent, by mode and by what the backward pass rounds."""
    model = result["model"]
    lines = []
    for label, errors in result["random"].items():
        mode, _, gradient = label.partition("-")
        parts = ", ".join(f"{100 * x:.1f} %" for x in errors)
        whole = f"{100 * model['errors'][label]:.1f} %"
        lines.append([f'`mode="{mode}"`', f'`"{gradient}"`', parts, whole])
    header = ["forward", "`gradient=`", "$dQ$, $dK$, $dV$", "all parameters of a model"]
    note = (
        "Of the norm of the gradient of exact attention. First of 300 causal tokens of normal "
        f"numbers, head dim 64; then of the embedded model's loss on {model['windows']} held-out "
        f"windows of {model['context']:,} bytes. Exact softmax, blocks of 64, plain JAX."
    )
    return f"{tables.table(header, lines)}\n\n{note} {tables.source(name, result)}"


SHOWN = Shown(("gradient_error",), {"gradient error": error_table})

if __name__ == "__main__":
    main()
