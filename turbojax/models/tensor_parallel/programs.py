"""Programs of split decoders: what a device runs, under one manual `shard_map`."""

from collections.abc import Callable
from typing import Any

import jax

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
