"""Tables and plots of Flax's modules, of families of models and of loading."""

import copy

from benchmarks import tables
from benchmarks.suite import describe
from benchmarks.suites import families, flax, loading
from benchmarks.suites.attention import tables as attention_tables

SUITES = {"flax": flax.SUITE, "families": families.SUITE, "loading": loading.SUITE}


def _made_up(suite):
    """A result of a whole run with made-up figures."""
    result = {"device": "a device", "jax": "0", "date": "2000-01-01", "suite": suite.SUITE.name}
    rates = {} if suite is loading else {"copy": 3000.0, "bf16": 700.0}
    return {**result, "ceilings": rates, "ceilings_not_measured": {}}


def _flax_result():
    us = {"nnx": 800.0, "nnx-cudnn": 700.0, "exact": 650.0, "turbo4": 200.0}
    rows = []
    for group, method in flax.SUITE.rows():
        row = {**describe(group, method), "status": "ok", "clock": "cupti"}
        row |= {"us": us.get(method, 400.0), "wall_us": 900.0, "percent_of_ceiling": 55.5}
        row |= {"bound": "copy", "against": "nnx", "relative_l2": 0.01, "temporary_bytes": 3e9}
        if group.operation == flax.DECODE:
            row["cache_bytes"] = int({"turbo4": 144e6}.get(method, 537e6))
        else:
            row["gradient_relative_l2"] = 0.02
        rows.append(row)
    rows[4] |= {"status": "failed", "reason": "too | large"}
    rows[-1] |= {"status": "not run", "reason": tables.OUT_OF_TIME}
    return {**_made_up(flax), "rows": flax.with_ratios(rows)}


def _families_result():
    us = {"exact": 20000.0, "paged": 15000.0, "fp8_e4m3": 12500.0, "turbo4": 10000.0}
    us |= {"4bit": 12000.0, "k8v4": 11000.0}
    sizes = {"exact": 1, "paged": 1, "fp8_e4m3": 0.5}
    rows = []
    for group, cache in families.SUITE.rows():
        row = {**describe(group, cache), "status": "ok", "clock": "wall"}
        row |= {"us": us[cache], "device_us": 9000.0, "tokens_per_second": 1600.0}
        row |= {"cache_bytes": int(16e9 * sizes.get(cache, 0.26))}
        row |= {"percent_of_ceiling": 50.0, "relative_l2": 0.02, "repetitions": 64}
        rows.append(row)
    rows[-1] |= {"status": "not run", "reason": tables.OUT_OF_TIME}
    rows[-2] |= {"status": "failed", "reason": "no | memory"}
    return {**_made_up(families), "rows": families.with_ratios(rows)}


def _loading_result():
    seconds = {"read": 4.0, "load_decoder": 8.0, "load": 10.0, "naive": 40.0}
    rows = []
    for group, case in loading.SUITE.rows():
        row = {**describe(group, case), "status": "ok", "seconds": seconds[case.method]}
        row |= {"gigabytes_per_second": 16.06 / row["seconds"]}
        if case.method != "read":
            peak = 1.3 if case.method == "naive" else 1.02
            row |= {"peak_device_bytes": int(peak * row["model_bytes"])}
            row |= {"peak_host_bytes": int((peak - 1) * row["model_bytes"])}
        rows.append(row)
    rows[-1] |= {"status": "failed", "reason": "no | disk"}
    return {**_made_up(loading), "rows": loading.SUITE.with_ratios(rows)}


MADE_UP = {"flax": _flax_result, "families": _families_result, "loading": _loading_result}
PICTURES = {
    "flax decode": "flax_speed.png",
    "families": "families_speed.png",
    "loading": "loading.png",
}


def test_tables_of_a_made_up_result():
    result = _flax_result()
    decode, training = flax.decode_table(result), flax.training_table(result)
    place = "32 heads on 8 of 128, 16 x 8k"
    line = f"| {place} | `TurboAttention`, turbo4 pages | 200 | 4.00x | 3.50x | 900 | 144 | 3.73x |"
    assert line in decode
    assert "| failed: too \\| large |" in decode
    assert "| with `TurboAttentionFn()` | 0.40 | 2.00x | 1.75x | 0.90 | 3.00 |" in training
    assert training.endswith(f"1 of 6 rows were not run: {tables.OUT_OF_TIME}.")
    table = families.families_table(_families_result())
    line = "| gemma-2-9b | 16 x 8k | turbo4 pages | 10.00 | 2.00x | 1.50x | 9.00 | 1,600 | 4.16 |"
    assert line in table
    assert "| phi-3-mini | 16 x 4k | turbo4 pages | failed: no \\| memory |" in table
    section = families.SUITE.tables["families"]("x.json", _families_result())
    assert (
        "gemma-2-9b: 16 heads on 8 of 256, windows of 4,096 in some layers, scores capped at 50"
        in section
    )
    assert "mistral-7b: 32 heads on 8 of 128, windows of 4,096;" in section
    loaded = loading.loading_table(_loading_result())
    line = "| llama-3-8b | in the page cache | `load` | 10.00 | 4.00x | 1.61 | 1.020x | 0.020x |"
    assert line in loaded
    assert "| failed: no \\| disk |" in loaded
    for text in (decode, training.rpartition("\n\n")[0], table.rpartition("\n\n")[0], loaded):
        assert len({line.replace("\\|", "").count("|") for line in text.splitlines()}) == 1


def test_lines_of_a_made_up_result():
    lines = {
        name: [SUITES[name].one_line(row) for row in make()["rows"]]
        for name, make in MADE_UP.items()
    }
    assert any("4.00x nnx, 3.50x nnx-cudnn" in line for line in lines["flax"])
    line = "2.00x exact, 1.50x paged"
    assert any(line in other for other in lines["families"])
    assert any("8.00 s, 2.01 GB/s" in line and "5.00x naive" in line for line in lines["loading"])


def test_sections_of_a_made_up_result():
    sections = {}
    for name, make in MADE_UP.items():
        result = make()
        sections |= {x: table("x.json", result) for x, table in SUITES[name].tables.items()}
    for name, picture in PICTURES.items():
        assert f"]({picture})" in sections[name]
    line = "| 32 heads on 8 of 128, 16 x 8k | 800, 537 MB | 700 (1.14x), 537 MB |"
    assert line in sections["flax summary"]
    # Over the faster uncompressed cache.
    place = "| llama-3.1-8b, 16 x 8k | 20.0 ms, 16.0 GB | 15.0 ms | 12.5 ms (1.20x), 2.0x smaller |"
    assert place in sections["families summary"]


def test_bars_of_a_result_that_is_not_complete():
    """A run that the clock cut, or whose baseline failed, can be drawn."""
    bars = flax.bars(_flax_result())
    place = "decoding\n32 heads on 8 of 128, 16 x 8k"
    assert bars[place]["turbo4 pages"] == (4.0, "4.00: 0.2 ms")
    bars = families.families_bars(_families_result())
    assert bars["gemma-2-9b\n16 x 8k"]["4-bit"] == (15 / 12, "12.0 ms")
    bars = loading.loading_bars(_loading_result())
    assert set(bars) == {"most on the device", "most on the host"}
    draw = {"flax": flax.speed_plot, "families": families.speed_plot}
    for name, plot in draw.items():
        made = MADE_UP[name]()
        base = "nnx" if name == "flax" else "exact"
        without = copy.deepcopy(made)
        without["rows"] = [row for row in without["rows"] if row["method"] != base]
        for row in without["rows"]:
            row.pop("speedup_over", None)
            row.pop("smaller_than_exact", None)
        without["rows"] = SUITES[name].with_ratios(without["rows"])
        plot(without)
        plot({**made, "rows": []})
    made = _loading_result()
    made["rows"] = made["rows"][:1]
    loading.memory_plot(made)


def test_a_reason_cannot_break_a_table():
    row = {"name": "decode/x", "operation": "decode", "status": "failed", "reason": "a | b"}
    assert "failed: a \\| b" in attention_tables.details_table({"rows": [row]}, "decode")
    assert tables.one_line(row) == "decode/x: failed: a | b"
