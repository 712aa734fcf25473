"""Training and errors of 8-bit gradients: what runs, and what is put together."""

import json

import jax
import pytest

from benchmarks import gradient_error, gradient_training


def part(name, seeds, **facts):
    runs = {
        str(seed): {"losses": [1.0 + seed / 10] * 60, "held_out_bits_per_byte": 2.0}
        for seed in seeds
    }
    same = {"device": "a", "jax": "b", "settings": {"steps": 60}, "weights": "random ones"}
    return {**same, **facts, "runs": {name: runs}}


def test_seeds_are_joined_and_compared_one_by_one():
    parts = [part("fp8-8bit", [2]), part("exact", [0, 2]), part("fp8-8bit", [0])]
    parts[0]["runs"]["fp8-8bit"]["2"]["losses"] = [1.8] * 60
    result = gradient_training.merged(parts)
    assert list(result["runs"]) == ["exact", "fp8-8bit"]
    assert list(result["runs"]["fp8-8bit"]) == ["0", "2"]
    assert gradient_training.changes(result, "fp8-8bit") == pytest.approx([0, 0.5])
    assert gradient_training.loss_ratio(result, "fp8-8bit") == pytest.approx(1.25)


def test_other_weights_are_not_joined():
    with pytest.raises(ValueError, match="weights='others' must be 'random ones'"):
        gradient_training.merged([part("exact", [0]), part("exact", [1], weights="others")])


@pytest.mark.fuzz
def test_errors_of_a_model_are_measured(tmp_path):
    path = tmp_path / "error.json"
    gradient_error.main(["--quick", "--out", str(path)])
    result = json.loads(path.read_text())
    for label, errors in result["random"].items():
        assert 0.01 < max(errors) < 0.06, label
        assert 0 < result["model"]["errors"][label] < 0.5, label
    table = gradient_error.error_table("error.json", result)
    assert table.count("`mode=") == len(gradient_error.NAMES)


@pytest.mark.fuzz
def test_both_weights_are_trained(tmp_path):
    paths = [tmp_path / "random.json", tmp_path / "embedded.json"]
    for path, flags in zip(paths, ([], ["--embedded"]), strict=True):
        common = ["--quick", "--only", "exact", "--seeds", "0,1", "--out", str(path)]
        with jax.numpy_dtype_promotion("standard"):  # the model computes in bfloat16
            gradient_training.main([*common, *flags])
    random, embedded = (json.loads(path.read_text())["runs"]["exact"] for path in paths)
    assert list(random) == list(embedded) == ["0", "1"]
    assert random["0"]["losses"][0] > 6  # of 8 bits: nothing is learned yet
    assert embedded["0"]["losses"][0] < 3
