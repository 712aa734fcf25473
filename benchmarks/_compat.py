"""What benchmarks take of private modules of jax, in one place: peers it has no public way to."""

from typing import Any


def cudnn_attention() -> Any:
    """jax's module of cuDNN's attention, which can more than `jax.nn.dot_product_attention`."""
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo
