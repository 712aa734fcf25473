"""Kinds for comparison: KIVI and GEAR, and tokens rounded by themselves.

Prompts attend exactly, new tokens to the dequantized cache.
"""

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from turbojax.attention.options import Options
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.caches import exact as exact_attention
from turbojax.caches.base import Attended, C, Counts, Description, Grows, Kind
from turbojax.caches.comparison import kivi, tokens
from turbojax.caches.exact import api
from turbojax.caches.exact.cache import ExactCache

_KEYS, _GROUPS, _VALUES, _PAIRS, _RESIDUAL = "keys", "groups", "values", "pairs", "residual"
_BLOCKS = "prompt_blocks"
_GEAR_RANK = 4


class Dequantized(Kind[C]):
    """A kind without kernels: `exact_attention` sees keys and values as the cache holds them."""

    implementations = exact_attention.IMPLEMENTATIONS
    splits_tokens = False

    @abc.abstractmethod
    def dequantize(
        self, cache: C, *, dtype: jax.typing.DTypeLike | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """See `turbojax.dequantize`."""

    def prefill(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        cache: C,
        lengths: jax.Array | None = None,
        *,
        options: Options,
        modifiers: ScoreModifiers = NO_MODIFIERS,
    ) -> tuple[Attended, C]:
        """See `Kind.prefill`; it gives no log-sum-exp."""
        api.refuse_residual(options)
        out = exact_attention.attend(
            query, key, value, lengths, options=options, modifiers=modifiers
        )
        if lengths is None:
            lengths = jnp.full(key.shape[:1], key.shape[1], jnp.int32)
        return (out, None), self.store_prompt(cache, key, value, lengths)

    def decode(
        self,
        query: jax.Array,
        cache: C,
        query_lengths: jax.Array | None = None,
        *,
        options: Options,
        modifiers: ScoreModifiers = NO_MODIFIERS,
    ) -> Attended:
        """See `Kind.decode`."""
        key, value = self.dequantize(cache)
        held: Any = cache
        return api.decode(
            query,
            ExactCache(key, value, held.lengths, held.overflowed),
            query_lengths,
            options=options,
            modifiers=modifiers,
        )


class KiviKind(Dequantized[kivi.KiviCache]):
    """`KiviCache`; a `Kivi` asks for it, and names stand for configs."""

    cls = kivi.KiviCache
    names = ("kivi4", "kivi3", "kivi2", "gear4", "gear3", "gear2")
    takes = (kivi.Kivi,)
    stored_as = "kivi"
    counting = ("lengths", _BLOCKS)
    grows: ClassVar[Mapping[str, Grows]] = {
        "key_codes": Grows(-3, _KEYS),
        "key_minimum": Grows(-3, _GROUPS),
        "key_scale": Grows(-3, _GROUPS),
        "value_codes": Grows(-3, _VALUES),
        "value_minimum": Grows(-3, _VALUES),
        "value_scale": Grows(-3, _VALUES),
        "key_residual": Grows(-3, _RESIDUAL),
        "value_residual": Grows(-3, _RESIDUAL),
        "key_left": Grows(-3, _KEYS),
        "key_right": Grows(-4, _PAIRS),
        "value_left": Grows(-3, _VALUES),
        "value_right": Grows(-4, _PAIRS),
    }

    def by_name(self, name: str, num_kv_heads: int, devices: int = 1) -> kivi.Kivi:
        """See `Kind.by_name`: the digit is the bits, and ``"gear4"`` has an error of rank 4."""
        del num_kv_heads, devices
        return kivi.Kivi(bits=int(name[-1]), rank=_GEAR_RANK if name.startswith("gear") else 0)

    def init(
        self,
        batch_size: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        kind: kivi.Kivi,
        dtype: np.dtype,
    ) -> kivi.KiviCache:
        """See `Kind.init`."""
        sizes = (batch_size, max_length, num_kv_heads, head_dim)
        return kivi.init_cache(*sizes, config=kind, dtype=dtype)

    append = staticmethod(kivi.append)
    dequantize = staticmethod(kivi.dequantize)

    def store_prompt(
        self,
        cache: kivi.KiviCache,
        key: jax.Array,
        value: jax.Array,
        lengths: jax.Array,
        *,
        implementation: Any = None,
    ) -> kivi.KiviCache:
        """See `Kind.store_prompt`: of GEAR, all of a prompt has one pair of factors."""
        del implementation
        return kivi.store_prompt(cache, key, value, lengths=lengths)

    def why_nan(self, cache: kivi.KiviCache) -> str | None:
        """See `Kind.why_nan`."""
        if cache.dtype != jnp.float32:
            return None
        return "float32 keys or values beyond 65504 become NaN: what groups share is in float16"

    def describe(self, cache: kivi.KiviCache) -> dict[str, Any]:
        """See `Stored.describe`."""
        return {**super().describe(cache), "config": dataclasses.asdict(cache.config)}

    def make(self, description: Description) -> kivi.KiviCache:
        """See `Stored.make`."""
        return self.make_kind(description, kivi.Kivi(**description["config"]))

    def counts(self, lengths: Counts, cache: kivi.KiviCache) -> Counts:
        """See `Stored.counts`."""
        config, held = cache.config, lengths["lengths"]
        keys, values = config.compressed(held)
        blocks = keys // config.residual_length
        return {
            **lengths,
            _KEYS: keys,
            _GROUPS: keys // config.group_size,
            _VALUES: values,
            _PAIRS: np.maximum(blocks + 1 - np.maximum(lengths[_BLOCKS], 1), 0),
            _RESIDUAL: np.minimum(held, config.residual_length),
        }

    def check_counts(self, counts: Counts, cache: kivi.KiviCache) -> None:
        """See `Stored.check_counts`."""
        most = counts[_KEYS] // cache.config.residual_length if cache.config.rank else 0
        if np.any(counts[_BLOCKS] > most):
            raise ValueError(
                f"{_BLOCKS}={counts[_BLOCKS].tolist()} must be at most {np.asarray(most).tolist()}"
            )


T = TypeVar("T", bound=tokens.TokenCache)


class Tokens(Dequantized[T]):
    """What `Int8`, `Int4` and `E4m3` share."""

    grows: ClassVar[Mapping[str, Grows]] = {
        "key_codes": Grows(-3),
        "value_codes": Grows(-3),
        "key_shared": Grows(-2),
        "value_shared": Grows(-2),
    }

    def init(
        self,
        batch_size: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        kind: Any,
        dtype: np.dtype,
    ) -> T:
        """See `Kind.init`."""
        del kind
        sizes = (batch_size, max_length, num_kv_heads, head_dim)
        return tokens.init_cache(self.cls, *sizes, dtype=dtype)

    append = staticmethod(tokens.append)
    dequantize = staticmethod(tokens.dequantize)


class Int8(Tokens[tokens.Int8Cache]):
    """`Int8Cache`."""

    cls = tokens.Int8Cache
    names = ("int8",)
    takes = ("int8",)
    stored_as = "int8"

    def why_nan(self, cache: tokens.Int8Cache) -> str | None:
        """See `Kind.why_nan`."""
        if cache.dtype != jnp.float32:
            return None
        return "float32 keys or values beyond 127 * 65504 become NaN: scales are in float16"


class Int4(Tokens[tokens.Int4Cache]):
    """`Int4Cache`."""

    cls = tokens.Int4Cache
    names = ("int4",)
    takes = ("int4",)
    stored_as = "int4"

    def why_nan(self, cache: tokens.Int4Cache) -> str | None:
        """See `Kind.why_nan`."""
        if cache.dtype != jnp.float32:
            return None
        return "float32 keys or values beyond 65504 become NaN: minima are in float16"


class E4m3(Tokens[tokens.E4m3Cache]):
    """`E4m3Cache`."""

    cls = tokens.E4m3Cache
    names = ("e4m3",)
    takes = ("e4m3",)
    stored_as = "e4m3"

    def why_nan(self, cache: tokens.E4m3Cache) -> str | None:
        """See `Kind.why_nan`."""
        del cache
        return "keys or values beyond 448 become NaN in e4m3, which has no scale here"


KIVI = KiviKind()
INT8, INT4, E4M3 = Int8(), Int4(), E4m3()
