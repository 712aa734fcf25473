"""The choice of an implementation, and refusals in words."""

import jax
import jax.numpy as jnp
import pytest

import turbojax as tj
from turbojax.ops.registry import Implementation, Registry


def _registry() -> Registry:
    fast = Implementation(
        "triton", lambda: "triton", lambda *, size: None if size % 2 == 0 else f"{size=} is odd"
    )
    never = Implementation("mosaic_gpu", lambda: "mosaic", lambda **_: "needs Hopper")
    return Registry("op", (never, fast))


def test_none_takes_the_first_that_can():
    assert _registry().select(None, size=2).name == "triton"


def test_a_named_implementation_never_falls_back():
    with pytest.raises(NotImplementedError, match="op cannot run here: mosaic_gpu: needs Hopper$"):
        _registry().select("mosaic_gpu", size=2)


def test_when_nothing_can_every_refusal_is_named():
    with pytest.raises(
        NotImplementedError, match="mosaic_gpu: needs Hopper; triton: size=3 is odd"
    ):
        _registry().select(None, size=3)


def test_unknown_and_absent_names_differ():
    with pytest.raises(ValueError, match="implementation='cuda' must be None or one of"):
        _registry().select("cuda", size=2)
    with pytest.raises(NotImplementedError, match="op has no implementation='xla'; it has"):
        _registry().select("xla", size=2)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what a CPU lacks")
def test_kernels_say_what_a_cpu_lacks():
    x = jnp.ones((1, 8, 2, 64))
    for name in ("triton", "jax_triton"):
        with pytest.raises(NotImplementedError, match=f"turbo_attention cannot run here: {name}: "):
            tj.turbo_attention(x, x, x, implementation=name)
    cache = tj.append(tj.init_cache(1, 8, 2, 64, dtype=jnp.float32), x, x)
    words = "triton: needs an NVIDIA GPU of compute capability 8.0 or newer; jax's default backend"
    with pytest.raises(NotImplementedError, match=words):
        tj.decode(x, cache, implementation="triton")


def test_an_implementation_that_an_op_has_not():
    x = jnp.ones((1, 8, 2, 64))
    cache = tj.append(tj.init_cache(1, 8, 2, 64, dtype=jnp.float32), x, x)
    with pytest.raises(NotImplementedError, match="decode has no implementation='mosaic_gpu'"):
        tj.decode(x, cache, implementation="mosaic_gpu")
