"""Prefill of a whole model of random weights: bfloat16 with cuDNN against INT4, e4m3 and KV4."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from benchmarks.measuring.calls import Arrays, Call, Case, Group
from benchmarks.measuring.work import Needs
from benchmarks.suite import kernel_facts
from benchmarks.tables import Row
from turbojax import models
from turbojax.models.generation.steps import run_prompts

OPERATION = "model-prefill"
# Prompts that run together hold about this many tokens in all: enough for every unit, little
# compared with the weights.
_TOKENS_AT_A_TIME = 16384
_REPETITIONS = 3
Model = models.Decoder | models.QuantizedDecoder


@dataclasses.dataclass(frozen=True)
class Kind:
    """A model and how it attends."""

    make: Callable[[models.TransformerConfig], Model]
    cache: models.CacheKind
    implementation: str | None
    unit: str


KINDS = {
    "bf16": Kind(models.random_decoder, "exact", "cudnn", "bf16"),
    "int4-kv4": Kind(models.random_quantized_decoder, "kv4", None, "fp8"),
}


def prefill(shape: str, batch: int, tokens: int) -> Group:
    """Prompts through the model named `shape` in `models.SHAPES`, from tokens to full caches."""
    count = next(n for n in range(batch, 0, -1) if batch % n == 0 and _fits(n, tokens))
    cases = tuple(
        Case(name, None, name, functools.partial(_prefill, shape, batch, tokens, count, name))
        for name in KINDS
    )
    facts = {"model": shape, "batch": batch, "tokens": tokens, "prefill_batch_size": count}
    return Group(OPERATION, f"{shape}/b{batch}-s{tokens}", facts, cases)


def _fits(count: int, tokens: int) -> bool:
    return count == 1 or count * tokens <= _TOKENS_AT_A_TIME


def _prefill(
    shape: str, batch: int, tokens: int, count: int, name: str, arrays: Arrays
) -> "Prefill":
    kind, config = KINDS[name], models.SHAPES[shape]
    model = arrays.get(kind.make, config)
    prompts = arrays.get(_prompts, config.vocab_size, batch, tokens)
    return Prefill(
        function=run_prompts,  # what `models.start` calls for each part of the batch
        arguments=(model, prompts),
        needs=_needs(model, kind, batch, tokens),
        kind=kind,
        count=count,
    )


def _prompts(vocabulary: int, batch: int, tokens: int) -> jax.Array:
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.integers(vocabulary, size=(batch, tokens), dtype=np.int32))


def _needs(model: Model, kind: Kind, batch: int, tokens: int) -> Needs:
    """Products of all layers with all tokens, and causal attention; logits are of one token."""
    config = model.config
    projections = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    linear = config.hidden_size * (projections + 3 * config.intermediate_size)
    attention = 2.0 * tokens**2 * config.num_heads * config.head_dim
    caches = jax.eval_shape(lambda: models.init_caches(model, batch, tokens, kind.cache))
    # Every weight once, every cache once.
    moved = timing.nbytes(model) + timing.nbytes(caches)
    operations = batch * config.num_layers * (2.0 * tokens * linear + attention)
    return Needs(moved, operations, kind.unit)


@dataclasses.dataclass(frozen=True)
class Prefill(Call):
    """Prompts through a model, some at a time, into caches that are made before."""

    kind: Kind = KINDS["bf16"]
    count: int = 1

    def caches(self) -> models.ModelCaches:
        model, prompts = self.arguments
        return models.init_caches(model, *prompts.shape, self.kind.cache)

    def lower(self) -> jax.stages.Lowered:
        """The step for `count` prompts; it donates the caches."""
        model, prompts = self.arguments
        tokens = prompts[: self.count]
        name = self.kind.implementation if timing.on_gpu() else None
        lengths = jnp.full(self.count, prompts.shape[1], jnp.int32)
        caches = jax.eval_shape(self.caches)
        return self.function.lower(
            model, caches, tokens, lengths, np.int32(0), implementation=name, pooled=None
        )

    def measure(
        self, compiled: Callable[..., Any], check: Any, repetitions: int | None
    ) -> tuple[float, Row]:
        """The median wall time of all prompts, of some calls after a first one."""
        del check
        seconds = [self._run_all(compiled) for _ in range(1 + (repetitions or _REPETITIONS))][1:]
        median = statistics.median(seconds)
        batch, tokens = self.arguments[1].shape
        return 1e6 * median, {
            "clock": "wall",
            "repetitions": len(seconds),
            "spread": (max(seconds) - min(seconds)) / median,
            "tokens_per_second": batch * tokens / median,
            "weight_bytes": timing.nbytes(self.arguments[0]),
            **_kernels(_Steps(compiled, self)),
        }

    def _run_all(self, compiled: Callable[..., Any]) -> float:
        steps = _Steps(compiled, self)
        jax.block_until_ready(steps.caches)
        parts = self.arguments[1].shape[0] // self.count
        begun = time.perf_counter()
        logits = [steps() for _ in range(parts)]
        jax.block_until_ready((logits, steps.caches))
        seconds = time.perf_counter() - begun
        if not all(jnp.all(jnp.isfinite(part)) for part in logits):
            raise ArithmeticError("the logits are not finite")
        return seconds


class _Steps(timing.Rotation):
    """Calls a compiled prefill with the next prompts, over and over, handing its caches on."""

    def __init__(self, compiled: Callable[..., Any], call: Prefill) -> None:
        model, prompts = call.arguments
        lengths = jnp.full(call.count, prompts.shape[1], jnp.int32)
        first = range(0, prompts.shape[0], call.count)
        parts = [(model, prompts[i : i + call.count], lengths, np.int32(i)) for i in first]
        super().__init__(compiled, parts)
        self.caches = call.caches()

    def __call__(self) -> jax.Array:
        model, *rest = next(self._sets)
        logits, self.caches = self._compiled(model, self.caches, *rest)
        return logits


def _kernels(steps: _Steps) -> Row:
    if not timing.on_gpu():
        return {}
    from jax.experimental.mosaic.gpu import profiler

    _, launches = profiler.measure(steps, aggregate=False)()
    total: dict[str, float] = {}
    for name, milliseconds in launches or ():
        total[name] = total.get(name, 0.0) + 1e3 * milliseconds
    longest = sorted(total.items(), key=lambda item: -item[1])
    kernels = [*longest[:7], ("all others", sum(us for _, us in longest[7:]))]
    return {
        "device_us_of_a_step": sum(total.values()),
        "kernels": kernel_facts(kernels),
    }
