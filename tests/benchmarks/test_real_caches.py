"""What caches cost a real language model: the tables of docs/benchmarks/real_model.md."""

from benchmarks.real_caches import caches_table, recall_table

MADE_UP = {"device": "x", "jax": "y", "date": "z"}


def test_the_cache_of_the_least_loss_comes_first() -> None:
    row = {"cost": 0.01, "interval": None, "cost_by_text": {"prose": 0.02}}
    row |= {"divergence": 0.5, "same_choice": 0.9}
    rows = {"a": {**row, "compression": 3.456}, "b": {**row, "cost": 0.002, "compression": 2.0}}
    table = caches_table("a.json", {**MADE_UP, "caches": rows})
    assert table.index("| `b` | +0.0020 | +0.0200 | 0.5000 | 90.0% | 2.00x |") < table.index(
        "| `a` |"
    )


def test_recall_is_that_of_the_longest_context() -> None:
    cells = [
        {"length": length, "depth": depth, "bits": bits, "whole": bits / 4}
        for length, depth, bits in ((1024, 0.0, 0.5), (8192, 0.0, 1.0), (8192, 1.0, 2.0))
    ]
    row = {kind: {"cells": cells} for kind in ("copy", "needle")}
    table = recall_table("a.json", {**MADE_UP, "recall": {"exact": row}})
    assert "| 8,192 tokens | copy | sentence in a text |" in table
    assert "| `exact` | 1.50 (38%) | 1.50 (38%) |" in table
