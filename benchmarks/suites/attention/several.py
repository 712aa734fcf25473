"""Decode of several tokens at once, as when a draft is verified, beside one token."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

import turbojax as tj
from benchmarks.measuring.samples import Error, errors, exact_rows
from benchmarks.shapes import Shape
from benchmarks.suites.attention import decode
from benchmarks.suites.attention.cases import Call, Case, Choice, turbo_configs

OPERATION = "several"
TOKENS = (1, 2, 4, 8)
CACHES = ("4bit", "2/4bit")


class Inputs(decode.Inputs):
    """A cache, and the queries of its last tokens."""

    def __init__(self, shape: Shape):
        super().__init__(shape, queries=max(TOKENS))

    def error_of(self, out: jax.Array) -> Error:
        """Of an output ``[B, T, N, H]``, in its first sequence."""
        tokens = out.shape[1]
        first = (x[:1] for x in (self.query[:, -tokens:], self.key, self.value))
        visible = self.length - tokens + 1 + jnp.arange(tokens)
        return errors(out[:1], exact_rows(*first, visible))


def _call(inputs: Inputs, config: tj.TurboConfig | None, tokens: int) -> Call:
    """With a cache of this config, or cuDNN's with one token."""
    if config is None:
        call = decode.exact(inputs, "cudnn")
    else:
        call = decode.turbo(inputs, config, "mosaic_gpu", tokens)
    return dataclasses.replace(call, error=inputs.error_of, facts=call.facts | {"queries": tokens})


def method(cache: str, tokens: int) -> str:
    """What a row runs: ``turbo-4bit-t8``."""
    return f"turbo-{cache}-t{tokens}"


def cases(shape: Shape, choice: Choice) -> list[Case]:
    """The rows of one shape: cuDNN with one token, then ours with each number of tokens."""
    del choice
    configs = turbo_configs(shape.heads.kv)
    rows = [Case("cudnn", None, functools.partial(_call, config=None, tokens=1))]
    for cache in CACHES:
        for tokens in TOKENS:
            build = functools.partial(_call, config=configs[cache], tokens=tokens)
            rows.append(Case(method(cache, tokens), "mosaic_gpu", build))
    return rows
