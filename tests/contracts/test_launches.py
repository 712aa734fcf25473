"""Which launches of prompt attention are timed beside each other; timing them needs a GPU."""

import jax.numpy as jnp
import pytest

from benchmarks.device import launches
from benchmarks.device.sanitize import as_on_an_h100
from benchmarks.shapes import Shape
from benchmarks.suites.attention.prefill import Inputs


def test_the_default_comes_first_and_cudnn_before_it():
    rows = list(launches.rows(""))
    for shape in launches.SHAPES:
        mine = [(name, change) for at, name, change in rows if at == shape]
        assert mine[:2] == [("cudnn", None), ("cudnn e4m3", None)]
        for name in launches.CONFIGS:
            of_one = [change for at, change in mine if at == name]
            assert of_one[0] == {}
            assert {"in_turns": True} in of_one or {"in_turns": False} in of_one
            assert len({str(change) for change in of_one}) == len(of_one)


def test_a_pattern_keeps_the_peers():
    rows = list(launches.rows("b2-s8192 fp8 .*turns"))
    assert {at for at, *_ in rows} == {launches.SHAPES[0]}
    assert {name for _, name, _ in rows} == {"cudnn", "cudnn e4m3", "fp8"}
    assert all(change is None or "in_turns" in change for _, _, change in rows)


@pytest.mark.quick(slow=2)
@pytest.mark.parametrize("model", ["llama3-8b", "mha-16-narrow", "gemma2-9b"])
def test_every_launch_lowers(model):
    """For an H100 that is not there, with few tokens."""
    import jax

    inputs = Inputs(Shape(model, 1, 200, is_causal=True))
    for name, config in launches.CONFIGS.items():
        for change in launches.changes(inputs.shape, config):
            with as_on_an_h100():
                call, arguments, output = launches._ours(name, change, inputs)
                traced = jax.jit(lambda *x, c=call, o=output: o(c(*x))).trace(*arguments)
                lowered = traced.lower(lowering_platforms=("cuda",))
            assert "turbojax_attention_hopper" in str(traced.jaxpr)
            assert lowered.out_info.shape == inputs.query.shape
            assert lowered.out_info.dtype == jnp.bfloat16


@pytest.mark.slow
def test_gradients_lower():
    import jax

    inputs = Inputs(Shape("tiny", 1, 200, is_causal=True))
    for name in launches.GRADIENTS:
        with as_on_an_h100():

            def both(name=name):
                call, arguments, output = launches._gradient(name, {"in_turns": True}, inputs)
                return output(call(*arguments))

            traced = jax.jit(both).trace()
            traced.lower(lowering_platforms=("cuda",))
        assert "turbojax_key_gradient_hopper" in str(traced.jaxpr)
