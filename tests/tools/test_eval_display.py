"""What `turbojax eval` shows of results: tables, what could not be measured, and pictures."""

import io

import pytest
from rich.console import Console

from turbojax.app.evaluate import display

CELLS = [
    {"length": length, "depth": depth, "whole": whole, "bits": 2 * (1 - whole)}
    for length, depth, whole in (
        *((64, 0.0, 1.0), (64, 0.5, 0.5)),
        *((128, 0.0, 0.25), (128, 0.5, 0.75)),
    )
]
ERRORS = {"cosine": [1.0, 0.5], "relative_l1": [0.0, 0.25], "rmse": [0.0, 0.1]}
TEXT = {
    "bits_per_token": 2.0,
    "perplexity": 4.0,
    "interval": [1.5, 2.5],
    "cost": 0.5,
    "cost_interval": [0.25, 0.75],
    "same_greedy_choice": 0.5,
    "divergence": 0.125,
    "by_file": {"a": 2.0},
    "cache_bytes": 1024,
    "exact_cache_bytes": 4096,
}
LOST = {**TEXT, "bits_per_token": None, "perplexity": None, "interval": None, "cost": None}


def result(**methods):
    return {
        "jax": "0",
        "device": "cpu",
        "texts": {"a": {"windows": 1}, "b": {"windows": 0}},
        "settings": {"context": 8, "prompt": 4},
        "methods": methods,
    }


def shown(found) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(display.render(found))
    return " ".join(out.getvalue().split())


@pytest.fixture(scope="module")
def everything():
    recall = {"copy": {"whole": 0.625, "likelihood": 0.25, "bits": 1.5, "cells": CELLS}}
    left = [
        {"length": 256, "why": "max_length=128"},
        {"length": 64, "kind": "key_value", "why": "no room"},
        {"why": "no tokenizer"},
    ]
    layers = {**ERRORS, "prefill": ERRORS, "decode": ERRORS}
    return result(
        good={"text": TEXT, "layers": layers, "recall": {**recall, "left_out": left}},
        lost={"text": {**LOST, "cost_interval": None}, "layers": {"refused": "it cannot"}},
    )


def test_tables(everything):
    text = shown(everything)
    for words in (
        "1 texts in windows of 8 tokens, 4 of them prefilled",
        "2.0000 ± 0.5000 │ 4.000 │ +0.5000 ± 0.2500 │ 0.12500 │ 50.0% │ 1,024 │ 4.00x",
        "│lost │ nan │ nan │ nan │",
        "│good │ 0.75000 │ 0.1250 │ 1 │ 0.2500 │ 0.1250 │ 0.1250",
        "│good │ 75.0% │ 50.0% │ 62.5% │ 25.0% │ 1.500│",
        "not asked: 256 tokens: max_length=128; values by key of 64 tokens: no room; no tokenizer",
        "lost, layers: it cannot",
        "Left out, shorter than 8 tokens: b",
    ):
        assert words in text


def test_pictures(everything, tmp_path):
    names = display.save_plots(everything, tmp_path / "new" / "folder")
    assert names == ["cost.png", "layers.png", "recall.png", "recall_bits.png"]
    for name in names:
        assert (tmp_path / "new" / "folder" / name).read_bytes().startswith(b"\x89PNG")
    nothing = result(lost={"layers": {"refused": "it cannot"}})
    assert display.save_plots(nothing, tmp_path) == []
    assert "it cannot" in shown(nothing)


def test_what_no_method_beats():
    points = [(4.0, 0.0), (1.0, 0.5), (2.0, 0.2), (2.5, 0.3), (2.0, 0.2), (1.5, float("nan"))]
    assert display.pareto(points) == [1, 2, 0]
