"""The kinds ``"latent"``, ``"latent_fp8_e4m3"``, ``"latent_turbo4"``: latents, not keys and values.

For layers with latent attention in absorbed form. Through `Attend` such a layer hands over

- as query both of a query's parts, ``[B, T, N, C + R]``, the latent's first,
- as key the rotary keys, ``[B, T, 1, R]``,
- as value the latents, ``[B, T, 1, C]``,

and gets attended latents, ``[B, T, N, C]``; `attend_latents` does this. Prompts too attend to what
the cache stores, as later tokens will.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax.attention.options import AttentionOptions, Options, check_implementation
from turbojax.attention.score_modifiers import NO_MODIFIERS, ScoreModifiers
from turbojax.caches import latent as latent_attention
from turbojax.caches import new_tokens
from turbojax.caches.base import (
    Attend,
    Attended,
    Cache,
    Description,
    Grows,
    Kind,
    dtype_of,
    validate_layers,
)
from turbojax.caches.latent import cache as state
from turbojax.caches.latent.cache import LatentCache
from turbojax.caches.latent.pages import LatentPages

LatentKind = Literal["latent", "latent_fp8_e4m3", "latent_turbo4"]

_KV_DTYPES = {"latent": "bfloat16", "latent_fp8_e4m3": "fp8_e4m3", "latent_turbo4": "turbo4"}

LATENT_NAMES = tuple(_KV_DTYPES)
"""Names of caches of latents, by how these are stored, see `LatentPages`."""

# Query rows of a sequence that attend at a time: their results and scores are in memory.
_QUERY_ROWS = 8192


def holds_latents(cache: Cache) -> bool:
    """Whether a layer's cache, or pool of pages, holds latents instead of keys and values."""
    return isinstance(cache, LatentCache | LatentPages)


def attend_latents(
    attend: Attend,
    query: tuple[jax.Array, jax.Array],
    latent: jax.Array,
    rope: jax.Array,
    cache: Cache,
    options: AttentionOptions,
) -> tuple[jax.Array, Cache]:
    """Attends for one layer with latent attention in absorbed form.

    Args:
      attend: see `Attend`.
      query: ``[B, T, N, C]`` and ``[B, T, N, R]``, both parts.
      latent: ``[B, T, C]``, after its norm.
      rope: ``[B, T, R]``, rotary keys.
      cache: this layer's, one that `holds_latents`.
      options: of this layer; their scale is the expanded form's.

    Returns:
      Attended latents ``[B, T, N, C]`` and the new cache.
    """
    both = jnp.concatenate(query, axis=-1)
    return attend(both, rope[:, :, None], latent[:, :, None], cache, options)


def split_query(query: jax.Array, latent_dim: int) -> tuple[jax.Array, jax.Array]:
    """Both parts of ``[B, T, N, C + R]``, the latent's first."""
    return query[..., :latent_dim], query[..., latent_dim:]


def query_chunk(batch_size: int, num_heads: int) -> int:
    """Query tokens of a sequence that attend at a time; more are taken one chunk after another."""
    return max(_QUERY_ROWS // (batch_size * num_heads), 1)


class Latent(Kind[LatentCache]):
    """`LatentCache`, with latent attention in absorbed form."""

    cls = LatentCache
    names = LATENT_NAMES
    takes = LATENT_NAMES
    stored_as = "latent"
    grows: ClassVar[Mapping[str, Grows]] = {
        "latent": Grows(-2),
        "scale": Grows(-1),
        "rope": Grows(-2),
    }
    has_latents = True

    def init(
        self,
        batch_size: int,
        max_length: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        kind: Any,
        dtype: np.dtype,
        rope_dim: int | None = None,
    ) -> LatentCache:
        """See `Kind.init`; there is one KV head, since all heads share a latent.

        `head_dim` counts the channels of latent and rotary key together, ``C + R``; `rope_dim` is
        `R` and must be given. `kind` is one of `LATENT_NAMES`. Raises ValueError if a size does not
        fit.
        """
        if num_kv_heads != 1:
            raise ValueError(f"{num_kv_heads=} must be 1: a latent serves all heads")
        if rope_dim is None or not 0 < rope_dim < head_dim:
            raise ValueError(f"{rope_dim=} must be at least 1 and less than {head_dim=}")
        return state.init_latent_cache(
            batch_size,
            max_length,
            head_dim - rope_dim,
            rope_dim,
            kv_dtype=_KV_DTYPES[kind],
            dtype=dtype,
        )

    def slots(self, kind: Any, max_length: int) -> tuple[int, int]:
        """See `Kind.slots`."""
        del kind
        return state.PAGE_SIZE, -(-max_length // state.PAGE_SIZE)

    def append(
        self,
        cache: LatentCache,
        key: jax.Array,
        value: jax.Array,
        *,
        lengths: jax.Array | None = None,
        implementation: Any = None,
    ) -> LatentCache:
        """See `Kind.append`: rotary keys ``[B, T, 1, R]`` and latents ``[B, T, 1, C]``."""
        check_implementation(implementation, ("xla",))
        latent, rope = tokens_of(key, value)
        return state.append_latents(cache, latent, rope, lengths=lengths)

    def prefill(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        cache: LatentCache,
        lengths: jax.Array | None = None,
        *,
        options: Options,
        modifiers: ScoreModifiers = NO_MODIFIERS,
    ) -> tuple[Attended, LatentCache]:
        """See `Kind.prefill`; it gives no log-sum-exp."""
        cache = self.append(cache, key, value, lengths=lengths)
        return self.decode(query, cache, lengths, options=options, modifiers=modifiers), cache

    def decode(
        self,
        query: jax.Array,
        cache: LatentCache,
        query_lengths: jax.Array | None = None,
        *,
        options: Options,
        modifiers: ScoreModifiers = NO_MODIFIERS,
    ) -> Attended:
        """See `Kind.decode`; it gives no log-sum-exp."""
        if modifiers.given or options.residual:
            what = ", ".join(modifiers.given) or "return_residual"
            raise NotImplementedError(f"a cache of latents cannot attend with {what}")
        return attend_cache(query, cache, query_lengths, options), None

    def why_nan(self, cache: LatentCache) -> str | None:
        """See `Kind.why_nan`."""
        if not cache.format.is_bounded:
            return None
        return f"latents beyond the range of {cache.kv_dtype} become NaN"

    def describe(self, cache: LatentCache) -> dict[str, Any]:
        """See `Stored.describe`."""
        return {
            **super().describe(cache),
            "rope_dim": cache.rope_dim,
            "kv_dtype": cache.kv_dtype,
            "seed": cache.seed,
        }

    def make(self, description: Description) -> LatentCache:
        """See `Stored.make`."""
        rope_dim = description["rope_dim"]
        return state.init_latent_cache(
            description["batch_size"],
            description["max_length"],
            description["head_dim"] - rope_dim,
            rope_dim,
            kv_dtype=description["kv_dtype"],
            dtype=dtype_of(description),
            seed=description["seed"],
        )

    def validate(self, cache: LatentCache) -> None:
        """See `Stored.validate`."""
        validate_layers(cache)


def tokens_of(key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Latents ``[B, T, C]`` and rotary keys ``[B, T, R]`` of a layer's one head."""
    for name, x in (("key", key), ("value", value)):
        if x.ndim != 4 or x.shape[2] != 1:
            raise ValueError(
                f"{name}.shape={x.shape} must be [B, T, 1, channels]: rotary keys are the keys of "
                "a cache of latents, latents its values"
            )
    return value[:, :, 0], key[:, :, 0]


def attend_cache(
    query: jax.Array,
    cache: LatentCache,
    query_lengths: jax.Array | None,
    options: Options,
) -> jax.Array:
    """Attention of the newest tokens' queries to all that is held; many are taken in chunks.

    The cache holds the queries' own tokens. ``[B, T, N, C + R]`` give ``[B, T, N, C]``, zero past
    `query_lengths`.
    """
    _checks.check_query(query)
    batch, _, heads, _ = query.shape
    pages, tables = state.as_pages(cache)

    def run(queries: jax.Array, lengths: jax.Array, real: jax.Array | None) -> jax.Array:
        parts = split_query(queries, cache.latent_dim)
        out, _ = latent_attention.attend_pages(
            *parts, pages, tables, lengths, real, options=options
        )
        return out

    size = query_chunk(batch, heads)
    out: jax.Array = new_tokens.in_chunks(run, query, cache.lengths, query_lengths, size)
    return out


LATENT = Latent()
