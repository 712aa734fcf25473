"""What a ring runs on each device: `turbo_attention` and `pooled_attention` of chunks that meet."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from turbojax.config import TurboConfig
from turbojax.ops.options import Options
from turbojax.ops.pooled_attention import api as pooled_api
from turbojax.ops.pooled_attention import segments as pooled_segments
from turbojax.ops.pooled_attention.static import PooledOptions
from turbojax.ops.turbo_attention import api as turbo_api
from turbojax.ops.turbo_attention import gradient as turbo_gradient
from turbojax.ops.turbo_attention.operands import Stage1, quantize_keys_and_values
from turbojax.parallel.ring import Pair

_FLOAT32 = "float32"

_Results = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
_Gradients = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]


@dataclasses.dataclass(frozen=True)
class Turbo:
    """`turbo_attention`; also exact attention, in mode ``"float"``.

    Attributes:
      config: numerics.
      options: of the call.
      implementation: what was asked for, or None.
    """

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

    def pack(self, key: jax.Array, value: jax.Array, lengths: jax.Array | None) -> Stage1:
        """Codes and scales, in the order of tokens that the chosen implementation takes."""
        # Which one does not depend on the pair: the first that takes offsets takes none, too.
        like = jax.ShapeDtypeStruct((*key.shape[:2], key.shape[2], key.shape[3]), key.dtype)
        permuted = self._choose(like, key, value).name == "mosaic_gpu"
        lengths = _or_whole(lengths, key)
        return quantize_keys_and_values(key, value, lengths, self.config, permuted=permuted)

    def attend(
        self, query: jax.Array, key: jax.Array, value: jax.Array, packed: Stage1, pair: Pair
    ) -> tuple[jax.Array, jax.Array]:
        """See `Op.attend`."""
        lengths = _or_whole(pair.query_lengths, query), _or_whole(pair.key_lengths, key)
        chosen = self._choose(query, key, value)
        out, residual = chosen.run(
            query,
            key,
            value,
            *lengths,
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
class Pooled:
    """`pooled_attention`.

    Attributes:
      options: of the call, and its blocks.
      implementation: what was asked for, or None.
    """

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
    """int32 ``[B]``."""
    if lengths is not None:
        return lengths
    return jnp.full(x.shape[0], x.shape[1], jnp.int32)
