"""The suites of paged attention: what they count, that they run, their tables."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import tables
from benchmarks.measuring import calls
from benchmarks.measuring.calls import Arrays
from benchmarks.shapes import Shape
from benchmarks.suite import describe
from benchmarks.suites.paged import cases as paged_cases
from benchmarks.suites.paged import inputs as paged_inputs
from benchmarks.suites.paged import suite as paged
from benchmarks.suites.paged.inputs import Problem

TINY = Shape("tiny", 2, 192)


def test_rows_are_named_once_and_come_with_what_they_are_compared_with():
    rows = paged.SUITE.rows() + paged.CHUNKS.rows()
    names = [group.name(case) for group, case in rows]
    assert names[0] == "paged-decode/llama3-8b/b16-s32768/cudnn"
    for name in (
        "paged-decode/llama3-8b/b64-s4096/turbo4/mosaic_gpu",
        "paged-decode/llama3-8b/b1-s8192/auto/mosaic_gpu",
        "paged-decode/llama3-8b/b1-s1024/fp8_e4m3/triton",
        "paged-decode/llama3-8b/b16-s32768-ragged/auto/triton",
        "paged-page-size/llama3-8b/b16-s32768/turbo4/page-16/mosaic_gpu",
        "paged-chunk/llama3-8b/b4-s8192-t16/turbo4/mosaic_gpu",
        "paged-chunk/llama3-8b/b4-s8192-t256/fp8_e4m3/mosaic_gpu",
        "paged-chunk/llama3-8b/b1-s32768-t1024/turbo4/mosaic_gpu",
        "paged-append/llama3-8b/b4-s32768-t4096/dense",
    ):
        assert name in names
    for group, _ in rows:
        families = {case.family for case in group.cases}
        assert families >= set(paged.BASELINES[group.operation])
    # Groups of one operation are compiled together: those with the figures to reach come first.
    operations = [group.operation for group, _ in rows]
    assert operations == sorted(operations, key=list(dict.fromkeys(operations)).index)
    rows = paged.FORMATS.rows()
    names = [group.name(case) for group, case in rows]
    assert "paged-decode/llama3-8b/b1-s1024/turbo_k3v2/mosaic_gpu" in names
    assert "paged-append/llama3-8b/b64-s4096/k8v4" in names
    for kind in ("int8", "int8_v4"):
        assert f"paged-decode/llama3-8b/b16-s32768/{kind}/mosaic_gpu" in names
        assert f"paged-append/llama3-8b/b64-s4096/{kind}" in names
    assert not any("/jax" in name for name in names)


def test_bytes_and_operations():
    llama = Problem(Shape("llama3-8b", 16, 32768))
    held = 16 * (32768 - 27)
    for kv_dtype, per_head in (("turbo4", 132), ("fp8_e4m3", 256), ("auto", 512)):
        cache = jax.eval_shape(lambda d=kv_dtype: paged_inputs.empty(llama.shape, 64, d))
        assert cache.num_pages == 16 * 512
        needs = llama.needs(cache.token_bytes)
        assert needs.nbytes == held * 8 * per_head + 2 * 16 * 32 * 128 * 2
        assert needs.operations == 2 * 2 * held * 32 * 128
    ragged = dataclasses.replace(llama, ragged=True)
    assert ragged.lengths[0] == 2048 - 27
    assert ragged.lengths[-1] == 32768 - 27
    assert ragged.needs(1).nbytes < llama.needs(1).nbytes
    # Read in bfloat16, written as they are stored: keys and values of 8 heads.
    new = paged_cases._append_needs(llama.shape, 3, 8 * 132)
    assert new.nbytes == 16 * 3 * 8 * (512 + 132)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3", "int8", "turbo4", "k8v4"])
def test_pools_are_full_of_random_content(kv_dtype):
    cache = paged_inputs.pool(TINY, 16, kv_dtype)
    cache.validate()
    tables, lengths = paged_inputs.tables_and_lengths(Problem(TINY, page_size=16, ragged=True))
    assert lengths.tolist() == [96 - 27, 192 - 27]
    assert np.sum(np.asarray(tables) >= 0, axis=1).tolist() == [5, 11]
    used = np.asarray(tables)[np.asarray(tables) >= 0]
    assert len(set(used.tolist())) == 16
    assert used.tolist() != sorted(used.tolist())
    arrays = [cache.key, cache.value, cache.key_norm, cache.value_norm]
    for x in (np.asarray(x.astype(jnp.float32)) for x in arrays if x is not None):
        pages = x.reshape(len(x), -1)
        assert np.all(np.isfinite(x))
        assert len({page.tobytes() for page in pages}) == len(pages)
        # No page is a constant: of each, all parts count.
        assert pages.std(axis=1).min() > 0.2 * x.std()
    assert not np.array_equal(cache.key.astype(jnp.float32), cache.value.astype(jnp.float32))


def test_exact_is_softmax_of_what_is_seen():
    rng = np.random.default_rng(0)
    query = rng.normal(size=(2, 3, 4, 16))
    key, value = rng.normal(size=(2, 2, 20, 2, 16))
    visible = np.array([[18, 19, 20], [5, 6, 7]])
    got = paged_inputs.exact(*(jnp.asarray(x, jnp.float32) for x in (query, key, value)), visible)
    for b, r, n in np.ndindex(2, 3, 4):
        count, head = visible[b, r], n // 2
        scores = key[b, :count, head] @ query[b, r, n] / 4
        p = np.exp(scores - scores.max())
        want = p @ value[b, :count, head] / p.sum()
        np.testing.assert_allclose(got[b, r, n], want, rtol=1e-4, atol=1e-6)


@pytest.mark.quick(1)
@pytest.mark.parametrize("spoil", ["nan", "page"])
def test_a_wrong_output_is_a_failed_row(monkeypatch, spoil):
    """A sequence that reads one page of another's, and NaN in what is not compared."""
    attend = paged_cases.paged.attention
    problem = Problem(Shape("tiny", 3, 192), page_size=16)

    def wrong(query, cache, block_tables, lengths, **options):
        if spoil == "page":
            block_tables = block_tables.at[0, 1].set(block_tables[1, 1])
        out = attend(query, cache, block_tables, lengths, **options)
        return out.at[1, 0, 2, 3].set(jnp.nan) if spoil == "nan" else out

    group = paged_cases.decode(problem, (("turbo4", "xla"),))
    monkeypatch.setattr(paged_cases.paged, "attention", wrong, raising=False)
    found = []
    calls.run([(group, group.cases[-1])], {}, found.append, repetitions=2)
    assert [row["status"] for row in found] == ["failed"]
    assert ("not finite" if spoil == "nan" else "wrong") in found[0]["reason"]


def test_a_wrong_append_is_a_failed_row(monkeypatch):
    append = paged_cases.paged.append

    def wrong(cache, key, value, block_tables, lengths):
        return append(cache, key, value, block_tables, lengths + 1)

    monkeypatch.setattr(paged_cases.paged, "append", wrong)
    group = paged_cases.append(TINY, 3, ("auto",))
    found = []
    calls.run([(group, case) for case in group.cases], {}, found.append, repetitions=2)
    assert [row["status"] for row in found] == ["ok", "failed"]


def test_appends_go_on_from_place_to_place():
    group = paged_cases.append(TINY, 8, ("auto",))
    call = group.cases[1].build(Arrays())
    appending = paged_inputs.Appending(call.lower().compile(), call.make(), call.starts)
    for _ in call.starts:
        assert jax.block_until_ready(appending(*call.arguments)) is appending
    starts = [int(start[0]) for start in call.starts]
    assert len(set(starts)) == len(starts) > 10
    assert max(starts) + 8 <= 192
    held = np.zeros(192, bool)
    for start in starts:
        held[start : start + 8] = True
    pages = np.asarray(appending.cache.key.astype(jnp.float32))[np.asarray(call.arguments[2])]
    written = np.any(pages.transpose(0, 1, 3, 2, 4).reshape(2, 192, -1) != 0, axis=-1)
    np.testing.assert_array_equal(written, np.stack([held, held]))


# Tables -------------------------------------------------------------------------------------------

US = {"cudnn": 700.0, "jax": 1400.0, "bf16-pages": 750.0, "fp8-pages": 400.0, "turbo4": 200.0}


def _made_up(suite):
    """A result of a whole run with made-up figures."""
    result = {"device": "a device", "jax": "0", "date": "2000-01-01", "suite": suite.SUITE.name}
    result |= {"ceilings": {"copy": 3000.0, "bf16": 700.0}, "ceilings_not_measured": {}}
    return result


def _paged_result():
    rows = []
    for group, case in paged.SUITE.rows() + paged.CHUNKS.rows():
        row = {**describe(group, case), "status": "ok", "clock": "cupti"}
        us = US.get(case.family, 500.0)
        row |= {"us": us * (2 if case.implementation == "triton" else 1), "bytes": 5e8}
        row |= {"gigabytes_per_second": 2000.0, "percent_of_ceiling": 66.6, "bound": "copy"}
        row |= {"relative_l2": 0.0021, "cosine": 1.0}
        if case.method == "jax":
            row |= {"status": "failed", "reason": "too | large"}
        rows.append(row)
    rows[-1] |= {"status": "not run", "reason": tables.OUT_OF_TIME}
    return {**_made_up(paged), "rows": paged.SUITE.with_ratios(rows)}


def test_tables_of_a_made_up_result():
    result = _paged_result()
    table = paged.operation_table(result, paged.DECODE)
    assert "| 16 x 32k | dense bf16 | cuDNN | 700 | 1.00x | 1.07x | 0.57x | 500.0 |" in table
    assert "| 16 x 32k | turbo4 | mosaic_gpu | 200 | 3.50x | 3.75x | 2.00x |" in table
    assert "| 16 x 2k to 32k | bf16 | triton | 1,500 | 0.47x | 0.50x | 0.27x |" in table
    assert "| bf16, jax's kernel | Pallas | failed: too \\| large |" in table
    table = paged.operation_table(result, paged.PAGES)
    assert "| 16 x 32k | turbo4, 16 tokens | mosaic_gpu | 500 | 1.00x |" in table
    table = paged.operation_table(result, paged.APPEND)
    assert "| 1 of 64 x 4k | turbo4 | default | 200 | 2.50x |" in table
    assert "| 4,096 of 4 x 32k | dense bf16, a slice | XLA | 500 | 1.00x |" in table
    table = paged.operation_table(result, paged.CHUNK)
    assert "| 4 x 8k, 64 queries | bf16 | triton | 1,500 |" in table
    assert table.endswith(f"rows were not run: {tables.OUT_OF_TIME}.")
    text = table.rpartition("\n\n")[0]
    assert len({line.replace("\\|", "").count("|") for line in text.splitlines()}) == 1
    lines = [tables.one_line(row) for row in result["rows"]]
    assert any("3.50x cudnn" in line for line in lines)


def test_sections_of_a_made_up_result():
    sections = {
        name: table("x.json", _paged_result()) for name, table in paged.SUITE.tables.items()
    }
    assert "](paged_speed.png)" in sections["paged decode"]
    assert "Reading and writing 1 GiB: 3,000 GB/s. A product" in sections["paged append"]
    line = "| 64 x 4k | 700 | 750 (0.93x) | 400 (1.75x) | 200 (3.50x) |"
    assert line in sections["paged summary"]


def test_bars_of_a_result_that_is_not_complete():
    """A run without cuDNN, or cut by the clock, can be drawn."""
    result = _paged_result()
    bars = paged.speed_bars(result)
    assert bars["16 x 32k"] == {
        "bf16": 700 / 750,
        "fp8, e4m3": 1.75,
        "fp8, e5m2": 1.4,
        "int8": 1.4,
        "turbo4": 3.5,
        "bf16, jax's kernel": 0.5,
    }
    without = copy.deepcopy(result)
    without["rows"] = [row for row in without["rows"] if row["family"] != "cudnn"]
    for row in without["rows"]:
        row.get("speedup_over", {}).pop("cudnn", None)
    assert paged.speed_bars(without) == {}
    paged.speed_plot(without)
