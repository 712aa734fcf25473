"""`PagedCache`: keys and values in pages of one pool, in 16 bits or fewer.

A sequence is a row of a block table (the pages it holds, in order) and a length; both are the
caller's, usually a `PageAllocator`'s. A token is stored once, independently of all others: its bits
depend neither on its page nor on the call that brings it.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks, polar
from turbojax._gradient import refuse_gradients
from turbojax._pytrees import nbytes, pytree
from turbojax._registry import Implementation, ImplementationName, Registry
from turbojax.caches import checks
from turbojax.caches.paged import append_mosaic, append_triton
from turbojax.caches.paged import checks as page_checks
from turbojax.caches.paged import writing as page_writing
from turbojax.caches.paged.formats import FORMATS, Encoded, Formats
from turbojax.caches.paged.formats import to_fp8 as to_fp8
from turbojax.caches.paged.writing import page_arrays as page_arrays
from turbojax.sharding import tables
from turbojax.sharding.axes import Axes
from turbojax.sharding.creation import Sizes, born
from turbojax.sharding.per_device import per_device
from turbojax.sharding.specs import Split

PAGE_SIZES = (16, 32, 64, 128)

KV_DTYPES = tuple(FORMATS)
"""Ways to store a page; see `PagedCache`."""

APPEND = Registry(
    "paged.append",
    (
        Implementation("mosaic_gpu", append_mosaic.append, append_mosaic.append_unsupported),
        Implementation("triton", append_triton.append, append_triton.append_unsupported),
        Implementation("xla", page_writing.append),
    ),
)


@pytree
@dataclasses.dataclass(frozen=True)
class PagedCache(Split):
    """A pool of `P` pages for the keys and values of any number of sequences.

    Shapes: `K` KV heads, head dim `H`, `page_size` tokens a page. What `kv_dtype` means:

    - ``"auto"``: unchanged, in `dtype`.
    - ``"fp8_e4m3"``, ``"fp8_e5m2"``: ``x = stored * scale`` with one scale for all keys and one for
      all values, chosen at the start.
    - ``"int8"``: ``x = stored * scale`` with a float16 scale for each token and head, the largest
      magnitude over 127; see `turbojax.caches.paged.formats.to_int8`.
    - ``"turbo4"``: a random rotation, 4-bit codes of its coordinates and a norm per token and head
      (PolarQuant, Han et al., 2025; see `turbojax.polar`), 3.9 times smaller than bfloat16 at 128
      channels.
    - ``"turbo_k4v2"`` and so on: the same with as many bits for keys and for values as the name
      says, each 4, 3 or 2. Codes are packed without gaps, see `turbojax.polar.pack`.
    - ``"k8v4"``: keys as in ``"fp8_e4m3"``, values as in ``"turbo4"``: errors of keys cost more,
      since scores go through an exponential.
    - ``"int8_v4"``: keys as in ``"int8"``, values as in ``"turbo4"``.

    Made by `init_paged_cache`; the functions of `turbojax.paged` take it and never change it in
    place (donate it to `jit` to reuse its memory). The content of pages that no sequence holds, and
    of slots past a sequence's length, is arbitrary.

    Attributes:
      key: the stored keys: uint8 ``[P, K, page_size, H * bits / 8]`` for codes, in the order of
        `turbojax.polar.pack`; otherwise ``[P, K, page_size, H]`` in `dtype`, float8_e4m3fn,
        float8_e5m2 or int8.
      value: as `key`.
      key_norm: float16 ``[P, K, page_size]`` for codes, for int8 each vector's scale; NaN where a
        vector was not finite. None otherwise.
      value_norm: as `key_norm`.
      key_scale: float32 ``[]`` for fp8; None otherwise.
      value_scale: as `key_scale`.
      dropped_tokens: int32 ``[]``, tokens that calls under `jit` could not store: no page, or past
        the block table. Outside `jit` these are errors.
      kv_dtype: one of `KV_DTYPES`.
      head_dim: channels of a head, `H`.
      dtype: dtype of the queries, keys and values it takes.
      seed: of the rotation of codes.
    """

    key: jax.Array
    value: jax.Array
    key_norm: jax.Array | None
    value_norm: jax.Array | None
    key_scale: jax.Array | None
    value_scale: jax.Array | None
    dropped_tokens: jax.Array
    kv_dtype: str = dataclasses.field(metadata={"static": True})
    head_dim: int = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})
    seed: int = dataclasses.field(metadata={"static": True})

    AXES: ClassVar[dict[str, str]] = {
        "key": "PKRC",
        "value": "PKRC",
        "key_norm": "PKR",
        "value_norm": "PKR",
        "key_scale": "",
        "value_scale": "",
        "dropped_tokens": "",
    }
    """The letter of every axis of every array, see `turbojax.sharding.axes`."""

    PAGE_ARRAYS: ClassVar[tuple[str, ...]] = ("key", "value", "key_norm", "value_norm")
    """The fields with an axis of pages, the first; None where the format has no such thing."""

    @property
    def num_pages(self) -> int:
        """Pages of the pool, `P`."""
        return self.key.shape[0]

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads, `K`."""
        return self.key.shape[1]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.key.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held."""
        return nbytes(self)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, keys and values, of one layer."""
        return nbytes(page_arrays(self)) // self.num_pages

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, keys and values of all heads."""
        return self.page_bytes // self.page_size

    @property
    def compression_ratio(self) -> float:
        """Bytes of a token in bfloat16 over `token_bytes`."""
        return 4 * self.num_kv_heads * self.head_dim / self.token_bytes

    @property
    def formats(self) -> Formats:
        """How keys, and how values, are stored."""
        return FORMATS[self.kv_dtype]

    @property
    def rotation(self) -> polar.Rotation:
        """The rotation of keys and values that are stored as codes.

        Raises:
          ValueError: if neither are.
        """
        if not self.formats.is_rotated:
            raise ValueError(f"kv_dtype={self.kv_dtype!r} has no rotation: it has no codes")
        return polar.rotation(self.head_dim, self.seed)

    def validate(self) -> None:
        """Checks shapes, dtypes and, outside `jit`, that scales are positive, counts not < 0.

        Raises:
          ValueError: naming the field and what it breaks.
        """
        sizes = (self.num_pages, self.page_size, self.num_kv_heads, self.head_dim)
        wanted = jax.eval_shape(lambda: _empty(*sizes, self.kv_dtype, self.dtype, 1, 1, self.seed))
        names = (f.name for f in dataclasses.fields(self) if not f.metadata.get("static"))
        checks.check_arrays(self, wanted, names)
        if _checks.is_concrete(*jax.tree.leaves(self)):
            for name in ("key_scale", "value_scale"):
                if (scale := getattr(self, name)) is not None:
                    _checks.check_positive(f"cache.{name}", float(scale))
            if int(self.dropped_tokens) < 0:
                raise ValueError(
                    f"cache.dropped_tokens={int(self.dropped_tokens)} must not be negative"
                )


def init_paged_cache(
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    kv_dtype: str = "turbo4",
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    seed: int = 0,
    axes: Axes | None = None,
) -> PagedCache:
    """A pool of pages that nobody holds yet.

    Args:
      num_pages: pages of the pool, `P`.
      page_size: tokens a page: 16, 32, 64 or 128.
      num_kv_heads: key/value heads, `K`.
      head_dim: channels, `H`; for codes one that `turbojax.polar.rotation` knows, and for those of
        3 bits a multiple of 8.
      kv_dtype: one of `KV_DTYPES`: ``"auto"``, ``"fp8_e4m3"``, ``"fp8_e5m2"``, ``"int8"``,
        ``"turbo4"``, ``"k8v4"``, ``"int8_v4"``, ``"turbo_k4v2"`` ...; see `PagedCache`.
      dtype: of the queries, keys and values to come: bfloat16, float16 or float32.
      key_scale: for fp8 keys, what a stored key is multiplied with: the largest key over the
        format's largest value (448 for e4m3, 57344 for e5m2), or more.
      value_scale: the same for values.
      seed: for codes, of the rotation.
      axes: of a mesh, over which pages and heads are split, see `partition_specs`: each device
        makes its part, and none the whole.

    Raises:
      TypeError: if `dtype` is none of these, a size or the seed not an integer, or a scale not a
        number.
      ValueError: if a size cannot be split, is not positive or not among those above, `kv_dtype` is
        unknown, a scale is not positive, or a scale or seed is given that `kv_dtype` has no use
        for.
    """
    _checks.check_sizes(
        num_pages=num_pages, page_size=page_size, num_kv_heads=num_kv_heads, head_dim=head_dim
    )
    if page_size not in PAGE_SIZES:
        raise ValueError(f"{page_size=} must be one of {', '.join(map(str, PAGE_SIZES))}")
    if kv_dtype not in KV_DTYPES:
        raise ValueError(f"{kv_dtype=} must be one of {', '.join(KV_DTYPES)}")
    dtype = jnp.dtype(dtype)
    if dtype not in _checks.FLOAT_DTYPES:
        raise TypeError(f"{dtype=!s} must be bfloat16, float16 or float32")
    formats = FORMATS[kv_dtype]
    for name, scale in (("key", key_scale), ("value", value_scale)):
        _check_scale(name, scale, kv_dtype)
    _checks.check_integer("seed", seed)
    if seed and not formats.is_rotated:
        raise ValueError(f"{seed=} has no use with {kv_dtype=}: only codes are of rotated vectors")
    if formats.is_rotated:
        polar.rotation(head_dim, seed)  # raises unless there is one
    scales = {"key_scale": float(key_scale), "value_scale": float(value_scale)}
    static: Any = {"kv_dtype": kv_dtype, "dtype": dtype, "seed": int(seed), **scales}
    if axes is not None:
        sizes = Sizes(num_pages, page_size, num_kv_heads)
        return born(_empty, axes, sizes, head_dim=head_dim, **static)
    return _empty(num_pages, page_size, num_kv_heads, head_dim, **static)


def append(
    cache: PagedCache,
    key: jax.Array,
    value: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    *,
    new_lengths: jax.Array | None = None,
    implementation: ImplementationName | None = None,
) -> PagedCache:
    """Writes new tokens, one or many per sequence: token `t` of sequence `b` at ``lengths[b] + t``.

    Position `p` of sequence `b` is slot ``p % page_size`` of page
    ``block_tables[b, p // page_size]``. The sequences of one call must write to different places:
    pages that they share are copied first (`PageAllocator.extend` says which). Under `jit`, what
    two tokens for one place leave there is arbitrary.

    Args:
      cache: the pool.
      key: ``[B, T, K, H]`` in `cache.dtype`, after the rotary embedding.
      value: the same shape and dtype.
      block_tables: integer ``[B, max_pages]``. Only entries of pages that are written are looked
        at; the others may be anything, usually -1.
      lengths: integer ``[B]``, tokens held before.
      new_lengths: optional integer ``[B]``: how many of the `T` tokens belong to each sequence, the
        first ones; all of them if not given.
      implementation: ``"mosaic_gpu"`` (one kernel for every format;
        ``"fp8_e4m3"`` from Ada on), ``"triton"`` (one for all that is stored as codes or in
        int8), both with a head dim that is a power of two, ``"xla"``, or None to choose. All store
        the same bits.

    Returns:
      The pool with the tokens. Under `jit`, a token without a page in the pool, past its block
      table or at a negative position is dropped and counted in `dropped_tokens`, as are tokens that
      `new_lengths` promises beyond `T` (a negative one acts as 0).

    Raises:
      TypeError: if `cache` is another kind, a dtype differs from `cache.dtype`, or tables or
        lengths are not integers.
      ValueError: if a shape does not fit, or, outside `jit`: where a token has no place, two have
        the same one, or a value exceeds the format's range. Under `jit` the last becomes NaN. NaN
        and infinity are no error: they are stored as they are (auto) or as NaN.
      NotImplementedError: if the implementation asked for cannot run this, or when it is
        differentiated.
    """
    block_tables, lengths = check_arguments(cache, key, value, block_tables, lengths)
    batch, tokens = key.shape[:2]
    new_lengths = _checks.check_lengths("new_lengths", new_lengths, batch, tokens)
    page_checks.check_places(cache, block_tables, lengths, new_lengths)
    run = per_device(tables.PAGED_APPEND, _append, implementation=implementation)
    cache, content = refuse_gradients(run, "append")(
        cache, key, value, block_tables, lengths, new_lengths
    )
    page_checks.check_range(cache, key, value, content, new_lengths)
    return cache


def _append(
    cache: PagedCache,
    key: jax.Array,
    value: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    new_lengths: jax.Array,
    *,
    implementation: ImplementationName | None,
) -> tuple[PagedCache, Any]:
    """`append` by the implementation for these arrays; also returns the tokens as stored."""
    chosen = APPEND.select(implementation, cache=cache, key=key, block_tables=block_tables)
    extended, content = chosen.run(cache, key, value, block_tables, lengths, new_lengths)
    return extended, content


def gather(
    cache: PagedCache,
    block_tables: jax.Array,
    lengths: jax.Array,
    *,
    dtype: jax.typing.DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The keys and values that sequences hold, densely, for tests and debugging.

    For codes these are what attention works with: the centroids of
    `turbojax.polar.integer_centroids` times the norm, in float32, rotated back.

    Args:
      cache: the pool.
      block_tables: integer ``[B, max_pages]``; entries past a sequence's length may be anything.
      lengths: integer ``[B]``, tokens held.
      dtype: of the result, `cache.dtype` if not given.

    Returns:
      key, value: ``[B, max_pages * page_size, K, H]``, zero past each length. Under `jit`, all NaN
      for a sequence with a length or a needed page out of range.

    Raises:
      TypeError: if `cache` is another kind, tables or lengths are not integers, or `dtype` is not
        floating point.
      ValueError: if a shape does not fit, or, outside `jit`, a length or a needed page is out of
        range.
    """
    checks.check_kind(cache, PagedCache)
    block_tables = page_checks.check_block_tables(block_tables)
    lengths = page_checks.check_lengths("lengths", lengths, block_tables.shape[0])
    page_checks.check_readable(cache, block_tables, lengths)
    wanted = cache.dtype if dtype is None else jnp.dtype(dtype)
    if not jnp.issubdtype(wanted, jnp.floating):
        raise TypeError(f"dtype={wanted} must be floating point")
    key, value = _gather(cache, block_tables, lengths)
    return key.astype(wanted), value.astype(wanted)


def check_arguments(
    cache: PagedCache,
    key: jax.Array,
    value: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Block tables and lengths as `append` takes them; raises as it does."""
    checks.check_kind(cache, PagedCache)
    _checks.check_key_value(key, value)
    if key.shape[2:] != (cache.num_kv_heads, cache.head_dim):
        raise ValueError(
            f"{key.shape=} must be [B, T, {cache.num_kv_heads}, {cache.head_dim}], "
            "as the cache was made for"
        )
    if key.dtype != cache.dtype:
        raise TypeError(f"key.dtype={key.dtype} must equal cache.dtype={cache.dtype}")
    block_tables = page_checks.check_block_tables(block_tables, key.shape[0])
    return block_tables, page_checks.check_lengths("lengths", lengths, key.shape[0])


def _check_scale(side: str, scale: float, kv_dtype: str) -> None:
    name = f"{side}_scale"
    if scale is None:
        raise TypeError(f"{name} is None, must be a number")
    _checks.check_number(name, scale)
    _checks.check_positive(name, scale)
    if not getattr(FORMATS[kv_dtype], side).has_scale and scale != 1:
        raise ValueError(f"{name}={scale} has no use with {kv_dtype=}: only fp8 has one scale")


def _empty(
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    kv_dtype: str,
    dtype: np.dtype,
    key_scale: float,
    value_scale: float,
    seed: int,
) -> PagedCache:
    rows = (num_pages, num_kv_heads, page_size)
    key, value = FORMATS[kv_dtype]
    return PagedCache(
        key=jnp.zeros((*rows, key.width(head_dim)), key.dtype(dtype)),
        value=jnp.zeros((*rows, value.width(head_dim)), value.dtype(dtype)),
        key_norm=jnp.zeros(rows, jnp.float16) if key.has_norm else None,
        value_norm=jnp.zeros(rows, jnp.float16) if value.has_norm else None,
        key_scale=jnp.asarray(key_scale, jnp.float32) if key.has_scale else None,
        value_scale=jnp.asarray(value_scale, jnp.float32) if value.has_scale else None,
        dropped_tokens=jnp.zeros((), jnp.int32),
        kv_dtype=kv_dtype,
        head_dim=head_dim,
        dtype=dtype,
        seed=seed,
    )


# Reading -----------------------------------------------------------------------------------------


@jax.jit
def _gather(
    cache: PagedCache, block_tables: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Keys and values in float32 ``[B, S, K, H]``."""
    readable = page_checks.readable(cache, block_tables, lengths)
    rotation = cache.rotation if cache.formats.is_rotated else None
    pages = jnp.clip(block_tables, 0, cache.num_pages - 1)
    batch, size = pages.shape[0], pages.shape[1] * cache.page_size
    held = jnp.arange(size)[None] < lengths[:, None]

    def tokens(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x[pages], 2, 3).reshape(batch, size, cache.num_kv_heads, *x.shape[3:])

    def side(name: str) -> jax.Array:
        stored, norm = (getattr(cache, field) for field in (name, f"{name}_norm"))
        encoded = Encoded(tokens(stored), None if norm is None else tokens(norm))
        scale = getattr(cache, f"{name}_scale")
        x = getattr(cache.formats, name).decode(encoded, scale, rotation)
        x = jnp.where(held[:, :, None, None], x, 0)
        return jnp.where(readable[:, None, None, None], x, jnp.nan)

    return side("key"), side("value")
