"""What a ring runs on each device, of chunks that meet: turbo, exact and pooled attention."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from turbojax._registry import IMPLEMENTATION_NAMES
from turbojax.attention import cudnn
from turbojax.attention.options import Options, check_implementation
from turbojax.attention.pooled import api as pooled_api
from turbojax.attention.pooled import segments as pooled_segments
from turbojax.attention.pooled.operands import Backward as PooledBackward
from turbojax.attention.pooled.static import PooledOptions
from turbojax.attention.turbo import api as turbo_api
from turbojax.attention.turbo import gradient as turbo_gradient
from turbojax.attention.turbo.operands import Backward, Stage1, quantize_keys_and_values
from turbojax.numerics import rows
from turbojax.numerics.config import TurboConfig
from turbojax.parallel.ring import Operands, Pair

EXACT = TurboConfig(mode="float", softmax="exact")
"""Exact attention, by `turbo_attention`."""

_FLOAT32 = "float32"
# Tokens of a block of pooled attention where every block is at level 1.
_TILE = 128

_Part = tuple[jax.Array, jax.Array]
_Results = tuple[jax.Array, ...]
_Gradients = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]


@dataclasses.dataclass(frozen=True)
class Turbo:
    """`turbo_attention`."""

    config: TurboConfig
    options: Options

    @property
    def blocks(self) -> tuple[int, int]:
        """Queries and keys of a block."""
        return self.config.block_q, self.config.block_kv

    def pack(self, key: jax.Array, value: jax.Array, lengths: jax.Array | None) -> Stage1 | None:
        """Codes and scales, in the order of tokens that the chosen implementation takes."""
        # The choice does not depend on the pair: the first that takes offsets also runs without.
        permuted = self._choose((key, key, value)).name == "mosaic_gpu"
        lengths = _or_whole(lengths, key)
        return quantize_keys_and_values(key, value, lengths, self.config, permuted=permuted)

    def attend(self, operands: Operands, packed: Stage1 | None, pair: Pair) -> _Part:
        """See `Op.attend`; without `packed`, the values of keys and values are used."""
        out, residual = self._choose(operands).run(
            *(*operands, *_lengths(operands, pair)),
            config=self.config,
            options=_part(self.options, pair),
            modifiers=pair.modifiers,
            stage1=packed,
        )
        return out, residual

    def gradient(self, operands: Operands, results: _Results, pair: Pair) -> _Gradients:
        """See `Op.gradient`."""
        registry = turbo_gradient.GRADIENT
        static: dict[str, Any] = {
            "config": self.config,
            "options": dataclasses.replace(_part(self.options, pair), out_dtype=None),
            "modifiers": pair.modifiers,
        }
        name = registry.beside(self.options.implementation)
        *gradients, d_modifiers = registry.select(name, **_named(operands), **static).run(
            Backward(*operands, *_lengths(operands, pair), *results),
            **static,
            is_ragged=pair.query_lengths is not None or pair.key_lengths is not None,
            dtype=_FLOAT32,
        )
        return *gradients, d_modifiers.alibi_slopes

    def _choose(self, operands: Operands) -> Any:
        options = dataclasses.replace(self.options, out_dtype=_FLOAT32)
        static = {"config": self.config, "options": options}
        return turbo_api.ATTENTION.select(options.implementation, **_named(operands), **static)


@dataclasses.dataclass(frozen=True)
class Exact:
    """Exact attention, of each pair of chunks by what is fastest for it.

    That is cuDNN, whose outputs have 16 bits, where only causality and lengths say what is seen; on
    Hopper, with segments, the kernels of pooled attention, at level 1; else `turbo_attention` in
    mode ``"float"``, which computes all gradients. The implementation is ``"cudnn"``, a name of
    `turbo_attention`'s, or None to choose.
    """

    options: Options
    blocks: ClassVar[tuple[int, int]] = (1, 1)

    def __post_init__(self) -> None:
        check_implementation(self.options.implementation, ("cudnn", *IMPLEMENTATION_NAMES))

    def pack(self, key: jax.Array, value: jax.Array, lengths: jax.Array | None) -> _Part:
        """Keys and values as they are, padding hidden: a weight of 0 does not remove a NaN."""
        return rows.without_padding(key, lengths), rows.without_padding(value, lengths)

    def attend(self, operands: Operands, packed: _Part, pair: Pair) -> _Part:
        """See `Op.attend`."""
        operands = (operands[0], *packed)
        options = dataclasses.replace(_part(self.options, pair), out_dtype=None)
        if options.implementation in (None, "cudnn"):
            refusal = _cudnn_refusal(operands, options, pair)
            if refusal is None:
                out, residual = cudnn.attend_part(*operands, pair.key_lengths, options=options)
                return _without_padding(out, residual, pair.query_lengths)
            if options.implementation is not None:
                raise NotImplementedError(f"exact attention cannot run here: cudnn: {refusal}")
        blocks = [-(-x.shape[1] // _TILE) for x in operands[:2]]
        by_levels = pair._replace(levels=jnp.ones((1, 1, *blocks), jnp.int8))
        pooled = self._by_levels(pair)
        if pooled is not None and pooled.runs(operands, by_levels):
            return pooled.attend(operands, packed, by_levels)
        return self._turbo.attend(operands, None, pair)

    def _by_levels(self, pair: Pair) -> "Pooled | None":
        """The kernels of pooled attention, if they can run all that this call asks for."""
        options = _part(self.options, pair)
        asks = options.window, options.logits_soft_cap, pair.modifiers.alibi_slopes
        if options.implementation not in (None, "mosaic_gpu") or any(x is not None for x in asks):
            return None
        given: Any = {"scale": options.scale, "block_q": _TILE, "block_kv": _TILE}
        return Pooled(PooledOptions(options.is_causal, **given, implementation="mosaic_gpu"))

    def gradient(self, operands: Operands, results: _Results, pair: Pair) -> _Gradients:
        """See `Op.gradient`."""
        return self._turbo.gradient(operands, results, pair)

    @property
    def _turbo(self) -> Turbo:
        name = self.options.implementation
        options = dataclasses.replace(
            self.options, implementation=None if name == "cudnn" else name
        )
        return Turbo(EXACT, options)


def _cudnn_refusal(operands: Operands, options: Options, pair: Pair) -> str | None:
    """Why cuDNN cannot attend to a pair of chunks here; None if it can."""
    query, key, value = operands
    if value.shape != key.shape:
        return f"{value.shape=} must equal {key.shape=}"
    if refusal := pair.modifiers.refusal():
        return refusal
    if options.scale <= 0:
        return f"{options.scale=} must be positive"
    if options.window is not None and not options.is_causal:
        return "a window must be causal"
    if options.window is not None and pair.key_lengths is not None:
        return "a window has no lengths beside it"
    cap = options.logits_soft_cap
    refusal = cudnn.unsupported(query, key, forward_only=True, logits_soft_cap=cap)
    return cudnn.no_part() if refusal is None else refusal


def _without_padding(out: jax.Array, residual: jax.Array, lengths: jax.Array | None) -> _Part:
    """Results of attention without queries' lengths, set to 0 and ``-inf`` past them."""
    if lengths is None:
        return out, residual
    there = (jnp.arange(out.shape[1], dtype=jnp.int32)[None] < lengths[:, None])[..., None]
    return jnp.where(there[..., None], out, 0.0), jnp.where(there, residual, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class Pooled:
    """`pooled_attention`."""

    options: PooledOptions

    @property
    def blocks(self) -> tuple[int, int]:
        """Queries and keys of a block."""
        return self.options.block_q, self.options.block_kv

    def pack(self, key: jax.Array, value: jax.Array, lengths: jax.Array | None) -> _Part:
        """Keys and values as they are: means of them are made where they are attended to."""
        del lengths
        return key, value

    def attend(self, operands: Operands, packed: _Part, pair: Pair) -> _Part:
        """See `Op.attend`."""
        arrays, static = self._arguments((operands[0], *packed), pair)
        chosen = pooled_api.FORWARD.select(self.options.implementation, **_named(arrays), **static)
        out, residual = chosen.run(*arrays, **static)
        return out, residual

    def gradient(self, operands: Operands, results: _Results, pair: Pair) -> _Gradients:
        """See `Op.gradient`."""
        arrays, static = self._arguments(operands, pair)
        chosen = pooled_api.GRADIENT.select(self.options.implementation, **_named(arrays), **static)
        d_q, d_k, d_v = chosen.run(PooledBackward(*arrays, *results), **static, dtype=_FLOAT32)
        return d_q, d_k, d_v, None

    def runs(self, operands: Operands, pair: Pair) -> bool:
        """Whether the implementation that was asked for can do this here."""
        arrays, static = self._arguments(operands, pair)
        name = self.options.implementation
        found = [x for x in pooled_api.FORWARD.implementations if x.name == name]
        return all(x.unsupported(**_named(arrays), **static) is None for x in found)

    def _arguments(self, operands: Operands, pair: Pair) -> tuple[tuple[Any, ...], dict[str, Any]]:
        lengths = pair.query_lengths, pair.key_lengths
        assert pair.levels is not None
        levels = pooled_segments.attended(pair.levels, *lengths, pair.modifiers, *self.blocks)
        static = {"options": _part(self.options, pair), "modifiers": pair.modifiers}
        return (*operands, levels, *lengths), static


def _named(arrays: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(("query", "key", "value", "levels"), arrays, strict=False))


def _part(options: Any, pair: Pair) -> Any:
    """The options of a part: a float32 output, and no mask where everything is seen."""
    seen = {"is_causal": False, "window": None} if pair.kind == "full" else {}
    return dataclasses.replace(options, out_dtype=_FLOAT32, **seen)


def _lengths(operands: Operands, pair: Pair) -> _Part:
    """Lengths of queries and keys, those of whole chunks where none are given."""
    return _or_whole(pair.query_lengths, operands[0]), _or_whole(pair.key_lengths, operands[1])


def _or_whole(lengths: jax.Array | None, x: jax.Array) -> jax.Array:
    """The lengths, or that of `x` for every sequence: int32 ``[B]``."""
    if lengths is not None:
        return lengths
    return jnp.full(x.shape[0], x.shape[1], jnp.int32)
