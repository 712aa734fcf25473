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
from turbojax.attention.pooled.static import PooledOptions
from turbojax.attention.turbo import api as turbo_api
from turbojax.attention.turbo import gradient as turbo_gradient
from turbojax.attention.turbo.operands import Stage1, quantize_keys_and_values
from turbojax.numerics import rows
from turbojax.numerics.config import TurboConfig
from turbojax.parallel.ring import Pair

EXACT = TurboConfig(mode="float", softmax="exact")
"""Exact attention, by `turbo_attention`."""

_FLOAT32 = "float32"
# Tokens of a block of pooled attention where every block is at level 1.
_TILE = 128

_Results = tuple[jax.Array, ...]
_Gradients = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]


@dataclasses.dataclass(frozen=True)
class Turbo:
    """`turbo_attention`."""

    config: TurboConfig
    options: Options
    implementation: str | None = None

    @property
    def block_q(self) -> int:
        """Queries of a block."""
        return self.config.block_q

    @property
    def block_kv(self) -> int:
        """Keys of a block."""
        return self.config.block_kv

    def pack(self, key: jax.Array, value: jax.Array, lengths: jax.Array | None) -> Stage1 | None:
        """Codes and scales, in the order of tokens that the chosen implementation takes."""
        # The choice does not depend on the pair: the first that takes offsets also runs without.
        permuted = self._choose(key, key, value).name == "mosaic_gpu"
        lengths = _or_whole(lengths, key)
        return quantize_keys_and_values(key, value, lengths, self.config, permuted=permuted)

    def attend(
        self, query: jax.Array, key: jax.Array, value: jax.Array, packed: Stage1 | None, pair: Pair
    ) -> tuple[jax.Array, jax.Array]:
        """See `Op.attend`; without `packed`, the values of keys and values are used."""
        lengths = _or_whole(pair.query_lengths, query), _or_whole(pair.key_lengths, key)
        chosen = self._choose(query, key, value)
        out, residual = chosen.run(
            *(query, key, value, *lengths),
            config=self.config,
            options=_part(self.options, pair),
            extras=pair.extras,
            stage1=packed,
        )
        return out, residual

    def gradient(
        self, query: jax.Array, key: jax.Array, value: jax.Array, results: _Results, pair: Pair
    ) -> _Gradients:
        """See `Op.gradient`."""
        is_ragged = pair.query_lengths is not None or pair.key_lengths is not None
        lengths = _or_whole(pair.query_lengths, query), _or_whole(pair.key_lengths, key)
        registry = turbo_gradient.GRADIENT
        static: dict[str, Any] = {
            "config": self.config,
            "options": dataclasses.replace(_part(self.options, pair), out_dtype=None),
            "extras": pair.extras,
        }
        chosen = registry.select(
            registry.beside(self.implementation), query=query, key=key, value=value, **static
        )
        *gradients, d_extras = chosen.run(
            *(query, key, value, *lengths, *results),
            **static,
            is_ragged=is_ragged,
            dtype=_FLOAT32,
        )
        return *gradients, d_extras.alibi_slopes

    def _choose(self, query: Any, key: Any, value: Any) -> Any:
        options = dataclasses.replace(self.options, out_dtype=_FLOAT32)
        return turbo_api.ATTENTION.select(
            self.implementation,
            query=query,
            key=key,
            value=value,
            config=self.config,
            options=options,
        )


@dataclasses.dataclass(frozen=True)
class Exact:
    """Exact attention, of each pair of chunks by what is fastest for it.

    That is cuDNN, whose outputs have 16 bits, where only causality and lengths say what is seen; on
    Hopper, with segments, the kernels of pooled attention, at level 1; else `turbo_attention` in
    mode ``"float"``, which computes all gradients. `implementation` is ``"cudnn"``, a name of
    `turbo_attention`'s, or None to choose.
    """

    options: Options
    implementation: str | None = None
    block_q: ClassVar[int] = 1
    block_kv: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_implementation(self.implementation, ("cudnn", *IMPLEMENTATION_NAMES))

    def pack(
        self, key: jax.Array, value: jax.Array, lengths: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Keys and values as they are, padding hidden: a weight of 0 does not remove a NaN."""
        return rows.without_padding(key, lengths), rows.without_padding(value, lengths)

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        packed: tuple[jax.Array, jax.Array],
        pair: Pair,
    ) -> tuple[jax.Array, jax.Array]:
        """See `Op.attend`."""
        key, value = packed
        options = dataclasses.replace(_part(self.options, pair), out_dtype=None)
        if self.implementation in (None, "cudnn"):
            refusal = _cudnn_refusal(query, key, value, options, pair)
            if refusal is None:
                out, residual = cudnn.attend_part(
                    query, key, value, pair.key_lengths, options=options
                )
                return _without_padding(out, residual, pair.query_lengths)
            if self.implementation is not None:
                raise NotImplementedError(f"exact attention cannot run here: cudnn: {refusal}")
        return self._inner(query, key, value, pair)

    def _inner(
        self, query: jax.Array, key: jax.Array, value: jax.Array, pair: Pair
    ) -> tuple[jax.Array, jax.Array]:
        """Attention without cuDNN."""
        blocks = -(-query.shape[1] // _TILE), -(-key.shape[1] // _TILE)
        levels = jnp.ones((1, 1, *blocks), jnp.int8)
        by_levels = pair._replace(levels=levels)
        pooled = self._by_levels(pair)
        if pooled is not None and pooled.runs(query, key, value, by_levels):
            return pooled.attend(query, key, value, (key, value), by_levels)
        return self._turbo.attend(query, key, value, None, pair)

    def _by_levels(self, pair: Pair) -> "Pooled | None":
        """The kernels of pooled attention, if they can run all that this call asks for."""
        options = _part(self.options, pair)
        asks = options.window, options.logits_soft_cap, pair.extras.alibi_slopes
        if self.implementation not in (None, "mosaic_gpu") or any(x is not None for x in asks):
            return None
        wanted = PooledOptions(
            options.is_causal, scale=options.scale, block_q=_TILE, block_kv=_TILE
        )
        return Pooled(wanted, "mosaic_gpu")

    def gradient(
        self, query: jax.Array, key: jax.Array, value: jax.Array, results: _Results, pair: Pair
    ) -> _Gradients:
        """See `Op.gradient`."""
        return self._turbo.gradient(query, key, value, results, pair)

    @property
    def _turbo(self) -> Turbo:
        name = None if self.implementation == "cudnn" else self.implementation
        return Turbo(EXACT, self.options, name)


def _cudnn_refusal(
    query: jax.Array, key: jax.Array, value: jax.Array, options: Options, pair: Pair
) -> str | None:
    """Why cuDNN cannot attend to a pair of chunks here; None if it can."""
    if value.shape != key.shape:
        return f"{value.shape=} must equal {key.shape=}"
    if refusal := pair.extras.refusal():
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


def _without_padding(
    out: jax.Array, residual: jax.Array, lengths: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Results of attention without queries' lengths, set to 0 and ``-inf`` past them."""
    if lengths is None:
        return out, residual
    there = (jnp.arange(out.shape[1], dtype=jnp.int32)[None] < lengths[:, None])[..., None]
    return jnp.where(there[..., None], out, 0.0), jnp.where(there, residual, -jnp.inf)


@dataclasses.dataclass(frozen=True)
class Pooled:
    """`pooled_attention`."""

    options: PooledOptions
    implementation: str | None = None

    @property
    def block_q(self) -> int:
        """Queries of a block."""
        return self.options.block_q

    @property
    def block_kv(self) -> int:
        """Keys of a block."""
        return self.options.block_kv

    def pack(
        self, key: jax.Array, value: jax.Array, lengths: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Keys and values as they are: means of them are made where they are attended to."""
        del lengths
        return key, value

    def attend(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        packed: tuple[jax.Array, jax.Array],
        pair: Pair,
    ) -> tuple[jax.Array, jax.Array]:
        """See `Op.attend`."""
        del key, value
        arrays, static = self._arguments(query, *packed, pair)
        out, residual = pooled_api.FORWARD.select(
            self.implementation, **_named(arrays), **static
        ).run(*arrays, **static)
        return out, residual

    def gradient(
        self, query: jax.Array, key: jax.Array, value: jax.Array, results: _Results, pair: Pair
    ) -> _Gradients:
        """See `Op.gradient`."""
        arrays, static = self._arguments(query, key, value, pair)
        chosen = pooled_api.GRADIENT.select(self.implementation, **_named(arrays), **static)
        d_q, d_k, d_v = chosen.run(*arrays, *results, **static, dtype=_FLOAT32)
        return d_q, d_k, d_v, None

    def runs(self, query: jax.Array, key: jax.Array, value: jax.Array, pair: Pair) -> bool:
        """Whether the implementation that was asked for can do this here."""
        arrays, static = self._arguments(query, key, value, pair)
        found = [x for x in pooled_api.FORWARD.implementations if x.name == self.implementation]
        return all(x.unsupported(**_named(arrays), **static) is None for x in found)

    def _arguments(
        self, query: jax.Array, key: jax.Array, value: jax.Array, pair: Pair
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        lengths = pair.query_lengths, pair.key_lengths
        sizes = self.options.block_q, self.options.block_kv
        assert pair.levels is not None
        levels = pooled_segments.attended(pair.levels, *lengths, pair.extras, *sizes)
        static = {"options": _part(self.options, pair), "extras": pair.extras}
        return (query, key, value, levels, *lengths), static


def _named(arrays: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(("query", "key", "value", "levels"), arrays, strict=False))


def _part(options: Any, pair: Pair) -> Any:
    """The options of a part: a float32 output, and no mask where everything is seen."""
    seen = {"is_causal": False, "window": None} if pair.kind == "full" else {}
    return dataclasses.replace(options, out_dtype=_FLOAT32, **seen)


def _or_whole(lengths: jax.Array | None, x: jax.Array) -> jax.Array:
    """The lengths, or that of `x` for every sequence: int32 ``[B]``."""
    if lengths is not None:
        return lengths
    return jnp.full(x.shape[0], x.shape[1], jnp.int32)
