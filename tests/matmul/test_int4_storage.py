"""INT4 weights in files and as named tensors: bit for bit, old versions, what does not fit."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import turbojax as tj
from tests.matmul.test_int4_weight import SCALE_DTYPES, assert_same_bits, random_weight
from turbojax.matmul.int4.layout import code_rows, scale_rows


@pytest.mark.quick(1)
@pytest.mark.parametrize("scale_dtype", SCALE_DTYPES)
def test_files(tmp_path, scale_dtype):
    """Every bit, NaN scales included, and several weights in one file."""
    w = random_weight((30, 300)).at[3, 5].set(jnp.nan)
    weight = tj.fireq.quantize_weight(w, scale_dtype=scale_dtype, output_scale=0.5)
    gated = tj.fireq.gate_and_up(weight, weight)
    wide = tj.fireq.quantize_weight(w, scale_dtype=scale_dtype, group_size=256)
    weights = {"layers.0.o": weight, "layers.0.gate_up": gated, "wide": wide}
    path = tmp_path / "weights.safetensors"
    tj.fireq.save_weights(weights, path)
    loaded = tj.fireq.load_weights(path)
    assert set(loaded) == set(weights)
    for name, got in loaded.items():
        assert_same_bits(got, weights[name])


def of_version_1(weight, tensors, metadata):
    """What was stored before arrays lay in tiles."""
    scales = np.ascontiguousarray(scale_rows(tensors["a.scales"]).T)
    tensors = {**tensors, "a.codes": code_rows(tensors["a.codes"]), "a.scales": scales}
    sizes = json.loads(metadata["a"])
    assert sizes.pop("version") == 2
    return tensors, {"a": json.dumps(sizes)}


@pytest.mark.parametrize("scale_dtype", ["e4m3", "bf16"])
def test_files_of_version_1(tmp_path, scale_dtype):
    """They hold rows; what is read lies in tiles."""
    weight = tj.fireq.quantize_weight(random_weight((70, 300)), scale_dtype=scale_dtype)
    tensors, metadata = of_version_1(weight, *tj.fireq.to_tensors(weight, "a"))
    assert tensors["a.codes"].shape == (128, 192)
    assert tensors["a.scales"].shape == (3, 128)
    safetensors.numpy.save_file(tensors, tmp_path / "old", metadata=metadata)
    assert_same_bits(tj.fireq.load_weights(tmp_path / "old")["a"], weight)
    for part, wrong in (("codes", (127, 192)), ("codes", (128, 191)), ("scales", (3, 127))):
        broken = {**tensors, f"a.{part}": np.zeros(wrong, tensors[f"a.{part}"].dtype)}
        with pytest.raises(ValueError, match=rf"a.{part}.shape=\({wrong[0]}, {wrong[1]}\) of ver"):
            tj.fireq.from_tensors(broken, metadata, "a")
    later = {"a": json.dumps({**json.loads(metadata["a"]), "version": 3})}
    with pytest.raises(ValueError, match="version='?3'? must be 2 or less"):
        tj.fireq.from_tensors(tensors, later, "a")


def test_tensors_that_do_not_fit():
    weight = tj.fireq.quantize_weight(random_weight((3, 5)))
    tensors, metadata = tj.fireq.to_tensors(weight, "a")
    assert {name: x.dtype.name for name, x in tensors.items()} == {
        "a.codes": "uint8",
        "a.scales": "uint8",
        "a.output_scale": "float32",
    }

    def load(tensors=tensors, **sizes):
        text = {"a": json.dumps({**json.loads(metadata["a"]), **sizes})}
        return tj.fireq.from_tensors(tensors, text, "a")

    assert_same_bits(load(), weight)
    with pytest.raises(ValueError, match=r"'a' lacks \['a.scales'\]"):
        load({k: x for k, x in tensors.items() if k != "a.scales"})
    with pytest.raises(ValueError, match="'b' lacks"):
        tj.fireq.from_tensors(tensors, metadata, "b")
    with pytest.raises(ValueError, match="'a' lacks its entry in the metadata"):
        tj.fireq.from_tensors(tensors, {}, "a")
    with pytest.raises(ValueError, match=r"codes.shape=\(1, 1, 64, 64\) must be \(2, 1, 64, 64\)"):
        load(out_size=70)
    with pytest.raises(ValueError, match="must hold"):
        load(out_size="3")
    with pytest.raises(ValueError, match="is no JSON"):
        tj.fireq.from_tensors(tensors, {"a": "{"}, "a")
    with pytest.raises(TypeError, match=r"scales.dtype=uint8 must be float8_e4m3fn or bfl"):
        load(scale_dtype="bf16")
    with pytest.raises(TypeError, match="must be uint8, bits of e4m3"):
        load({**tensors, "a.scales": tensors["a.scales"].astype(np.float32)})


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(FileNotFoundError):
        tj.fireq.load_weights(tmp_path / "absent")
    (tmp_path / "text").write_text("no safetensors", encoding="utf-8")
    with pytest.raises(ValueError, match="is not a readable safetensors file"):
        tj.fireq.load_weights(tmp_path / "text")
