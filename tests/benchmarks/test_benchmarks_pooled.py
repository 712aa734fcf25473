"""The suite of pooled attention: its maps of levels, that it runs, and its tables and plots."""

import concurrent.futures
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from benchmarks import readme, report, suite, tables
from benchmarks.measuring.steps import compile_side_by_side
from benchmarks.shapes import Shape
from benchmarks.suites.pooled import suite as pooled
from tests.tools.docs_helpers import docs_text


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("density", [0.15625, 0.05])
def test_mixtures_have_the_density_asked_for(density, is_causal):
    shape = Shape("llama3-8b", 1, 16384, is_causal)
    levels = np.asarray(pooled.random_levels(shape, density))
    assert levels.shape == (1, 32, 128, 128)
    visible = np.tril(np.ones((128, 128), bool)) if is_causal else np.ones((128, 128), bool)
    assert not levels[..., ~visible].any()
    weight = np.select([levels == r for r in (1, 2, 4, 8)], [1, 0.5, 0.25, 0.125], 0.0)
    # What cannot be expressed is carried to the next row: half a block of each level remains.
    bound = 0.5 * (1 + 1 / 2 + 1 / 4 + 1 / 8) / visible.sum()
    assert abs(weight.sum() / (32 * visible.sum()) - density) <= bound
    for r, share in zip((1, 2, 4, 8), pooled.MIXTURE, strict=True):
        wanted = share * density / 0.15625 * visible.sum()
        assert abs((levels == r).sum() / 32 - wanted) <= 0.5
    if is_causal:
        assert np.all(np.diagonal(levels, axis1=2, axis2=3) == 1)
    assert not np.array_equal(levels[0, 0], levels[0, 1])


def test_a_sink_is_the_first_block_of_every_row():
    shape = Shape("mha-16", 1, 4096, is_causal=True)
    levels = np.asarray(pooled.random_levels(shape, 0.15625, sink=True))
    assert np.all(levels[:, :, :, 0] == 1)
    assert not np.all(np.asarray(pooled.random_levels(shape, 0.15625))[:, :, :, 0] == 1)


@pytest.mark.slow
def test_neighbours_are_alike_and_queries_look_for_their_topic():
    query, key, value, d_out = pooled.sample(Shape("tiny", 1, 4096))
    assert query.shape == d_out.shape == (1, 4096, 4, 64)
    assert key.shape == value.shape == (1, 4096, 2, 64)
    assert {x.dtype for x in (query, key, value, d_out)} == {jnp.dtype(jnp.bfloat16)}
    alike = np.asarray(tj.levels.key_similarity(key))[0]
    # Squares of strengths between 0.6 and 0.98; the widest possible range of a block's mean.
    assert 0.3 < alike.min() < 0.6 < 0.8 < alike.max() < 1
    q, k = (np.asarray(x, np.float64)[0] for x in (query, key))
    own = np.mean(np.sum(q[:, 2] * k[:, 1], -1))
    far = np.mean(np.sum(q[:2048, 2] * k[2048:, 1], -1))
    assert own > 5 * abs(far)


def test_rows_need_few_compiled_functions():
    rows = pooled.SUITE.rows()
    names = [group.name(case) for group, case in rows]
    assert names[0] == "pooled/mha-16/b1-s16384/cudnn"
    assert "pooled-gradient/mha-16/b1-s32768-causal/top-k/mosaic_gpu" in names
    assert not any("triton" in name and "s32768" in name for name in names)
    per_shape = {}
    for group, case in rows:
        per_shape.setdefault(group.shape, set()).update(case.needs)
    # cuDNN and ours with both passes, three policies and the reference.
    assert {len(jobs) for jobs in per_shape.values()} == {8, 10}


def test_compiling_side_by_side_keeps_the_order_and_the_errors():
    def broken():
        raise NotImplementedError("not here\nbut there")

    double = jax.jit(lambda x: 2 * x)
    first, second, third = compile_side_by_side(
        [lambda: double.lower(jnp.int32(0)), broken, lambda: double.lower(jnp.float32(0))]
    )
    assert int(first.result()(jnp.int32(4))) == 8
    assert float(third.result()(jnp.float32(4))) == 8
    failure = suite.failure(second.exception())
    assert failure == {"status": "not run", "reason": "not here"}
    assert suite.failure(ValueError("x"))["reason"] == "ValueError: x"


@pytest.mark.fuzz
def test_a_wrong_output_is_a_failed_row(monkeypatch):
    """NaN in a head that is not compared is found too."""
    rows = pooled.SUITE.rows("pooled/.*384/all-1/xla|select.*384/top-k", quick=True)
    compile_jobs = pooled.compile_jobs

    def broken(rows):
        jobs = compile_jobs(rows)
        (forward,) = (place for place in jobs if place[1].operation == pooled.FORWARD)
        run, jobs[forward] = jobs[forward].result(), concurrent.futures.Future()
        spoil = functools.partial(jax.tree.map, lambda x: x.at[0, -1, -1].set(jnp.nan))
        jobs[forward].set_result(lambda *arguments: spoil(run(*arguments)))
        return jobs

    monkeypatch.setattr(pooled, "compile_jobs", broken)
    found = []
    pooled.SUITE.run(rows, {"bf16": None}, found.append, repetitions=2)
    assert [row["status"] for row in found] == ["ok", "failed"]
    assert "not finite" in found[1]["reason"]
    late = []
    pooled.SUITE.run(rows, {}, late.append, deadline=-1.0)
    assert {row["reason"] for row in late} == {tables.OUT_OF_TIME}


def test_tables_say_what_did_not_run():
    base = suite.describe(*pooled.SUITE.rows("", quick=True)[-1])
    refused = {**base, "status": "not run", "reason": "a | b"}
    late = {**base, "status": "not run", "reason": tables.OUT_OF_TIME}
    table = pooled.attention_table({"rows": [refused, late]}, base["operation"])
    assert "| triton | not run: a \\| b |" in table
    assert table.endswith(f"1 of 2 rows were not run: {tables.OUT_OF_TIME}.")
    assert tables.one_line(refused) == f"{base['name']}: not run: a | b"
    assert "| shape | policy |" in pooled.selection_table({"rows": [refused]})


def test_prose_agrees_with_the_results():
    """The figures that docs/benchmarks/pooled.md names outside of its tables."""
    _, training = report.newest(readme.RESULTS, ("pooled_training",))
    _, windows = report.newest(readme.RESULTS, ("pooled_training_windows",))
    _, versions = report.newest(readme.RESULTS, ("pooled_versions",))
    _, launches = report.newest(readme.RESULTS, ("pooled_triton_launches",))
    _, suite = report.newest(readme.RESULTS, ("pooled",))
    text = docs_text("benchmarks/pooled.md")
    compared, (dense, pooled) = training["comparison"], training["runs"]
    [whole] = [
        row["speedup_over_cudnn"]
        for row in suite["rows"]
        if row["name"] == "pooled/mha-16/b1-s16384/all-1/mosaic_gpu"
    ]
    edges, together, shared = versions["versions"][1:]

    def row(version, density, tokens=16384, is_causal=False):
        place = (density, tokens, is_causal, "mosaic_gpu")
        [found] = [
            x
            for x in version["rows"]
            if (x.get("density"), x["tokens"], x["is_causal"], x["method"]) == place
        ]
        return found

    def keys(version, *place):
        times = row(version, *place)["kernels_us"]
        return sum(us for name, us in times.items() if "key_gradient" in name) / 1000

    def both(found):
        return [f"{found[f'{name}_speedup']:.2f}" for name in ("forward", "forward_backward")]

    long = [row(edges, density, 32768) for density in (0.157, 0.053)]
    causal = row(edges, 0.173, 32768, True)
    figures = [
        f"was {long[0]['forward_speedup']:.2f} times as fast at density 0.157",
        f"({long[0]['forward_backward_speedup']:.2f} times with the backward pass)",
        f"{long[1]['forward_speedup']:.2f} times at 0.053",
        f"({long[1]['forward_backward_speedup']:.2f} times)",
        f"a dense kernel, at {whole:.2f}x",
        f"at {compared['density'] * 100:.0f} % of the work, is {compared['speedup']:.2f} times",
        f"its loss is {compared['final_ratio']:.3f} times the dense one",
        f"it is {pooled['held_out_bits_per_byte']['run']:.4f} bits per byte with its own",
        f"are at {pooled['held_out_bits_per_byte']['dense']:.4f} bits per held-out byte",
        f"those of the dense run at {dense['held_out_bits_per_byte']['run']:.4f}.",
    ]
    earlier = readme.RESULTS / "pooled_training_2026-11-21.json"
    before = json.loads(earlier.read_text())["comparison"]
    figures += [
        f"was {before['speedup']:.2f} times as fast as its dense one at density "
        f"{before['density']:.3f}",
        f"{before['final_ratio']:.3f} times the dense one (`benchmarks/results/{earlier.name}`)",
    ]
    times = {(x["levels"], x["launch"]): x["forward_ms"] for x in launches["rows"]}
    figures += [
        "made {}x forward and {}x with the backward pass".format(*both(long[0])),
        "0.053 made {}x and {}x".format(*both(long[1])),
        "0.173 made {}x and {}x".format(*both(causal)),
        f"take {keys(together, 0.16):.2f} ms and not {keys(edges, 0.16):.2f} at density 0.16",
        f"{keys(shared, 0.086, 16384, True):.2f} ms and not "
        f"{keys(together, 0.086, 16384, True):.2f} at density 0.086",
        f"{times['ones', '64/64/4/3']:.2f} ms with all blocks at level 1",
        f"against {times['ones', '128/64/8/3']:.2f} ms with 128 and 8",
        f"{windows['comparisons'][0]['final_ratio']:.3f} times the dense loss",
        f"(density {windows['comparisons'][0]['density']:.3f})",
        f"{windows['comparisons'][1]['final_ratio']:.3f} with level 1 up to 896",
        f"(density {windows['comparisons'][1]['density']:.3f})",
        f"at {windows['comparisons'][1]['speedup']:.2f} times the speed of dense",
    ]
    assert [figure for figure in figures if figure not in text] == []


def test_prose_agrees_with_the_times_of_video():
    """docs/video.md: what choosing the levels took."""
    _, result = report.newest(readme.RESULTS, ("pooled_video",))
    chosen = [row["us"] for row in result["rows"] if row["operation"] == "pooled-select"]
    text = f"took {min(chosen):.0f} to {max(chosen):.0f} us"
    assert text in docs_text("video.md")
