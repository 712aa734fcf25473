"""Programs of split decoders: what a device runs, under one manual `shard_map`.

Where there are more devices than KV heads, the devices that share one split its query heads and the
slots of its cache (`layout.axes_of_model`). Prompts attend with each device's own query heads to
whole keys and values. For new tokens queries are gathered: every device attends with all query
heads of its KV head to its own slots, the parts are merged (`turbojax.parallel.attend_new_tokens`),
and each device keeps the results of its own heads. That takes two more small collectives in each
layer.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from turbojax import _checks, parallel
from turbojax.attention.options import PLAIN
from turbojax.caches import attend_new_tokens, attend_prompt
from turbojax.caches.base import Attend
from turbojax.caches.kinds import kind_of
from turbojax.caches.whole import PromptAttention
from turbojax.models.tensor_parallel.specs import partition_specs
from turbojax.sharding import Axes


def on_mesh(
    run: Callable[..., Any], decoder: Any, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """``run(decoder, ...)`` on every device of the decoder's mesh, for use within `jit`.

    Returns a function of the further arguments, which are split as `in_specs` says: a pytree of
    specs or a prefix of one for each. Without axes `run` is called as it is.
    """
    if decoder.axes is None:
        return lambda *arrays: run(decoder, *arrays)
    # Not checked: results that are alike on several devices follow from sums and gathers, and the
    # interpreters of kernels cannot be checked.
    split = jax.shard_map(
        run,
        mesh=decoder.axes.require_mesh(),
        in_specs=(partition_specs(decoder), *in_specs),
        out_specs=out_specs,
        check_vma=False,
    )
    return lambda *arrays: split(decoder, *arrays)


# A step has some twenty short kernels a layer, and two sums that nothing can overlap with. To run
# the sums on a stream of their own, or to leave kernels out of CUDA graphs because there are few
# between two sums, only costs time of the host, and the host is what such a step waits for.
_FOR_STEPS = {
    "xla_gpu_disable_async_collectives": "ALLCOLLECTIVES",
    "xla_gpu_graph_min_graph_size": 1,
}


@functools.cache
def _options_of_steps() -> dict[str, Any] | None:
    """Compiler options of split steps; None where there is no GPU, or XLA does not know them."""
    return accepted_options(_FOR_STEPS) if jax.default_backend() == "gpu" else None


def accepted_options(options: dict[str, Any]) -> dict[str, Any] | None:
    """The compiler options, if this version of XLA takes them; else None."""
    try:
        jax.jit(lambda: jnp.zeros(()), compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError:  # no such option, or no such value
        return None
    return options


class StepProgram:
    """`jax.jit` of a step whose first argument is a decoder; a split one gets `_FOR_STEPS`.

    Every other attribute is that of the jitted step of whole decoders.
    """

    def __init__(self, run: Callable[..., Any], **options: Any) -> None:
        self._run, self._options = run, options
        self._plain = jax.jit(run, **options)
        functools.update_wrapper(self, run)

    @functools.cached_property
    def _split(self) -> Any:
        options = _options_of_steps()
        if options is None:
            return self._plain
        return jax.jit(self._run, compiler_options=options, **self._options)

    def _of(self, decoder: Any) -> Any:
        # Within another program only the options of that one count.
        is_split = decoder.axes is not None and _checks.is_concrete(decoder.norm)
        return self._split if is_split else self._plain

    def __call__(self, decoder: Any, *arrays: Any, **static: Any) -> Any:
        """Runs the step."""
        return self._of(decoder)(decoder, *arrays, **static)

    def __getattr__(self, name: str) -> Any:
        if name == "_plain":  # not there yet
            raise AttributeError(name)
        return getattr(self._plain, name)

    def lower(self, decoder: Any, *arrays: Any, **static: Any) -> jax.stages.Lowered:
        """Lowers it, as `jax.jit` does."""
        lowered: jax.stages.Lowered = self._of(decoder).lower(decoder, *arrays, **static)
        return lowered


def step_program(**options: Any) -> Callable[[Callable[..., Any]], StepProgram]:
    """Decorates a step, see `StepProgram`."""
    return functools.partial(StepProgram, **options)


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
