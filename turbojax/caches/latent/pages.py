"""`LatentPages`: latents and rotary keys of tokens in pages of one pool."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax._gradient import refuse_gradients
from turbojax._pytrees import nbytes, pytree
from turbojax.caches import checks
from turbojax.caches.latent import formats
from turbojax.caches.paged import checks as page_checks
from turbojax.caches.paged.pool import PAGE_SIZES
from turbojax.caches.paged.writing import find_places
from turbojax.sharding import tables
from turbojax.sharding.axes import Axes
from turbojax.sharding.creation import Sizes, born
from turbojax.sharding.per_device import per_device
from turbojax.sharding.specs import Split


@pytree
@dataclasses.dataclass(frozen=True)
class LatentPages(formats.Holder, Split):
    """A pool of `P` pages for the latents of any number of sequences (MLA, DeepSeek-V2, 2024).

    A token has a latent of `C` channels, key and value of all heads at once, and a rotary key of
    `R` channels, also one for all heads. What `kv_dtype` means for the latent:

    - ``"bfloat16"``: unchanged, in `dtype`, whichever that is.
    - ``"fp8_e4m3"``: e4m3 with a scale for each token.
    - ``"turbo4"``: a random rotation of size `C`, 4-bit codes of the coordinates and a norm for
      each token (PolarQuant, Han et al., 2025; see `turbojax.polar`).

    The rotary key is stored unchanged: it is a ninth of the channels, and its errors only move
    scores.

    Block tables and lengths are the caller's, usually a `PageAllocator`'s, as with `PagedCache`.
    Made by `init_latent_pages`; functions take it and never change it in place (donate it to `jit`
    to reuse its memory). What no sequence holds is arbitrary.

    Attributes:
      latent: ``[P, page_size, C]`` in `dtype` or float8_e4m3fn; uint8 ``[P, page_size, C / 2]`` for
        codes, in the order of `turbojax.polar.pack`.
      scale: float32 ``[P, page_size]``: a token's scale, or its norm; NaN where a latent was not
        finite. None for latents as they are.
      rope: ``[P, page_size, R]`` in `dtype`.
      dropped_tokens: int32 ``[]``, tokens that calls under `jit` could not store: no page, or past
        the block table. Outside `jit` these are errors.
      kv_dtype: one of `LATENT_DTYPES`.
      latent_dim: channels of the latent, `C`.
      dtype: of the queries, latents and rotary keys it takes.
      seed: of the rotation of codes.
    """

    latent: jax.Array
    scale: jax.Array | None
    rope: jax.Array
    dropped_tokens: jax.Array
    kv_dtype: str = dataclasses.field(metadata={"static": True})
    latent_dim: int = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})
    seed: int = dataclasses.field(metadata={"static": True})

    AXES: ClassVar[dict[str, str]] = {
        "latent": "PRC",
        "scale": "PR",
        "rope": "PRC",
        "dropped_tokens": "",
    }
    """The letter of every axis of every array, see `turbojax.sharding.axes`."""

    PAGE_ARRAYS: ClassVar[tuple[str, ...]] = ("latent", "scale", "rope")
    """The fields with an axis of pages, the first; None where the format has no such thing."""

    @property
    def num_pages(self) -> int:
        """Pages of the pool, `P`."""
        return self.latent.shape[0]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.latent.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held."""
        return nbytes(self)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, of one layer."""
        return self.token_bytes * self.page_size

    @property
    def compression_ratio(self) -> float:
        """Bytes of a token in bfloat16, latent and rotary key, over `token_bytes`."""
        return 2 * (self.latent_dim + self.rope_dim) / self.token_bytes

    def validate(self) -> None:
        """Checks shapes, dtypes and, outside `jit`, that `dropped_tokens` is not negative.

        Raises:
          ValueError: naming the field and what it breaks.
        """
        sizes = (self.num_pages, self.page_size, self.latent_dim, self.rope_dim)
        wanted = jax.eval_shape(
            lambda: init_latent_pages(
                *sizes, kv_dtype=self.kv_dtype, dtype=self.dtype, seed=self.seed
            )
        )
        checks.check_arrays(self, wanted, ("latent", "scale", "rope", "dropped_tokens"))
        if _checks.is_concrete(self.dropped_tokens) and int(self.dropped_tokens) < 0:
            raise ValueError(
                f"cache.dropped_tokens={int(self.dropped_tokens)} must not be negative"
            )


def init_latent_pages(
    num_pages: int,
    page_size: int,
    latent_dim: int = 512,
    rope_dim: int = 64,
    *,
    kv_dtype: str = "bfloat16",
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    seed: int = 0,
    axes: Axes | None = None,
) -> LatentPages:
    """A pool of pages that nobody holds yet.

    Args:
      num_pages: pages of the pool, `P`.
      page_size: tokens a page: 16, 32, 64 or 128.
      latent_dim: channels of the latent, `C`; for codes one that `turbojax.polar.rotation` knows.
      rope_dim: channels of the rotary key, `R`.
      kv_dtype: one of `LATENT_DTYPES`, see `LatentPages`.
      dtype: of the queries, latents and rotary keys to come: bfloat16, float16 or float32.
      seed: for codes, of the rotation.
      axes: of a mesh, over which pages are split, see `partition_specs`: each device makes its
        part, and none the whole.

    Raises:
      TypeError: if `dtype` is none of these, or a size or the seed not an integer.
      ValueError: if a size is not positive or not among those above or cannot be split, `kv_dtype`
        is unknown, or a seed is given that it has no use for.
    """
    _checks.check_sizes(num_pages=num_pages, page_size=page_size)
    if page_size not in PAGE_SIZES:
        raise ValueError(f"{page_size=} must be one of {', '.join(map(str, PAGE_SIZES))}")
    if axes is not None:
        given = {"kv_dtype": kv_dtype, "dtype": jnp.dtype(dtype), "seed": seed}
        widths = {"latent_dim": latent_dim, "rope_dim": rope_dim}
        return born(_without_heads, axes, Sizes(num_pages, page_size, 1), **widths, **given)
    fields = formats.empty((num_pages, page_size), latent_dim, rope_dim, kv_dtype, dtype, seed)
    return LatentPages(dropped_tokens=jnp.zeros((), jnp.int32), **fields)


def _without_heads(num_pages: int, page_size: int, _: int, **static: Any) -> LatentPages:
    return init_latent_pages(num_pages, page_size, **static)


def append_latents(
    cache: LatentPages,
    latent: jax.Array,
    rope: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    *,
    new_lengths: jax.Array | None = None,
) -> LatentPages:
    """Writes new tokens, one or many per sequence: token `t` of sequence `b` at ``lengths[b] + t``.

    As `turbojax.paged.append` does; a token's bits depend on nothing but itself.

    Args:
      cache: the pool.
      latent: ``[B, T, C]`` in `cache.dtype`, after its norm.
      rope: ``[B, T, R]`` in `cache.dtype`, after the rotary embedding.
      block_tables: integer ``[B, max_pages]``. Only entries of pages that are written are looked
        at.
      lengths: integer ``[B]``, tokens held before.
      new_lengths: optional integer ``[B]``: how many of the `T` tokens belong to each sequence, the
        first ones; all of them if not given.

    Returns:
      The pool with the tokens. Under `jit`, a token without a page in the pool, past its block
      table or at a negative position is dropped and counted in `dropped_tokens`.

    Raises:
      TypeError: if `cache` is another kind, a dtype differs from `cache.dtype`, or tables or
        lengths are not integers.
      ValueError: if a shape does not fit, or, outside `jit`: where a token has no place, two have
        the same one, or a latent is too long for codes (under `jit` it becomes NaN). NaN and
        infinity are no error: they are stored as NaN, or as they are in 16-bit latents.
      NotImplementedError: when it is differentiated.
    """
    checks.check_kind(cache, LatentPages)
    formats.check_tokens(cache, latent, rope)
    batch, tokens = latent.shape[:2]
    block_tables = page_checks.check_block_tables(block_tables, batch)
    lengths = page_checks.check_lengths("lengths", lengths, batch)
    new_lengths = _checks.check_lengths("new_lengths", new_lengths, batch, tokens)
    page_checks.check_places(cache, block_tables, lengths, new_lengths)
    run = per_device(tables.PAGED_LATENT_APPEND, _append)
    cache, scale = refuse_gradients(run, "append_latents")(
        cache, latent, rope, block_tables, lengths, new_lengths
    )
    formats.check_range(latent, scale, new_lengths)
    return cache


def gather_latents(
    cache: LatentPages, block_tables: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The latents and rotary keys that sequences hold, densely, for tests and debugging.

    Args:
      cache: the pool.
      block_tables: integer ``[B, max_pages]``; entries past a sequence's length may be anything.
      lengths: integer ``[B]``, tokens held.

    Returns:
      float32 ``[B, max_pages * page_size, C]`` and ``[.., R]``, what attention works with; zero
      past each length. Under `jit`, NaN for a sequence with a length or a needed page out of range.

    Raises:
      TypeError: if `cache` is another kind, or tables or lengths are not integers.
      ValueError: if a shape does not fit, or, outside `jit`, a length or a needed page is out of
        range.
    """
    checks.check_kind(cache, LatentPages)
    block_tables = page_checks.check_block_tables(block_tables)
    lengths = page_checks.check_lengths("lengths", lengths, block_tables.shape[0])
    page_checks.check_readable(cache, block_tables, lengths)
    return _gather(cache, block_tables, lengths)


@jax.jit
def _append(
    cache: LatentPages,
    latent: jax.Array,
    rope: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    new_lengths: jax.Array,
) -> tuple[LatentPages, jax.Array | None]:
    """The pool with the tokens, and their scales as stored, ``[B, T]``."""
    content = formats.encode(cache, latent, rope)
    place = find_places(cache, latent.shape[1], block_tables, lengths, new_lengths)
    arrays: dict[str, Any] = {
        name: getattr(cache, name)
        .at[place.page, place.slot]
        .set(new, mode="drop", unique_indices=True)
        for name, new in content._asdict().items()
        if new is not None
    }
    return dataclasses.replace(
        cache, dropped_tokens=cache.dropped_tokens + place.dropped_tokens, **arrays
    ), content.scale


@jax.jit
def _gather(
    cache: LatentPages, block_tables: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, jax.Array]:
    readable = page_checks.readable(cache, block_tables, lengths)
    pages = jnp.clip(block_tables, 0, cache.num_pages - 1)
    batch, size = pages.shape[0], pages.shape[1] * cache.page_size
    held = (jnp.arange(size)[None] < lengths[:, None])[..., None]
    stored = jax.tree.map(lambda x: x[pages].reshape(batch, size, *x.shape[2:]), cache.tokens)

    def known(x: jax.Array) -> jax.Array:
        return jnp.where(readable[:, None, None], jnp.where(held, x, 0), jnp.nan)

    latent, rope = formats.decode(cache, stored)
    return known(latent), known(rope)
