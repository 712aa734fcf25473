"""The Mosaic GPU kernels through Pallas' own interpreter, on a CPU: which run, and why others not.

The interpreter is public since jax 0.11.2. What it runs and what not stands in docs/kernels.md;
the tests of refusals fail when a newer jax runs more, so that the page is brought up to date.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import turbojax as tj
from tests.kernels import (
    test_mosaic_attention,
    test_mosaic_decode,
    test_mosaic_int4,
    test_mosaic_paged,
    test_mosaic_prompt,
)
from tests.kernels.kernel_helpers import lower_for_cuda
from turbojax.matmul.int4 import mosaic_gpu as int4

if not hasattr(plgpu, "force_gpu_interpret_mode"):
    pytest.skip(
        f"jax {jax.__version__} has no public interpreter of Mosaic GPU kernels; 0.11.2 has one",
        allow_module_level=True,
    )
ROOT = Path(__file__).parents[2]


def run(*program):
    """Runs one of the programs beside this file."""
    command = [sys.executable, "-m", f"tests.kernels.{program[0]}", *program[1:]]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]


WHOLE = pytest.mark.skipif(
    jax.__version_info__ < (0, 12),
    reason="before jax 0.12 the interpreter wants every barrier's last phase to be waited for",
)


@pytest.mark.slow
@WHOLE
@pytest.mark.parametrize(
    ("what", "name"),
    [("forward", "causal"), ("forward", "grouped, lengths"), ("gradients", "causal")],
)
def test_pooled_attention_equals_the_oracle_and_has_no_race(what, name):
    run("interpreted_pooled", what, name)


@pytest.mark.slow
@WHOLE
@pytest.mark.parametrize(
    "name", ["plain", "window", "nothing between", "parts", "parts, window", "nonfinite"]
)
def test_prompts_on_pages_equal_the_oracle_and_have_no_race(name):
    run("interpreted_prompt", name)


@pytest.mark.slow
@WHOLE
@pytest.mark.parametrize("name", ["plain", "tokens, parts", "rows, window", "e4m3", "turbo4"])
def test_latents_on_pages_equal_the_oracle_and_have_no_race(name):
    run("interpreted_latent", name)


@pytest.fixture
def interpreted(monkeypatch):
    """Mosaic GPU kernels lower as the interpreter's program."""
    make = plgpu.kernel

    def kernel(*args, **kwargs):
        run = make(*args, **kwargs)

        def call(*operands):
            with plgpu.force_gpu_interpret_mode():
                return run(*operands)

        return call

    monkeypatch.setattr(plgpu, "kernel", kernel)


def lower_int4(rows):
    call = functools.partial(int4.matmul, activation=None, is_precise=False)
    tokens, weight = test_mosaic_int4.specification(rows, 128, 256)
    return lower_for_cuda(lambda *x: call(*x, None, None), tokens, weight)


def lower_fp8(monkeypatch):
    """The product of weights that are expanded; the expansion is not what is asked here."""
    from pallas_kernels.mosaic.hopper.matmul import expand as int4_expand

    def zeros(codes, scales, tables, **options):
        return jnp.zeros((codes.shape[0], 2 * codes.shape[1]), jnp.float8_e4m3fn)

    monkeypatch.setattr(int4_expand, "int4_expand", zeros)
    return lower_int4(2048)


def lower_decode():
    cache = test_mosaic_decode.abstract_cache()
    return test_mosaic_decode.lower(test_mosaic_decode.abstract_query(cache), cache)


@pytest.mark.parametrize(
    "kernel",
    [
        *(f"attention {mode}" for mode in test_mosaic_attention.MODES),
        "decode",
        "int4_matmul",
        "int4_expand",
        "fp8_matmul",
        *(f"paged {kind}" for kind in test_mosaic_paged.KINDS),
        *(f"prompt {kind}" for kind in test_mosaic_prompt.KINDS),
    ],
)
def test_kernels_with_inline_code_are_refused(kernel, interpreted, monkeypatch):
    """`inline_mgpu` has the compiler's own operations, of which the interpreter knows nothing."""
    jax.clear_caches()  # What these lowered to before is remembered.
    name, _, kind = kernel.partition(" ")
    lower = {
        "attention": lambda: test_mosaic_attention.lower(tj.TurboConfig(mode=kind)),
        "decode": lower_decode,
        "int4_matmul": lambda: lower_int4(8),
        "int4_expand": lambda: lower_int4(2048),
        "fp8_matmul": lambda: lower_fp8(monkeypatch),
        "paged": lambda: test_mosaic_paged.lower(kind),
        "prompt": lambda: test_mosaic_prompt.lower(kind, tokens=80),
    }[name]
    try:
        with pytest.raises(ValueError, match="does not support `inline_mgpu`"):
            lower()
    finally:
        jax.clear_caches()  # Nothing of this is left to other tests.
