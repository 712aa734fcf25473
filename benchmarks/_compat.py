"""What benchmarks take of private modules of jax, in one place: peers it has no public way to."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def mosaic_code() -> Iterator[list[str]]:
    """Collects the code of the Mosaic GPU kernels that are lowered meanwhile.

    As MLIR without places in source files, common subexpressions told once: what a change of
    structure must not change, and a compiled kernel depends on.
    """
    from jax.experimental.mosaic.gpu import core
    from jaxlib.mlir import ir, passmanager

    found: list[str] = []
    serialize: Any = core._run_serde_pass

    def collect(module: Any, *args: Any, **options: Any) -> Any:
        with module.context:
            copy = ir.Module.parse(module.operation.get_asm(enable_debug_info=False))
            passmanager.PassManager.parse("builtin.module(canonicalize,cse)").run(copy.operation)
            found.append(copy.operation.get_asm(enable_debug_info=False))
        return serialize(module, *args, **options)

    with mock.patch.object(core, "_run_serde_pass", collect):
        yield found


def cudnn_attention() -> Any:
    """jax's module of cuDNN's attention, which can more than `jax.nn.dot_product_attention`."""
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo
