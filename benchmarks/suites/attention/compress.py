"""Compress: a prompt's bfloat16 keys and values into a cache of codes."""

import functools

import jax
import jax.numpy as jnp

import turbojax as tj
from benchmarks.measuring import work
from benchmarks.measuring.samples import Error, errors, sample_all
from benchmarks.shapes import Shape
from benchmarks.suites.attention.cases import Call, Case, Choice, turbo_configs
from turbojax.caches.progressive.update import store_prompt

OPERATION = "compress"


class Inputs:
    """A prompt's key and value."""

    def __init__(self, shape: Shape):
        self.shape = shape
        _, self.key, self.value = sample_all(shape, queries=1)
        self.lengths = jnp.full(shape.batch, shape.tokens, jnp.int32)

    def error(self, cache: tj.ProgressiveCache) -> Error:
        """Of what the first sequence's cache stands for."""
        first = jax.tree.map(lambda x: x[:1], cache)
        got = jnp.stack(tj.dequantize(first, jnp.float32))
        want = jnp.stack([self.key[:1], self.value[:1]]).astype(jnp.float32)
        return errors(got, want)


def _compress(inputs: Inputs, config: tj.TurboConfig, implementation: str) -> Call:
    """From an empty cache made inside: what the caller's donated cache would be."""
    shape = inputs.shape

    def store(key: jax.Array, value: jax.Array, lengths: jax.Array) -> tj.ProgressiveCache:
        empty = tj.init_cache(
            shape.batch,
            shape.tokens,
            shape.heads.kv,
            shape.heads.dim,
            config=config,
            dtype=key.dtype,
        )
        return store_prompt(empty, key, value, lengths, implementation=implementation)

    return Call(
        store,
        (inputs.key, inputs.value, inputs.lengths),
        work.compress_work(shape, config),
        inputs.error,
    )


def cases(shape: Shape, choice: Choice) -> list[Case]:
    """The rows of one shape; ``"thorough"``: also 3 and 2 bits, and plain JAX."""
    thorough = choice == "thorough"
    configs = turbo_configs(shape.heads.kv)
    names = list(configs) if thorough else ["4bit"]

    def ours(name: str, implementation: str) -> Case:
        build = functools.partial(_compress, config=configs[name], implementation=implementation)
        return Case(f"turbo-{name}", implementation, build)

    rows = [ours(name, "triton") for name in names]
    return [*rows, ours("4bit", "xla")] if thorough else rows
