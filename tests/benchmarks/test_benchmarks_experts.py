"""The suite of grouped products: what it counts, that it runs and compares, and its table."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import readme
from benchmarks.measuring import calls
from benchmarks.suites import experts
from tests.benchmarks.quick_runs import quick_run
from tests.tools.docs_helpers import docs_text


def test_rows_are_named_once_and_come_with_what_they_are_compared_with():
    names = [group.name(case) for group, case in experts.SUITE.rows()]
    assert names[0] == "experts/qwen3-30b-a3b-gate-up/m64/bf16"
    assert "experts/deepseek-v3-down/m512/int4/mosaic_gpu" in names
    for group in experts.SUITE.groups():
        families = {case.family for case in group.cases}
        assert families == {*experts.BASELINES, "int4"}


@pytest.mark.fuzz
def test_weights_of_experts_without_tokens_are_not_counted():
    def needs(tokens, method):
        group = experts.product(experts.TINY, tokens, implementations=("xla",))
        [case] = [c for c in group.cases if c.method == method]
        return case.build(calls.Arrays()).needs

    one = experts.TINY.inputs * experts.TINY.rows
    for method, size in (("bf16", 2), ("fp8", 1)):
        sizes = np.asarray(experts.group_sizes(experts.TINY, 1))
        assert sizes.sum() == 2
        assert 1 <= (sizes > 0).sum() <= 2
        rest = 2 * (experts.TINY.inputs * size + 2 * experts.TINY.outputs)
        assert needs(1, method).nbytes == size * one * (sizes > 0).sum() + rest
        assert needs(1, method).operations == 2 * 2 * one
    assert needs(1, "int4").nbytes < needs(1, "fp8").nbytes


def test_a_stack_too_large_in_one_format_says_so():
    [deepseek] = [p for p in experts.PRODUCTS if p.name == "deepseek-v3-gate-up"]
    case = experts.product(deepseek, 64).cases[0]
    with pytest.raises(NotImplementedError, match="weights in bf16 would take more than 12 GiB"):
        case.build(calls.Arrays())


@pytest.mark.slow
def test_a_quick_run_measures_and_compares(tmp_path):
    result = quick_run(tmp_path, "experts", "^(?!.*(mosaic|triton))")
    rows = {row["name"]: row for row in result["rows"]}
    assert {row["status"] for row in rows.values()} == {"ok"}
    ours = rows["experts/tiny/m7/int4/xla"]
    assert set(ours["speedup_over"]) == {"bf16", "fp8"}
    assert ours["relative_l1"] < 0.01
    text = experts.table(result)
    assert "| tiny (5 experts, 2 a token, 192 to 72) | 7 | INT4 | xla |" in text


def test_methods_have_the_same_weights():
    dense = experts.dense(experts.TINY, jnp.dtype(jnp.bfloat16)).astype(jnp.float32)
    fp8 = experts.dense(experts.TINY, jnp.dtype(jnp.float8_e4m3fn)).astype(jnp.float32)
    scaled = np.asarray(fp8) * experts.TINY.inputs**-0.5
    assert np.abs(scaled - dense).mean() < 0.04 * np.abs(dense).mean()
    int4 = experts.fireq.dequantize(experts.fireq.expert_of(experts.int4(experts.TINY), 3))
    assert np.abs(np.asarray(int4).T - dense[3]).mean() < 0.15 * np.abs(dense[3]).mean()


def test_prose_agrees_with_the_record_of_later_kernels():
    """The figures of Mixtral in docs/benchmarks/int4.md: what is kept, beside the kernel before."""
    path = readme.RESULTS / "experts_versions_2026-11-30.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    text = " ".join(docs_text("benchmarks/int4.md").split())

    def us(name, run, variant):
        found = [r for r in rows if (r["name"], r["run"], r["variant"]) == (name, run, variant)]
        return f"{found[0]['us']:.0f}"

    kept = {
        128: (3, "plain"),
        256: (3, "new"),
        512: (2, "3c settle 144"),
        1024: (2, "3c settle 144"),
    }
    pairs = [
        [us(f"mixtral gu, {n} tokens", run, x) for x in (variant, "base")]
        for n, (run, variant) in kept.items()
    ]
    after, before = (f"{', '.join(x[:3])} and {x[3]}" for x in zip(*pairs, strict=True))
    assert f"gate and up take {after} us of 128, 256, 512 and 1,024 tokens" in text
    assert f"the kernel before took {before} in the same runs" in text
    peers = [301 / 171, 284 / 231, 357 / 271]
    assert "so {:.2f}, {:.2f} and {:.2f} times as fast".format(*peers) in text
    down = [
        us("mixtral down, 256 tokens", 1, "new"),
        us("mixtral down, 512 tokens", 2, "3c new 144"),
    ]
    assert f"its down product {down[0]} and {down[1]} of 256 and 512" in text
