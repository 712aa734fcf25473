"""How a layer attends to a prompt, or to what its cache holds: the same for every kind of cache."""

from typing import Any

import jax
import jax.numpy as jnp

from turbojax.attention.options import PLAIN, AttentionOptions
from turbojax.attention.score_modifiers import of_layer
from turbojax.caches.base import Attend, Kind
from turbojax.caches.exact import REPEATABLE
from turbojax.caches.kinds import kind_of
from turbojax.caches.whole import PromptAttention, attend_within, within_implementation


def attend_prompt(
    lengths: jax.Array,
    first: jax.Array | int = 0,
    implementation: str | None = None,
    attention: PromptAttention | None = None,
) -> Attend:
    """Attention within prompts, which also fills their part of the layer's cache.

    An exact cache's prompts attend exactly, those of a `ProgressiveCache` by `turbo_attention` with
    its config, those of a `Kv4Cache` by `turbo_attention` in e4m3. With pages, prompts are written
    first and attend to what the pages hold, as later tokens will.

    Args:
      lengths: int32 ``[b]``, of the prompts.
      first: the prompts' first sequence in the cache, which may hold more than `b`.
      implementation: of `prefill`, or of the exact cache's attention; None to choose, as is
        ``"repeatable"``, which names a way to decode. With
        `attention` it writes the cache, where it can, and attends as `attend_within` says; with
        `ImageBlocks`, as `turbojax.caches.images.own_implementation` does.
      attention: attend with this instead, to the prompts' own keys and values; not with a cache of
        latents, whose layers have no keys and values.
    """

    def attend(query, key, value, cache, options=PLAIN, sinks=None):  # type: ignore[no-untyped-def]
        kind = kind_of(cache)
        name = _name_for(kind, implementation)
        part = kind.take(cache, first, query.shape[0])
        if attention is None:
            given = of_call(query, options, sinks, name)
            (out, _), part = kind.prefill(query, key, value, part, lengths, **given)
        elif kind.has_latents:
            raise NotImplementedError(
                "attention within prompts must be None with a cache of latents, which has no keys "
                "and values of heads: use a cache that has"
            )
        else:
            own = within_implementation(name, attention, kind.implementations)
            out = attend_within(query, key, value, lengths, attention, options, own, sinks=sinks)
            part = kind.store_prompt(part, key, value, lengths, implementation=name)
        return out, kind.put(cache, part, first)

    return attend


def attend_new_tokens(implementation: str | None = None) -> Attend:
    """Attention of new tokens to everything cached, themselves included.

    A cache that holds no more than its layer's window takes many new tokens in several parts.

    Args:
      implementation: of `decode`, and of `append` if it can write caches, or of the exact
        cache's; None to choose. ``"repeatable"`` is for caches that attend exactly, and None for
        the others, whose kernels join results in a fixed order.
    """

    def attend(query, key, value, cache, options=PLAIN, sinks=None):  # type: ignore[no-untyped-def]
        kind, tokens = kind_of(cache), query.shape[1]
        most = kind.most_new_tokens(cache, options) or tokens
        name, outs = _name_for(kind, implementation), []
        for first in range(0, tokens, most):
            q, k, v = (x[:, first : first + most] for x in (query, key, value))
            given = of_call(q, options, sinks, name)
            (out, _), cache = kind.append_and_decode(q, k, v, cache, **given)
            outs.append(out)
        return outs[0] if len(outs) == 1 else jnp.concatenate(outs, axis=1), cache

    return attend


def of_call(
    query: jax.Array,
    options: AttentionOptions,
    sinks: jax.Array | None,
    implementation: str | None,
) -> dict[str, Any]:
    """A layer's options and sinks as arguments of `Kind.prefill` and `Kind.decode`."""
    return {
        "options": options.complete(query.shape[3], implementation),
        "modifiers": of_layer(query, sinks),
    }


def _name_for(kind: Kind[Any], implementation: str | None) -> str | None:
    """The implementation asked for; None in place of `REPEATABLE` for kinds that lack it."""
    if implementation == REPEATABLE and REPEATABLE not in kind.implementations:
        return None
    return implementation
