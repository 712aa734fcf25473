"""The one compiled model step of an engine: tokens of all decoding sequences, a piece of a prompt.

All tokens go through the layers as one batch of rows of fixed size, ``S`` of decoding sequences
and ``C`` of one prompt, so any mix of work runs the same program, and a row's numbers do not depend
on what the other rows hold.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from turbojax import paged
from turbojax.kv import Attend
from turbojax.models.decoder import Decoder
from turbojax.models.engine import compilation
from turbojax.models.engine.groups import Windows, group_of, layers_of
from turbojax.models.generation.sampling import Array, SamplingRows, greedy_rows
from turbojax.models.quantized import QuantizedDecoder
from turbojax.ops.extras import of_layer
from turbojax.ops.options import PLAIN
from turbojax.ops.paged_attention import attend_pages, select


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Work:
    """What a step does: rows 0..S-1 decode, one slot each, and row S is a piece of a prompt.

    A row without work has no tokens, length 0 and an empty table.

    Attributes:
      tables: int32 ``[G, S + 1, P]``, of each group of layers the pages of the rows' sequences.
      lengths: int32 ``[S + 1]``, tokens in their pages before this step.
      counts: int32 ``[S + 1]``, new tokens: 0 or 1, and 0..C of the piece.
      tokens: int32 ``[S]``, the token to decode; -1 for the one that the slot got last.
      piece: int32 ``[C]``, the prompt's next tokens.
      piece_slot: int32 ``[]``, the slot that continues with the token after the prompt; S while the
        prompt is not complete.
      sampling: of all ``S + 1`` rows.
    """

    tables: Array
    lengths: Array
    counts: Array
    tokens: Array
    piece: Array
    piece_slot: Array
    sampling: SamplingRows


def idle_work(slots: int, piece_size: int, max_pages: int, num_groups: int) -> Work:
    """A step's work without any, in numpy arrays, to be filled in."""
    rows = slots + 1
    return Work(
        tables=np.full((num_groups, rows, max_pages), -1, np.int32),
        lengths=np.zeros(rows, np.int32),
        counts=np.zeros(rows, np.int32),
        tokens=np.full(slots, -1, np.int32),
        piece=np.zeros(piece_size, np.int32),
        piece_slot=np.int32(slots),
        sampling=greedy_rows(rows),
    )


def check_implementation(
    implementation: str | None, work: Work, cache: paged.PagedCache, num_heads: int
) -> None:
    """Raises unless `paged_attention` can run both of a step's calls; nothing is compiled.

    Args:
      implementation: as in `run_step`.
      work: of the sizes of a step.
      cache: one layer's pool.
      num_heads: of queries.

    Raises:
      ValueError: if the name is unknown.
      NotImplementedError: if the implementation cannot run this here.
    """
    slots, size = work.tokens.shape[0], work.piece.shape[0]
    calls = ((slots, 1, work.tables[0, :slots]), (1, size, work.tables[0, slots:]))
    for rows, tokens, tables in calls:
        shape = (rows, tokens, num_heads, cache.head_dim)
        query: Any = jax.ShapeDtypeStruct(shape, cache.dtype)
        select(implementation, query, cache, tables, options=PLAIN.complete(cache.head_dim))


@functools.partial(jax.jit, static_argnames=("implementation", "windows"), donate_argnames="caches")
def run_step(
    decoder: Decoder | QuantizedDecoder,
    caches: tuple[paged.PagedCache, ...],
    last_tokens: jax.Array,
    work: Work,
    *,
    implementation: str | None,
    windows: Windows,
) -> tuple[tuple[paged.PagedCache, ...], jax.Array, jax.Array]:
    """One step of all sequences, up to the logits; `choose` continues with them.

    Args:
      decoder: the weights.
      caches: the layers' pools, donated.
      last_tokens: int32 ``[S]``, the token that each slot got last.
      work: what to do; its `sampling` and `piece_slot` are for `choose`.
      implementation: of `paged_attention`.
      windows: of the groups of layers.

    Returns:
      The new pools; float32 ``[S + 1, V]``, the rows' logits (of rows without work they mean
      nothing); int32 ``[]``, tokens that a layer's pool could not store so far.
    """
    compilation.note()
    slots, size = work.tokens.shape[0], work.piece.shape[0]
    within = jnp.arange(size, dtype=jnp.int32)
    decoding = jnp.where(work.tokens >= 0, work.tokens, last_tokens)
    tokens = jnp.concatenate([decoding, work.piece])
    positions = jnp.concatenate([work.lengths[:slots], work.lengths[slots] + within])
    hidden, caches = decoder.hidden(
        tokens[None], positions[None], _attend(work, positions, implementation, windows), caches
    )
    last_of_piece = slots + jnp.maximum(work.counts[slots:] - 1, 0)
    rows = jnp.concatenate([jnp.arange(slots, dtype=jnp.int32), last_of_piece])
    # All layers of a group write to the same places, so that one of them counts for all.
    lost = [caches[layers[0]].lost for layers in layers_of(decoder.config, windows)]
    return caches, decoder.logits(hidden[0][rows]), jnp.sum(jnp.stack(lost))


def _attend(
    work: Work, positions: jax.Array, implementation: str | None, windows: Windows
) -> Attend:
    """Attention of all rows ``[1, S + C, heads, H]`` to their sequences' pages."""
    slots, size = work.tokens.shape[0], work.piece.shape[0]
    piece_tables = jnp.broadcast_to(
        work.tables[:, slots:], (len(windows), size, work.tables.shape[2])
    )
    row_tables = jnp.concatenate([work.tables[:, :slots], piece_tables], axis=1)
    in_piece = jnp.arange(size, dtype=jnp.int32) < work.counts[slots]
    row_counts = jnp.concatenate([work.counts[:slots], in_piece.astype(jnp.int32)])
    lengths = work.lengths + work.counts

    def attend(query, key, value, cache, options=PLAIN, sinks=None):  # type: ignore[no-untyped-def]
        group = group_of(options.local_window_size, windows)
        tables = work.tables[group]
        # Every row is written as if it were a sequence of its own: one scatter for all of them.
        cache = paged.append(
            cache,
            key[0][:, None],
            value[0][:, None],
            row_tables[group],
            positions,
            new_lengths=row_counts,
        )
        static, extras = options.complete(query.shape[3]), of_layer(query, sinks)
        decoded, _ = attend_pages(
            query[0, :slots, None],
            cache,
            tables[:slots],
            lengths[:slots],
            work.counts[:slots],
            options=static,
            extras=extras,
            implementation=implementation,
        )
        piece, _ = attend_pages(
            query[:, slots:],
            cache,
            tables[slots:],
            lengths[slots:],
            work.counts[slots:],
            options=static,
            extras=extras,
            implementation=implementation,
        )
        return jnp.concatenate([decoded[:, 0], piece[0]])[None], cache

    return attend
