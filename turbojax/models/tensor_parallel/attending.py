"""How the layers of a split decoder attend: each device with its own heads and slots.

Where there are more devices than KV heads, the devices that share one split its query heads and the
slots of its cache (`layout.axes_of_model`). Prompts attend with each device's own query heads to
whole keys and values. For new tokens queries are gathered: every device attends with all query
heads of its KV head to its own slots, the parts are merged (`turbojax.parallel.attend_new_tokens`),
and each device keeps the results of its own heads. That takes two more small collectives in each
layer.
"""

from typing import Any

import jax

from turbojax import parallel
from turbojax.attention.options import PLAIN
from turbojax.caches import attend_new_tokens, attend_prompt
from turbojax.caches.base import Attend
from turbojax.caches.kinds import kind_of
from turbojax.caches.whole import PromptAttention
from turbojax.sharding import Axes


def new_tokens_of(axes: Axes | None, implementation: str | None) -> Attend:
    """`attend_new_tokens` on a device of a mesh; `axes` are those of the decoder."""
    over = _sequence(axes)
    if not over:
        return attend_new_tokens(implementation)
    own = parallel.attend_new_tokens(over, implementation)

    def attend(query, key, value, cache, options=PLAIN, sinks=None):  # type: ignore[no-untyped-def]
        heads = query.shape[2]
        queries = jax.lax.all_gather(query, over, axis=2, tiled=True)
        if sinks is not None:
            sinks = jax.lax.all_gather(sinks, over, tiled=True)
        out, cache = own(queries, key, value, cache, options, sinks)
        first = jax.lax.axis_index(over) * heads
        return jax.lax.dynamic_slice_in_dim(out, first, heads, axis=2), cache

    return attend


def prompts_of(
    axes: Axes | None,
    lengths: jax.Array,
    first: jax.Array | int,
    implementation: str | None,
    attention: PromptAttention | None,
) -> Attend:
    """`attend_prompt` on a device of a mesh; `axes` are those of the decoder.

    With slots split over devices, prompts attend as they do on one device, through a cache of their
    own that is dropped, and every device stores what belongs to its slots.
    """
    over = _sequence(axes)
    if not over:
        return attend_prompt(lengths, first, implementation, attention)

    def attend(query, key, value, cache, options=PLAIN, sinks=None):  # type: ignore[no-untyped-def]
        kind = kind_of(cache)
        own = _of_prompts(cache, *query.shape[:2])
        once = attend_prompt(lengths, 0, implementation, attention)
        out, _ = once(query, key, value, own, options, sinks)
        part = kind.take(cache, first, query.shape[0])
        part = parallel.store_prompt(part, key, value, lengths, over)
        return out, kind.put(cache, part, first)

    return attend


def _of_prompts(cache: Any, batch_size: int, tokens: int) -> Any:
    """An empty cache like a device's part of one, for whole prompts of this size."""
    kind = kind_of(cache)
    sizes = {"batch_size": batch_size, "max_length": tokens}
    description = {**kind.describe(cache), **sizes}
    return kind.from_rows(kind.make(description), description)


def _sequence(axes: Axes | None) -> tuple[str, ...]:
    if axes is None or axes.size("sequence") == 1:
        return ()
    return axes.of_dimension("sequence")
