"""What ptxas says of kernels, read; compiling them needs jax's CUDA plugin."""

import importlib.util
import os

import jax
import pytest

from benchmarks.device import programs, registers

PRINTED = """ptxas warning : Registers are spilled to local memory in function 'first'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
    40 bytes stack frame, 76 bytes spill stores, 72 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 40 bytes cumulative stack size
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 48 registers, used 1 barriers
"""


def test_what_ptxas_says():
    assert registers.parse(PRINTED) == [("first", 168, 76, 72), ("second", 48, 0, 0)]
    assert registers.parse("ptxas info    : 0 bytes gmem\n") == []


def test_what_is_printed_beside_python_is_read(capfd):
    with registers._output() as text:
        os.write(1, b"out ")
        os.write(2, b"err")
    assert text() == "out err"
    os.write(1, b"shown")
    assert capfd.readouterr().out == "shown"


def test_cases_are_calls_of_shapes():
    """Their functions are traced when they are lowered: here only what they are called with."""
    made = registers.cases()
    call, arguments = made["prompts, fp8, 128, causal"]()
    assert callable(call)
    assert [x.shape for x in arguments] == [(2, 8192, n, 128) for n in (16, 4, 4)]
    assert len(made) > 24 + 4 + 20


@pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is not None, reason="there may be a plugin"
)
def test_without_the_plugin_it_says_what_it_needs():
    with pytest.raises(SystemExit, match=r"pip install 'jax\[cuda13\]"):
        registers.described()
    assert jax.devices()[0].platform == "cpu"


PROGRAM = """HloModule jit_step

%fused (p: f32[8]) -> f32[8] {
  %p = f32[8] parameter(0)
  ROOT %copy.9 = f32[8] copy(%p)
}

ENTRY %main (a: f32[8], b: f32[8]) -> f32[8] {
  %a = f32[8] parameter(0)
  %loop_add_fusion.1 = f32[8]{0} fusion(%a, %a), kind=kLoop, calls=%fused
  %mpmd_map.3.0 = (f32[8], f32[8]) custom-call(%loop_add_fusion.1), custom_call_target="mosaic"
  %get = f32[8] get-tuple-element(%mpmd_map.3.0), index=0
  ROOT %loop_add_fusion.2 = f32[8]{0} fusion(%get, %a), kind=kLoop, calls=%fused
}
"""


def test_kernels_of_a_program():
    """Of the entry alone, and nothing that runs no kernel."""
    assert programs.kernels(PROGRAM) == {"loop_add_fusion": 2, "mpmd_map": 1}
