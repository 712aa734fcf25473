"""Decode, of one token or several, against a cache; and compress, of a prompt into one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

import turbojax as tj
from benchmarks import timing
from benchmarks.measuring import work
from benchmarks.measuring.samples import (
    Error,
    errors,
    exact_attention,
    exact_rows,
    require_gpu,
    sample_all,
)
from benchmarks.shapes import Shape
from benchmarks.suites.attention.cases import Call, Case, Choice, Operation, turbo_configs
from turbojax.caches.comparison import kivi
from turbojax.caches.progressive.update import store_prompt

# The sequences end in the middle of a block, so that the buffer is read too.
_SHORT_OF_FULL = 27
# Errors are taken over this many sequences.
_COMPARED = 2
# Plain JAX on more tokens than this takes too long to be worth a row.
_XLA_TOKENS = 4096


class Inputs:
    """A query and a full cache, in every form that a case asks for."""

    def __init__(self, shape: Shape, queries: int = 1):
        self.shape = shape
        self.length = shape.tokens - _SHORT_OF_FULL
        self.lengths = jnp.full(shape.batch, self.length, jnp.int32)
        self.query, self.key, self.value = sample_all(shape, queries=queries)
        self._caches: dict[tj.TurboConfig, tj.ProgressiveCache] = {}

    @functools.cached_property
    def expected(self) -> jax.Array:
        """float32 ``[_COMPARED, 1, N, H]``."""
        first = (x[:_COMPARED] for x in (self.query, self.key, self.value))
        return exact_rows(*first, jnp.array([self.length]))

    def error(self, out: jax.Array) -> Error:
        """Of an output ``[B, 1, N, H]``."""
        return errors(out[:_COMPARED], self.expected)

    def turbo(self, config: tj.TurboConfig) -> tj.ProgressiveCache:
        """The tokens in a cache of this config; configs of one layout share its arrays."""
        layout = dataclasses.replace(config, mode="int8", softmax=tj.SAS())
        if layout not in self._caches:
            self._caches[layout] = _fill(
                self.key, self.value, self.lengths, config=layout, max_length=self.shape.tokens
            )
        return dataclasses.replace(self._caches[layout], config=config)


@functools.partial(jax.jit, static_argnames=("config", "max_length"))
def _fill(
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    *,
    config: tj.TurboConfig,
    max_length: int,
) -> tj.ProgressiveCache:
    batch, _, heads, dim = key.shape
    empty = tj.init_cache(batch, max_length, heads, dim, config=config, dtype=key.dtype)
    return store_prompt(empty, key, value, lengths)


def exact(inputs: Inputs, implementation: str, masked: bool = True) -> Call:
    """jax's own attention; with `masked` it is told the lengths, otherwise it reads all tokens."""
    attend = exact_attention(implementation)
    length = inputs.length if masked else inputs.shape.tokens
    # The unmasked one reads a few tokens more, which is no error of its own.
    full = jnp.array([inputs.shape.tokens])
    first = [x[:_COMPARED] for x in (inputs.query, inputs.key, inputs.value)]
    return Call(
        attend if masked else lambda q, k, v, lengths: attend(q, k, v),
        (inputs.query[:, -1:], inputs.key, inputs.value, inputs.lengths),
        work.decode_work(inputs.shape, work.bfloat16_bytes(inputs.shape, length)),
        inputs.error if masked else lambda out: errors(out[:_COMPARED], exact_rows(*first, full)),
        {"cache_bytes": inputs.key.nbytes + inputs.value.nbytes},
    )


def _pallas(inputs: Inputs) -> Call:
    """The kernel that jax ships, fed the layout that it needs (heads before tokens)."""
    require_gpu("jax's Pallas kernel")
    from jax.experimental.pallas.ops.gpu import decode_attention

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
        k, v = (jnp.swapaxes(x, 1, 2) for x in (k, v))
        return decode_attention.gqa(q[:, 0], k, v, kv_seq_len=lengths)[:, None]

    heads_first = [jnp.copy(jnp.swapaxes(x, 1, 2)) for x in (inputs.key, inputs.value)]
    cache_bytes = work.bfloat16_bytes(inputs.shape, inputs.length)
    return Call(
        attend,
        (inputs.query, *heads_first, inputs.lengths),
        work.decode_work(inputs.shape, cache_bytes),
        inputs.error,
        {"cache_bytes": inputs.key.nbytes + inputs.value.nbytes},
    )


def _kivi(inputs: Inputs, bits: int) -> Call:
    """Dequantize, then attend; the attention is cuDNN's where there is one."""
    shape, config = inputs.shape, kivi.Kivi(bits)
    sizes = (shape.batch, shape.tokens, shape.heads.kv, shape.heads.dim)
    empty = kivi.init_cache(*sizes, config=config)
    cache = jax.jit(kivi.append)(empty, inputs.key, inputs.value, lengths=inputs.lengths)
    held = work.kivi_bytes(shape, inputs.length, config)
    return Call(
        tj.decode,
        (inputs.query, cache),
        work.decode_work(shape, held),
        inputs.error,
        {"cache_bytes": cache.nbytes},
    )


def turbo(
    inputs: Inputs, config: tj.TurboConfig, implementation: str | None, queries: int = 1
) -> Call:
    """The last `queries` tokens of the inputs, with a `ProgressiveCache` of this config."""
    if implementation == "xla" and timing.on_gpu():
        tokens = inputs.shape.batch * inputs.shape.tokens
        if tokens > _XLA_TOKENS:
            raise NotImplementedError(f"plain JAX on {tokens} tokens: more than {_XLA_TOKENS}")
    cache = inputs.turbo(config)
    held = work.turbo_bytes(inputs.shape, inputs.length, config)
    return Call(
        functools.partial(tj.decode, implementation=implementation),
        (inputs.query[:, -queries:], cache),
        work.decode_work(inputs.shape, held, queries),
        inputs.error,
        {"cache_bytes": cache.nbytes},
    )


def cases(shape: Shape, choice: Choice) -> list[Case]:
    """The rows of one shape, what others are compared with first.

    ``"thorough"``: also 3 and 2 bits, other softmaxes, and KIVI at 2 bits. ``"hopper"``: all widths
    in Hopper's kernel and cuDNN. ``"default"``: 4 bits as a call without options has it, and cuDNN.
    """
    thorough = choice == "thorough"
    configs = turbo_configs(shape.heads.kv)
    rows = [
        Case("cudnn", None, functools.partial(exact, implementation="cudnn")),
        Case("cudnn-full", None, functools.partial(exact, implementation="cudnn", masked=False)),
    ]
    names = list(configs) if choice in ("thorough", "hopper") else ["4bit", "2/4bit"]

    def ours(method: str, config: tj.TurboConfig, implementation: str | None = "triton") -> Case:
        build = functools.partial(turbo, config=config, implementation=implementation)
        return Case(method, implementation, build)

    if choice == "default":
        return [*rows, ours("turbo-4bit", configs["4bit"], None)]
    if choice.startswith("hopper"):
        if choice == "hopper-short":
            names, rows = names[:1], rows[1:]  # the mask only costs cuDNN time
        return rows + [ours(f"turbo-{name}", configs[name], "mosaic_gpu") for name in names]
    rows += [ours(f"turbo-{name}", configs[name], "mosaic_gpu") for name in names]
    rows += [ours(f"turbo-{name}", configs[name]) for name in names]
    rows += [
        Case("kivi-4bit", None, functools.partial(_kivi, bits=4)),
        Case("pallas", None, _pallas),
        Case("xla", None, functools.partial(exact, implementation="xla")),
    ]
    if thorough:
        rows += [
            ours("turbo-4bit-sas", tj.TurboConfig.paper()),
            ours("turbo-4bit-sas2", tj.TurboConfig.paper(softmax=tj.SAS(base="2"))),
            ours("turbo-4bit-float", tj.TurboConfig(mode="float")),
            Case("kivi-2bit", None, functools.partial(_kivi, bits=2)),
        ]
    if shape.batch * shape.tokens <= _XLA_TOKENS:
        rows.append(ours("turbo-4bit", configs["4bit"], "xla"))
    return rows


DECODE = Operation("decode", Inputs, cases)


# Several tokens at once, as when a draft is verified, beside one ----------------------------------

TOKENS = (1, 2, 4, 8)
CACHES = ("4bit", "2/4bit")


class SeveralInputs(Inputs):
    """A cache, and the queries of its last tokens."""

    def __init__(self, shape: Shape):
        super().__init__(shape, queries=max(TOKENS))

    def error_of(self, out: jax.Array) -> Error:
        """Of an output ``[B, T, N, H]``, in its first sequence."""
        tokens = out.shape[1]
        first = (x[:1] for x in (self.query[:, -tokens:], self.key, self.value))
        visible = self.length - tokens + 1 + jnp.arange(tokens)
        return errors(out[:1], exact_rows(*first, visible))


def _several(inputs: SeveralInputs, config: tj.TurboConfig | None, tokens: int) -> Call:
    """With a cache of this config, or cuDNN's with one token."""
    if config is None:
        call = exact(inputs, "cudnn")
    else:
        call = turbo(inputs, config, "mosaic_gpu", tokens)
    return dataclasses.replace(call, error=inputs.error_of, facts=call.facts | {"queries": tokens})


def method(cache: str, tokens: int) -> str:
    """What a row runs: ``turbo-4bit-t8``."""
    return f"turbo-{cache}-t{tokens}"


def several_cases(shape: Shape, choice: Choice) -> list[Case]:
    """The rows of one shape: cuDNN with one token, then ours with each number of tokens."""
    del choice
    configs = turbo_configs(shape.heads.kv)
    rows = [Case("cudnn", None, functools.partial(_several, config=None, tokens=1))]
    for cache in CACHES:
        for tokens in TOKENS:
            build = functools.partial(_several, config=configs[cache], tokens=tokens)
            rows.append(Case(method(cache, tokens), "mosaic_gpu", build))
    return rows


SEVERAL = Operation("several", SeveralInputs, several_cases)


# Compress: keys and values into a cache of codes --------------------------------------------------


class CompressInputs:
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


def _compress(inputs: CompressInputs, config: tj.TurboConfig, implementation: str) -> Call:
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


def compress_cases(shape: Shape, choice: Choice) -> list[Case]:
    """The rows of one shape; ``"thorough"``: also 3 and 2 bits, and plain JAX."""
    thorough = choice == "thorough"
    configs = turbo_configs(shape.heads.kv)
    names = list(configs) if thorough else ["4bit"]

    def ours(name: str, implementation: str) -> Case:
        build = functools.partial(_compress, config=configs[name], implementation=implementation)
        return Case(f"turbo-{name}", implementation, build)

    rows = [ours(name, "triton") for name in names]
    return [*rows, ours("4bit", "xla")] if thorough else rows


COMPRESS = Operation("compress", CompressInputs, compress_cases)
