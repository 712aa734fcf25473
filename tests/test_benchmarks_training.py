"""The rows of the suite `hopper` that run forward and backward."""

import functools

import jax
import jax.numpy as jnp
import pytest

import turbojax as tj
from benchmarks.measuring import work
from benchmarks.shapes import Shape
from benchmarks.suites.attention import suite, training

TINY = Shape("tiny", 1, 128, is_causal=True, window=40)


def test_rows_are_compared_with_cudnn_first():
    names = [case.method for case in training.cases(TINY, "hopper")]
    assert names[0] == "cudnn"
    assert names[1:3] == [f"turbo-fp8-exact-gradient-{x}" for x in ("float", "8bit")]
    assert len(training.cases(TINY, "hopper-short")) < len(names) == len(set(names))


def test_the_suite_trains_what_it_attends_to():
    shapes = {module: set() for module in (training, suite.prefill)}
    for group in suite.HOPPER.groups():
        if group.module in shapes:
            shapes[group.module].add(group.shape)
    narrower = {shape for shape in shapes[training] if shape.heads.dim < 256}
    assert narrower <= shapes[suite.prefill]


@pytest.mark.parametrize("gradient", ["float", "8bit"])
def test_work_is_seven_products(gradient):
    needed = work.training_work(TINY, "int8_fp8", gradient)
    assert needed.amount == 3.5 * work.attention_operations(TINY)
    assert sum(needed.shares.values()) == pytest.approx(1)
    fp8 = 1 if gradient == "float" else 2
    assert needed.shares == pytest.approx({"int8": 2 / 7, "fp8": fp8 / 7, "bf16": (5 - fp8) / 7})


def test_errors_are_those_of_the_querys_gradient():
    """Of exact attention in bfloat16 what rounding leaves; of a wrong gradient far more."""
    inputs = training.Inputs(TINY)
    call = functools.partial(
        tj.turbo_attention,
        config=tj.TurboConfig(mode="float", softmax="exact"),
        is_causal=True,
        local_window_size=TINY.local_window,
        implementation="xla",
    )
    measured = training._call(inputs, call, "float", "float")
    out = jax.jit(measured.function)(*measured.arguments)
    assert [x.shape for x in out[1:]] == [x.shape for x in measured.arguments[:3]]
    assert measured.error(out)["relative_l1"] < 0.01
    wrong = (out[0], jnp.roll(out[1], 1, axis=1), *out[2:])
    assert measured.error(wrong)["relative_l1"] > 0.5
