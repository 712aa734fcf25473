"""KIVI's cache, and GEAR's on top of it: codes of keys per channel, of values per token.

After Liu et al., *KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache* (2024), and Kang
et al., *GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative Inference of
LLM* (2024). Both dequantize before they attend: what is possible without a fused kernel.

KIVI (its algorithm 1): the newest tokens stay as they are. Keys wait until `residual_length` of
them are there, and are then quantized together, since a channel's tokens share a scale. Of values
the newest `residual_length` wait, and one is quantized for each that arrives.

GEAR-L (a config with a `rank`): keys and values share one schedule, and all that waits is quantized
at once. Of the error that the codes make, an approximation of low rank is kept for each head, in 16
bits: one pair of factors for all of a prompt's quantized tokens (`store_prompt`), and one for each
`residual_length` tokens after it. The approximation is the best one, where the paper iterates from
a random start.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import _checks
from turbojax.attention.options import check_implementation
from turbojax.caches import checks, rolling_buffer
from turbojax.caches.comparison.codes import dequantize as numbers
from turbojax.caches.comparison.codes import quantize, rounded, stored_dtype
from turbojax.caches.comparison.kivi_cache import Kivi as Kivi
from turbojax.caches.comparison.kivi_cache import KiviCache as KiviCache
from turbojax.caches.comparison.kivi_cache import init_cache as init_cache
from turbojax.numerics.packing import pack, unpack
from turbojax.sharding import tables
from turbojax.sharding.per_device import per_device_explicit

_SIDES = ("key", "value")


def append(
    cache: KiviCache,
    key: jax.Array,
    value: jax.Array,
    *,
    lengths: jax.Array | None = None,
    implementation: str | None = None,
) -> KiviCache:
    """See `turbojax.append`; the result does not depend on how tokens are split into calls."""
    check_implementation(implementation, ("xla",))
    lengths = _checked(cache, key, value, lengths)
    checks.check_room(cache, lengths)
    return _append(cache, key, value, lengths, of_prompt=False)


def store_prompt(
    cache: KiviCache, key: jax.Array, value: jax.Array, *, lengths: jax.Array | None = None
) -> KiviCache:
    """Stores prompts in empty sequences: as `append`, but for a rank's one pair of factors.

    Args:
      cache: the cache; under `jit`, sequences that are not empty stay as they are and turn
        `overflowed`.
      key: ``[B, T, K, H]`` in `cache.dtype`.
      value: the same.
      lengths: optional int ``[B]``, tokens of each prompt, the first ones.

    Returns:
      The cache with the prompts, their beginnings where they exceed `max_length`.

    Raises:
      TypeError: see `append`.
      ValueError: see `append`, and, outside `jit`, if a sequence is not empty.
    """
    lengths = _checked(cache, key, value, lengths)
    checks.check_prompt_lengths(cache, lengths)
    return _append(cache, key, value, lengths, of_prompt=True)


def _checked(
    cache: KiviCache, key: jax.Array, value: jax.Array, lengths: jax.Array | None
) -> jax.Array:
    """Raises unless these are tokens for the cache; gives how many are real, ``[B]``."""
    checks.check_kind(cache, KiviCache)
    checks.check_tokens(cache, key, value)
    return _checks.check_lengths("lengths", lengths, *key.shape[:2])


def _append(cache: KiviCache, *arrays: jax.Array, of_prompt: bool) -> KiviCache:
    run = per_device_explicit(tables.APPEND, _append_here, of_prompt=of_prompt)
    extended: KiviCache = run(cache, *arrays)
    return extended


@functools.partial(jax.jit, static_argnames="of_prompt")
def _append_here(
    cache: KiviCache, key: jax.Array, value: jax.Array, lengths: jax.Array, *, of_prompt: bool
) -> KiviCache:
    tokens, before = key.shape[1], cache.lengths
    most = jnp.minimum(cache.max_length - before, tokens)
    if of_prompt:
        most = jnp.where(before == 0, most, 0)
    accepted = jnp.clip(lengths, 0, most)
    after = before + accepted
    done, due = cache.config.compressed(before), cache.config.compressed(after)
    compressed: dict[str, Any] = {}
    for i, (side, new) in enumerate(zip(_SIDES, (key, value), strict=True)):
        run = functools.partial(_compress, side=side, of_prompt=of_prompt)
        # Most single tokens complete no group: then nothing is computed.
        compressed |= jax.lax.cond(
            jnp.any(due[i] > done[i]),
            run,
            lambda cache, *_, side=side: _codes_of(cache, side),
            *(cache, new, done[i], due[i]),
        )
    if cache.config.rank and of_prompt:
        blocks = due[0] // cache.residual_length
        compressed["prompt_blocks"] = jnp.where(before == 0, blocks, cache.prompt_blocks)
    rows = rolling_buffer.rows_of_new(before, accepted, tokens, cache.residual_length)
    return dataclasses.replace(
        cache,
        **compressed,
        key_residual=_put(cache.key_residual, rows, key),
        value_residual=_put(cache.value_residual, rows, value),
        lengths=after,
        overflowed=cache.overflowed | (lengths > accepted),
    )


def _codes_of(cache: KiviCache, side: str) -> dict[str, jax.Array]:
    """The arrays of a side that `_compress` changes, by name."""
    names = ("codes", "minimum", "scale", *(("left", "right") if cache.config.rank else ()))
    return {f"{side}_{name}": getattr(cache, f"{side}_{name}") for name in names}


def _compress(
    cache: KiviCache,
    new: jax.Array,
    done: jax.Array,
    due: jax.Array,
    *,
    side: str,
    of_prompt: bool,
) -> dict[str, jax.Array]:
    """A side's arrays with codes of tokens `done` to `due`, which are in the residual or new."""
    config, tokens = cache.config, new.shape[1]
    count = tokens
    if side == "key" or config.rank:
        size = config.residual_length
        count = (size - 1 + tokens) // size * size
    position = done[:, None] + jnp.arange(count)[None]
    taken = _tokens_at(position, getattr(cache, f"{side}_residual"), new, cache.lengths)
    is_due = position < due[:, None]
    x = jnp.where(is_due[:, :, None, None], taken, jnp.zeros((), new.dtype))
    codes, minimum, scale = _quantize(x, side, config)
    shared = config.group_size if side == "key" else 1
    parts = {
        "codes": (pack(codes, config.bits), 1),
        "minimum": (minimum, shared),
        "scale": (scale, shared),
    }
    changes = {}
    for name, (part, per) in parts.items():
        old = getattr(cache, f"{side}_{name}")
        changes[f"{side}_{name}"] = _put(old, _rows(done, due, part.shape[1], per, old), part)
    if config.rank:
        error = x.astype(jnp.float32) - _numbers(codes, minimum, scale, side, config)
        changes |= _with_factors(cache, side, error, done, due, of_prompt)
    return changes


def _tokens_at(
    position: jax.Array, residual: jax.Array, new: jax.Array, before: jax.Array
) -> jax.Array:
    """Tokens ``[B, n, K, H]`` at positions ``[B, n]``: from the residual, or from the new ones."""
    size = residual.shape[1]
    joined = jnp.concatenate([residual, new], axis=1)
    offset = position - before[:, None]
    index = jnp.where(offset < 0, position % size, size + offset)
    return jax.vmap(lambda x, i: jnp.take(x, i, axis=0, mode="clip"))(joined, index)


def _rows(done: jax.Array, due: jax.Array, count: int, per: int, array: jax.Array) -> jax.Array:
    """int32 ``[B, count]``: where due rows of `per` tokens go; the others go past the end."""
    row, past = jnp.arange(count)[None], array.shape[1]
    is_due = row < ((due - done) // per)[:, None]
    return jnp.where(is_due, done[:, None] // per + row, past + row)


def _put(array: jax.Array, rows: jax.Array, new: jax.Array) -> jax.Array:
    """The array ``[B, S, ...]`` with new rows ``[B, n, ...]``; rows past its last are dropped."""
    put = jax.vmap(lambda a, i, x: a.at[i].set(x, mode="drop", unique_indices=True))
    return put(array, rows, new)


def _with_factors(
    cache: KiviCache,
    side: str,
    error: jax.Array,
    done: jax.Array,
    due: jax.Array,
    of_prompt: bool,
) -> dict[str, jax.Array]:
    """The side's factors with those of an error ``[B, n, K, H]`` of the codes."""
    size = cache.residual_length
    is_due = jnp.arange(error.shape[1])[None] < (due - done)[:, None]
    # Values that are not finite show in their group's scale; other groups must not change.
    error = jnp.where(is_due[:, :, None, None] & jnp.isfinite(error), error, 0)
    pairs = 1 if of_prompt else error.shape[1] // size
    parts = error.reshape(error.shape[0], pairs, -1, *error.shape[2:]).swapaxes(2, 3)
    left, right = _low_rank(parts, cache.config.rank, stored_dtype(cache.dtype))
    old_left, old_right = (getattr(cache, f"{side}_{x}") for x in ("left", "right"))
    rows = _rows(done, due, error.shape[1], 1, old_left)
    pair, past = jnp.arange(pairs)[None], old_right.shape[1]
    slots = _slot(done[:, None] // size + pair, cache.prompt_blocks[:, None])
    is_due = pair < ((due - done) // size)[:, None]
    return {
        f"{side}_left": _put(old_left, rows, left.swapaxes(2, 3).reshape(*error.shape[:3], -1)),
        f"{side}_right": _put(old_right, jnp.where(is_due, slots, past + pair), right),
    }


def _slot(block: jax.Array, prompt_blocks: jax.Array) -> jax.Array:
    """Which pair of factors a block of tokens has: the first for all of the prompt's."""
    return jnp.maximum(block + 1 - jnp.maximum(prompt_blocks, 1), 0)


def dequantize(
    cache: KiviCache, *, dtype: jax.typing.DTypeLike | None = None
) -> tuple[jax.Array, jax.Array]:
    """See `turbojax.dequantize`."""
    checks.check_kind(cache, KiviCache)
    key, value = per_device_explicit(tables.DEQUANTIZE, _dequantize)(cache)
    return (key, value) if dtype is None else (key.astype(dtype), value.astype(dtype))


def _dequantize(cache: KiviCache) -> tuple[jax.Array, jax.Array]:
    compressed = cache.config.compressed(cache.lengths)
    key, value = (_side(cache, *pair) for pair in zip(_SIDES, compressed, strict=True))
    return key, value


def _side(cache: KiviCache, side: str, compressed: jax.Array) -> jax.Array:
    """The keys or values: the first `compressed` ``[B]`` from codes, others from the residual."""
    codes, minimum, scale, left, right, residual = (
        getattr(cache, f"{side}_{name}")
        for name in ("codes", "minimum", "scale", "left", "right", "residual")
    )
    out = _numbers(unpack(codes, cache.config.bits), minimum, scale, side, cache.config)
    if left is not None:
        block = jnp.arange(right.shape[1])[None]
        slots = _slot(block, cache.prompt_blocks[:, None])
        of_block = jax.vmap(lambda x, i: jnp.take(x, i, axis=0, mode="clip"))(right, slots)
        parts = left.reshape(left.shape[0], block.shape[1], -1, *left.shape[2:])
        added = _product(parts.swapaxes(2, 3), of_block).swapaxes(2, 3)
        out = out + added.reshape(out.shape)
    length, size = cache.max_length, residual.shape[1]
    out = jnp.pad(out[:, :length], ((0, 0), (0, max(length - out.shape[1], 0)), (0, 0), (0, 0)))
    position = jnp.arange(length)
    newest = jnp.take(residual, position % size, axis=1)
    is_code, is_held = (position[None] < x[:, None] for x in (compressed, cache.lengths))
    out = jnp.where(is_code[:, :, None, None], out.astype(residual.dtype), newest)
    return jnp.where(is_held[:, :, None, None], out, jnp.zeros((), out.dtype))


def _quantize(x: jax.Array, side: str, config: Kivi) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Codes of tokens ``[B, n, K, H]``, and what their groups share."""
    grouped, axis = _grouped(x, side, config)
    codes, minimum, scale = quantize(grouped, config.bits, axis, stored_dtype(x.dtype))
    return codes.reshape(x.shape), minimum, scale


def _numbers(
    codes: jax.Array, minimum: jax.Array, scale: jax.Array, side: str, config: Kivi
) -> jax.Array:
    """float32 ``[B, n, K, H]`` that such codes stand for, without low-rank factors."""
    grouped, axis = _grouped(codes, side, config)
    return numbers(grouped, minimum, scale, axis).reshape(codes.shape)


def _grouped(x: jax.Array, side: str, config: Kivi) -> tuple[jax.Array, int]:
    """Tokens ``[B, n, K, H]`` with an axis of those that share a scale, and its number."""
    batch, tokens, heads, channels = x.shape
    if side == "key":
        return x.reshape(batch, -1, config.group_size, heads, channels), 2
    return x.reshape(batch, tokens, heads, -1, config.channels_per_group(channels)), 4


def _low_rank(x: jax.Array, rank: int, dtype: np.dtype) -> tuple[jax.Array, jax.Array]:
    """The best approximation of a rank, by the singular vectors of its channels.

    These are the last eigenvectors of ``x^T x``: a small matrix, however many tokens there are, and
    no random start, so that the same tokens give the same bits.

    Args:
      x: float32 ``[..., n, H]``, finite.
      rank: `r`, at most `H`.
      dtype: in which both factors are stored.

    Returns:
      left: ``[..., n, r]`` in `dtype`.
      right: ``[..., r, H]``, rows of length 1; ``x`` is about ``left @ right``, and no other
        product of such factors is nearer to it, but for the rounding of both.
    """
    exact = jax.lax.Precision.HIGHEST
    gram = jnp.einsum("...nc,...nd->...cd", x, x, precision=exact)
    _, vectors = jnp.linalg.eigh(gram)
    right = rounded(jnp.swapaxes(vectors[..., -rank:], -1, -2), dtype)
    left = jnp.einsum("...nc,...rc->...nr", x, right, precision=exact)
    return rounded(left, dtype).astype(dtype), right.astype(dtype)


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    """float32 ``[..., n, H]`` of what `_low_rank` gave."""
    wide = [x.astype(jnp.float32) for x in (left, right)]
    return jnp.einsum("...nr,...rc->...nc", *wide, precision=jax.lax.Precision.HIGHEST)
