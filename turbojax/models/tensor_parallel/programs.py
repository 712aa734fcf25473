"""Programs of split decoders: what a device runs, under one manual `shard_map`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from turbojax import _checks
from turbojax.models.tensor_parallel.specs import partition_specs


def on_mesh(
    run: Callable[..., Any], decoder: Any, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """``run(decoder, ...)`` on every device of the decoder's mesh, with its part of each array.

    Args:
      run: takes the decoder, then what the result takes.
      decoder: a `Decoder` or a `QuantizedDecoder`. Without axes `run` is called as it is.
      in_specs: of each further argument, a pytree of specs or a prefix of one.
      out_specs: of the results.

    Returns:
      A function of the further arguments, for use within `jit`.
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


# A step has some twenty short kernels a layer and two sums that nothing can overlap with. A stream
# of their own for those, and calls that are not recorded as parts of CUDA graphs because there are
# few between two sums, only cost the host time, and it is what such a step waits for.
_FOR_STEPS = {
    "xla_gpu_disable_async_collectives": "ALLCOLLECTIVES",
    "xla_gpu_graph_min_graph_size": 1,
}


@functools.cache
def _options_of_steps() -> dict[str, Any] | None:
    """What XLA is told of split steps; None where there is no GPU, or it knows no such option."""
    return accepted_options(_FOR_STEPS) if jax.default_backend() == "gpu" else None


def accepted_options(options: dict[str, Any]) -> dict[str, Any] | None:
    """Options of the compiler, if this version of XLA takes them; else None."""
    try:
        jax.jit(lambda: jnp.zeros(()), compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError:  # no such option, or no such value
        return None
    return options


class StepProgram:
    """`jax.jit` of a step whose first argument is a decoder; if that is split, with `_FOR_STEPS`.

    What else `jax.jit` has is that of the step of whole decoders.

    Args:
      run: the step.
      options: of `jax.jit`.
    """

    def __init__(self, run: Callable[..., Any], **options: Any) -> None:
        self._run, self._options = run, options
        self._plain = jax.jit(run, **options)
        functools.update_wrapper(self, run)

    @functools.cached_property
    def _split(self) -> Any:
        """The program of split decoders."""
        options = _options_of_steps()
        if options is None:
            return self._plain
        return jax.jit(self._run, compiler_options=options, **self._options)

    def _of(self, decoder: Any) -> Any:
        # Within another program only that one has options.
        is_split = decoder.axes is not None and _checks.is_concrete(decoder.norm)
        return self._split if is_split else self._plain

    def __call__(self, decoder: Any, *arrays: Any, **static: Any) -> Any:
        """Runs the step."""
        return self._of(decoder)(decoder, *arrays, **static)

    def __getattr__(self, name: str) -> Any:
        """What `jax.jit` has."""
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
