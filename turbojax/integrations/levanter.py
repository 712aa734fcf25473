"""Levanter: turbojax attention in its models, and turbojax pages in its inference engine.

`with_turbojax` gives the same model with other attention layers of the same parameters.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from turbojax import paged
from turbojax._registry import ImplementationName
from turbojax.attention.options import check_implementation
from turbojax.attention.turbo import turbo_attention
from turbojax.caches.paged.pool import KV_DTYPES
from turbojax.numerics.config import TurboConfig

Model = TypeVar("Model")


@dataclasses.dataclass(frozen=True)
class _Settings:
    config: TurboConfig | None
    kv_dtype: str
    implementation: ImplementationName | None


def with_turbojax(
    model: Model,
    *,
    config: TurboConfig | None = TurboConfig(),
    kv_dtype: str = "auto",
    implementation: ImplementationName | None = None,
) -> Model:
    """A model of Levanter that attends with turbojax, in training and in its ``InferenceEngine``.

    Args:
      model: one whose attention is ``levanter.layers.attention.Attention``, such as Llama, Qwen,
        Mistral, Gemma, OLMo and Mixtral. Haliax' axes, scans over layers and meshes stay.
      config: numerics of attention in training; None leaves the model's own attention there. Masks
        keep their meaning: causality with its offset, windows and segments are what kernels know,
        an explicit mask becomes a bias.
      kv_dtype: how the engine's pages are stored, see `turbojax.PagedCache`.
      implementation: of paged attention, and of the attention in training; None to choose.

    Returns:
      A model of the same structure and parameters.

    Raises:
      TypeError: if the model has no such attention.
      ValueError: if there is no such format or implementation.
    """
    from levanter.layers.attention import Attention

    check_implementation(implementation)
    if kv_dtype not in KV_DTYPES:
        raise ValueError(f"{kv_dtype=} must be one of {', '.join(KV_DTYPES)}")
    cls = _attention_class(_Settings(config, kv_dtype, implementation))
    found = 0

    def change(node: Any) -> Any:
        nonlocal found
        if type(node) is not Attention:
            return node
        found += 1
        # A module of equinox is a frozen dataclass: the new one has the old one's fields.
        new = object.__new__(cls)
        for field in dataclasses.fields(node):
            object.__setattr__(new, field.name, getattr(node, field.name))
        return new

    changed: Model = jax.tree.map(change, model, is_leaf=lambda x: type(x) is Attention)
    if not found:
        raise TypeError(f"model is a {type(model).__qualname__}, must have layers of {Attention}")
    return changed


@functools.cache
def _attention_class(settings: _Settings) -> Any:
    """A class of attention layers that attend with turbojax."""
    from haliax.jax_utils import maybe_rng_split
    from levanter.layers.attention import Attention

    class TurboAttention(Attention):
        def __call__(self, x: Any, mask: Any, *, key: Any = None, pos_ids: Any = None) -> Any:
            """See ``Attention.__call__``."""
            if settings.config is None:
                return super().__call__(x, mask, key=key, pos_ids=pos_ids)
            key_proj, key_o = maybe_rng_split(key, 2)
            query, k, v = self._compute_qkv(x, key=key_proj, pos_ids=pos_ids)
            out = _attend(settings, self.config, query, k, v, mask)
            return self.o_proj(out.astype(x.dtype), key=key_o)

        def empty_page_cache(self, spec: Any, *, dtype: Any) -> Any:
            """See ``Attention.empty_page_cache``."""
            c = self.config
            sizes = spec.num_pages, spec.page_size, c.num_kv_heads, c.head_size
            pages = paged.init_cache(*sizes, kv_dtype=settings.kv_dtype, dtype=dtype)
            return _page_cache_class()(pages)

        def paged_decode(
            self, x: Any, kv_cache: Any, batch_info: Any, *, pos_ids: Any, key: Any = None
        ) -> tuple[Any, Any]:
            """See ``Attention.paged_decode``."""
            key_proj, key_o = maybe_rng_split(key, 2)
            query, k, v = self._compute_qkv(x, key=key_proj, pos_ids=pos_ids)
            pages, batch = kv_cache.pages, _read(batch_info)
            pages = _store(settings, pages, _plain(k)[0], _plain(v)[0], batch)
            out = _attend_pages(settings, self.config, pages, _plain(query)[0], batch)
            named = _named(out, self.config, (query.resolve_axis("position"),))
            return self.o_proj(named.astype(x.dtype), key=key_o), _page_cache_class()(pages)

    return TurboAttention


@functools.cache
def _page_cache_class() -> Any:
    """Levanter's page cache that holds a turbojax pool."""
    from levanter.layers.kv_cache import PageCache

    class TurboPageCache(PageCache):
        pages: paged.PagedCache

        def copy_page(self, src_page: Any, dst_page: Any) -> Any:
            """See ``PageCache.copy_page``."""
            source, target = (jnp.asarray(x, jnp.int32).reshape(1) for x in (src_page, dst_page))
            return TurboPageCache(paged.copy_pages(self.pages, source, target))

    return TurboPageCache


# Training -----------------------------------------------------------------------------------------


def _attend(settings: _Settings, c: Any, query: Any, key: Any, value: Any, mask: Any) -> Any:
    """``[batch.., position, heads, head_size]`` of whole sequences."""
    own = ("kv_head", "q_heads_per_group", "position", "head_size")
    batch = tuple(x for x in query.axes if x.name not in own)
    dtype = jnp.float32 if c.upcast_attn else query.dtype
    arrays = (_plain(x, batch).astype(dtype) for x in (query, key, value))
    position = query.resolve_axis("position")
    assert settings.config is not None
    out = turbo_attention(
        *arrays,
        config=settings.config,
        scale=c.scaling_factor,
        logits_soft_cap=c.logits_soft_cap,
        implementation=settings.implementation,
        **_visibility(mask, batch, position),
    )
    assert isinstance(out, jax.Array)
    return _named(out, c, (*batch, position))


def _visibility(mask: Any, batch: tuple[Any, ...], position: Any) -> dict[str, Any]:
    """What a mask of Levanter says, as arguments of `turbo_attention`."""
    from levanter.layers.attention import AttentionMask

    if mask is None:
        return {}
    if not isinstance(mask, AttentionMask):
        mask = AttentionMask.explicit(mask)

    def plain(x: Any, *axes: Any) -> jax.Array:
        x = x.broadcast_axis((*batch, *axes)).rearrange((*batch, *axes))
        rows = math.prod(axis.size for axis in batch)
        return jnp.asarray(x.array.reshape(rows, *(axis.size for axis in axes)))

    given: dict[str, Any] = {"is_causal": mask.is_causal}
    if mask.causal_offset is not None:
        given["query_offset"] = plain(mask.causal_offset)
    if mask.sliding_window is not None:
        if mask.causal_offset is not None:
            raise NotImplementedError(
                "a mask with a window and an offset: Levanter's window does not move with it"
            )
        given["local_window_size"] = (mask.sliding_window - 1, 0)
    if mask.segment_ids is not None:
        names = ("query_segment_ids", "key_value_segment_ids")
        for name, ids in zip(names, mask.segment_ids, strict=True):
            given[name] = plain(ids.rename({ids.axes[-1].name: position.name}), position)
    if mask.explicit_mask is not None:
        keys = position.alias("key_position")
        shown = plain(mask.explicit_mask, position, keys)
        given["bias"] = jnp.where(shown, 0.0, -jnp.inf)[:, None]
    return given


def _plain(x: Any, batch: tuple[Any, ...] = ()) -> jax.Array:
    """``[B, position, heads, head_size]`` of a named array; `B` is 1 without axes of a batch."""
    groups = [x.axis_size(a.name) for a in x.axes if a.name == "q_heads_per_group"]
    names = ("position", "kv_head", *(["q_heads_per_group"] if groups else []), "head_size")
    array = x.rearrange((*(axis.name for axis in batch), *names)).array
    heads = x.axis_size("kv_head") * (groups[0] if groups else 1)
    sizes = math.prod(axis.size for axis in batch), x.axis_size("position"), heads
    return jnp.asarray(array.reshape(*sizes, x.axis_size("head_size")))


def _named(out: jax.Array, c: Any, lead: tuple[Any, ...]) -> Any:
    """The output ``[B, position, N, H]`` with Levanter's axes, `lead` in place of the first two."""
    import haliax as hax

    axes = (*lead, c.Heads, c.HeadSize)
    return hax.named(out.reshape(tuple(axis.size for axis in axes)), axes)


# Pages --------------------------------------------------------------------------------------------


class _Batch(NamedTuple):
    """Levanter's batch of packed new tokens, in plain arrays.

    Of `Q` sequences: `tables` int32 ``[Q, max_pages]``, `lengths` int32 ``[Q]`` of tokens held, the
    new ones included (0 where there is no sequence), and `starts` int32 ``[Q + 1]``, where each
    one's new tokens begin. Of the `total` new tokens: `pages` and `slots` int32 ``[tokens]``, where
    each goes.
    """

    tables: jax.Array
    lengths: jax.Array
    starts: jax.Array
    total: jax.Array
    pages: jax.Array
    slots: jax.Array


def _read(info: Any) -> _Batch:
    """The batch that Levanter describes; starts past its sequences are set to the end."""
    lengths = info.seq_lens.array
    is_there = jnp.arange(lengths.shape[0]) < info.num_seqs
    starts = info.cu_q_lens.array
    total = starts[info.num_seqs]
    pages, slots = (x.array.astype(jnp.int32) for x in info.pages_and_slots())
    return _Batch(
        tables=info.page_indices.array,
        lengths=jnp.where(is_there, lengths, 0),
        starts=jnp.where(jnp.arange(starts.shape[0]) <= info.num_seqs, starts, total),
        total=total,
        pages=pages,
        slots=slots,
    )


def _store(
    settings: _Settings, pages: paged.PagedCache, key: jax.Array, value: jax.Array, batch: _Batch
) -> paged.PagedCache:
    """Writes packed tokens ``[tokens, K, H]``, each as one of a sequence with a single page."""
    key, value = (x[:, None].astype(pages.dtype) for x in (key, value))
    return paged.append(
        pages,
        key,
        value,
        batch.pages[:, None],
        batch.slots,
        new_lengths=(jnp.arange(batch.pages.shape[0]) < batch.total).astype(jnp.int32),
        implementation=settings.implementation,
    )


def _attend_pages(
    settings: _Settings, c: Any, pages: paged.PagedCache, query: jax.Array, batch: _Batch
) -> jax.Array:
    """Attends packed tokens ``[tokens, N, H]`` to their sequences up to themselves.

    Where there are no more tokens than sequences, as in decoding, each token is a row of its own.
    Otherwise the tokens of one prompt are a row together.
    """
    tokens, sequences = query.shape[0], batch.lengths.shape[0]
    options: dict[str, Any] = {
        "scale": c.scaling_factor,
        "logits_soft_cap": c.logits_soft_cap,
        "implementation": settings.implementation,
    }
    query = query.astype(pages.dtype)
    place = jnp.arange(tokens)
    row = jnp.clip(jnp.searchsorted(batch.starts[1:], place, side="right"), 0, sequences - 1)
    new = batch.starts[1:] - batch.starts[:-1]
    within = place - batch.starts[row]
    if tokens <= sequences:
        lengths = jnp.where(place < batch.total, (batch.lengths - new)[row] + within + 1, 0)
        out = paged.attention(query[:, None], pages, batch.tables[row], lengths, **options)
        assert isinstance(out, jax.Array)
        return out[:, 0]
    index = jnp.clip(batch.starts[:-1, None] + place[None], 0, tokens - 1)
    out = paged.attention(
        query[index], pages, batch.tables, batch.lengths, query_seq_lengths=new, **options
    )
    assert isinstance(out, jax.Array)
    return jnp.where((place < batch.total)[:, None, None], out[row, within], 0)
