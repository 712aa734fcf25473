"""The rows of the suite `hopper` that run forward and backward."""

import functools
import json

import jax
import jax.numpy as jnp
import pytest

import turbojax as tj
from benchmarks import readme, report
from benchmarks.measuring import work
from benchmarks.shapes import Shape
from benchmarks.suites.attention import prefill, suite
from benchmarks.suites.attention.prefill import PREFILL, TRAINING
from tests.tools.docs_helpers import docs_text

TINY = Shape("tiny", 1, 128, is_causal=True, window=40)


def test_rows_are_compared_with_cudnn_first():
    names = [case.method for case in prefill.training_cases(TINY, "hopper")]
    assert names[0] == "cudnn"
    assert names[1:3] == [f"turbo-fp8-exact-gradient-{x}" for x in ("float", "8bit")]
    assert len(prefill.training_cases(TINY, "hopper-short")) < len(names) == len(set(names))


def test_the_suite_trains_what_it_attends_to():
    shapes = {operation: set() for operation in (TRAINING, PREFILL)}
    for group in suite.HOPPER.groups():
        if group.operation in shapes:
            shapes[group.operation].add(group.shape)
    narrower = {shape for shape in shapes[TRAINING] if shape.heads.dim < 256}
    assert narrower <= shapes[PREFILL]


@pytest.mark.parametrize("gradient", ["float", "8bit"])
def test_work_is_seven_products(gradient):
    needed = work.training_work(TINY, "int8_fp8", gradient)
    assert needed.amount == 3.5 * work.attention_operations(TINY)
    assert sum(needed.shares.values()) == pytest.approx(1)
    fp8 = 1 if gradient == "float" else 2
    assert needed.shares == pytest.approx({"int8": 2 / 7, "fp8": fp8 / 7, "bf16": (5 - fp8) / 7})


@pytest.mark.fuzz
def test_errors_are_those_of_the_querys_gradient():
    """Of exact attention in bfloat16 what rounding leaves; of a wrong gradient far more."""
    inputs = prefill.TrainingInputs(TINY)
    call = functools.partial(
        tj.turbo_attention,
        config=tj.TurboConfig(mode="float", softmax="exact"),
        is_causal=True,
        local_window_size=TINY.local_window,
        implementation="xla",
    )
    measured = prefill._both(inputs, call, "float", "float")
    out = jax.jit(measured.function)(*measured.arguments)
    assert [x.shape for x in out[1:]] == [x.shape for x in measured.arguments[:3]]
    assert measured.error(out)["relative_l1"] < 0.01
    wrong = (out[0], jnp.roll(out[1], 1, axis=1), *out[2:])
    assert measured.error(wrong)["relative_l1"] > 0.5


def test_prose_agrees_with_how_equal_runs_differ():
    """The times of training in three runs, in docs/benchmarks/attention.md and docs/choosing.md."""
    _, now = report.newest(readme.RESULTS, ("hopper",))
    paths = [readme.RESULTS / f"hopper_2026-11-{day}.json" for day in (24, 25)]
    runs = [now, *(json.loads(path.read_text(encoding="utf-8")) for path in paths)]
    place, ours = "training/llama3-8b/b2-s8192", "turbo-int8_fp8-exact-gradient-8bit/mosaic_gpu"
    far, other = "training/mha-16-narrow/b1-s32768-causal", "turbo-fp8-exact-gradient-8bit"
    names = f"{place}/cudnn", f"{place}/{ours}", f"{far}/cudnn", f"{far}/{other}/mosaic_gpu"
    us = {name: [] for name in names}
    for run in runs:
        rows = {row["name"]: row["us"] for row in run["rows"]}
        for name in names:
            us[name].append(rows[name])
    ms = [[f"{x / 1000:.1f}" for x in us[name]] for name in names]
    ratios = [f"{x / y:.2f}" for x, y in zip(us[names[0]], us[names[1]], strict=True)]
    text = docs_text("benchmarks/attention.md")
    for figure in (
        "took {} ms in this run and {} in another".format(*ms[0]),
        "with 8-bit gradients {} and {}".format(*ms[1]),
        "the ratio is {} here and was {} then".format(*ratios),
        f"cuDNN's {ms[2][0]} ms here and {ms[2][2]} in a third",
        f"`fp8` with 8-bit gradients {ms[3][0]} and {ms[3][2]}",
    ):
        assert figure in text
    said = "is {}x in this table and was {}x [in another run]".format(*ratios)
    assert said in docs_text("choosing.md")
