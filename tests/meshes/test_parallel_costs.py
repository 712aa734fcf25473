"""The cost model of many GPUs: what it is fitted to, and what follows at the ends."""

import math

import pytest

from benchmarks import parallel_costs
from benchmarks.parallel_costs import Costs, pays_to, speedup


def result() -> dict:
    """What a machine would have measured that is as the model has it."""
    rows = []
    for kind, latency, rate in (
        ("all-gather", 20, 250),
        ("all-reduce", 19, 260),
        ("collective-permute", 26, 280),
    ):
        for size in (2**14, 2**22, 2**29):
            name = f"parallel/collective/{kind}/{size}/2"
            us = latency + size / rate / 1e3
            rows.append({"name": name, "kind": kind, "bytes": size, "us": us, "devices": 2})
    for tokens in (2**17, 2**19, 2**20):
        name = f"parallel/decode-sequence/4bit/{tokens // 1024}k/1"
        us = 9 + tokens / 4096
        rows.append({"name": name, "tokens": tokens, "us": us, "devices": 1})
    prefill = {"name": "parallel/prefill/128k/1", "tokens": 2**17, "us": 80e3, "devices": 1}
    steps = [
        {"name": f"parallel/step/bf16/paged/{n}", "tokens": 8192, "us": us, "devices": n}
        for n, us in ((1, 10e3), (2, 7e3))
    ]
    rows = [{"status": "ok", **row} for row in (*rows, prefill, *steps)]
    machine = {"device": "GPU", "jax": "0", "date": "2000-01-01"}
    return {**machine, "rows": [*rows, {"name": "x", "status": "failed", "devices": 1}]}


@pytest.fixture
def costs() -> Costs:
    return Costs.of(result()["rows"])


def test_fitted_to_what_was_measured(costs):
    assert costs.gather.latency == pytest.approx(20)
    assert costs.gather.gigabytes == pytest.approx(250)
    assert costs.reduce.gigabytes == pytest.approx(260)
    assert costs.permute.latency == pytest.approx(26)
    assert costs.decode == pytest.approx((9, 1 / 4096))
    assert costs.ring(2**17, 1) == pytest.approx(80e3)
    assert costs.tensor(0, 1) == pytest.approx(10e3)
    assert costs.tensor(0, 2) == pytest.approx(7e3)


def test_times_are_never_negative():
    """A line through times of which the smallest is too short has no constant."""
    assert parallel_costs._line([(1, 1.0), (2, 3.0), (4, 7.0)])[0] == 0
    with pytest.raises(ValueError, match="'all-gather' needs times of two sizes"):
        parallel_costs.fit([], "all-gather")
    with pytest.raises(ValueError, match="needs two contexts"):
        Costs.of([x for x in result()["rows"] if "decode" not in x["name"]])


def test_where_splitting_stops_to_pay(costs):
    """Later where there is more to do; and the limit is what a strategy cannot shorten."""
    reach = [pays_to(costs.decode_sequence, tokens) for tokens in (2**17, 2**20, 2**23)]
    assert reach == sorted(reach)
    assert 1 <= reach[0] < reach[-1]
    # The constant and one exchange remain.
    bound = costs.decode_sequence(2**17, 1) / (9 + 20)
    assert speedup(costs.decode_sequence, 2**17, 8) < bound
    # A prompt's work grows with its square: exchanges hide behind it.
    assert speedup(costs.ring, 10 * 2**20, 64) == pytest.approx(64)
    assert speedup(costs.ring, 2**13, 64) < 16
    for time in (costs.heads, costs.tensor):
        assert math.isnan(time(2**17, 2 * parallel_costs.KV_HEADS))
        assert pays_to(time, 2**17) <= parallel_costs.KV_HEADS
    # Gathers of a weight against a token's products with it: 8 bytes against 6 operations.
    expected = 400e12 / 250e9 * 8 / 6
    assert costs.least_tokens(8) == pytest.approx(expected, rel=0.01)
    assert costs.least_tokens(64) > 5 * costs.least_tokens(8)


@pytest.mark.fuzz
def test_table_and_plot():
    text = parallel_costs.table("parallel_2000-01-01.json", result())
    assert "| all-gather | 20.0 us | 250 GB/s |" in text
    assert text.count("| 10M |") == 3
    assert "1,024 GPUs" in text
    assert "- |" in text  # heads cannot be split so often
    figure = parallel_costs.plot(result())
    assert len(figure.axes[0].lines) == 3 * 3 + 1 + 1
