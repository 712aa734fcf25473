"""The rows of the suite `hopper` that decode several tokens at once."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.shapes import Shape
from benchmarks.suites.attention import decode, tables
from benchmarks.suites.attention.cases import turbo_configs

TINY = Shape("tiny", 2, 192)


def test_rows_are_compared_with_cudnn_and_with_one_token():
    names = [case.method for case in decode.several_cases(TINY, "short")]
    assert names[:2] == ["cudnn", decode.method("4bit", 1)]
    assert len(names) == 1 + len(decode.CACHES) * len(decode.TOKENS) == len(set(names))


@pytest.mark.fuzz
def test_errors_are_those_of_every_token():
    """Rounding to 4 bits leaves some; tokens in the wrong order are far off."""
    inputs = decode.SeveralInputs(TINY)
    call = decode.turbo(inputs, turbo_configs(2)["4bit"], "xla", 4)
    assert call.arguments[0].shape[1] == 4
    out = jax.jit(call.function)(*call.arguments)
    assert inputs.error_of(out)["relative_l1"] < 0.2
    assert inputs.error_of(jnp.roll(out, 1, axis=1))["relative_l1"] > 0.5


def test_the_table_says_what_one_token_takes():
    common = {
        "operation": decode.SEVERAL.name, "status": "ok", "model": "llama3-8b", "batch": 16,
        "tokens": 32768, "is_causal": False,
    }  # fmt: skip
    measured = {"cudnn": 400.0, "turbo-4bit-t1": 100.0, "turbo-4bit-t4": 115.0}
    rows = [{**common, "method": method, "us": us} for method, us in measured.items()]
    lines = tables.several_table({"rows": rows}).splitlines()
    assert lines[2] == "| llama3-8b 16 x 32k, 4-bit | 400 | 100 (1.00x) | - | 115 (1.15x) | - |"
    assert not any("2/4-bit" in line for line in lines)


@pytest.mark.gpu
def test_rows_run_on_hopper():
    """Compiled, with the errors of one token."""
    inputs = decode.SeveralInputs(Shape("llama3-8b", 2, 1024))
    config = turbo_configs(8)["4bit"]
    errors = []
    for tokens in decode.TOKENS:
        call = decode._several(inputs, config, tokens)
        errors.append(call.error(jax.jit(call.function)(*call.arguments))["relative_l1"])
    assert max(errors) < 1.2 * errors[0]
