"""Layers of GPTQ, AWQ and compressed-tensors, unpacked: recorded ones and an oracle's."""

import ml_dtypes
import numpy as np
import pytest

from tests.models import packed_helpers as packed
from tests.recordings import packed_recordings
from turbojax import fireq
from turbojax.models.checkpoint.packed import reading
from turbojax.models.checkpoint.packed.codes import weights

RECORDED = packed_recordings.read()


def loaded(config, parts, shape):
    """The `Int4Weight` of stored arrays, whose shapes and dtypes are checked as a folder's are."""
    layout = reading.parse(config)
    wanted = layout.parts(*shape)
    assert {name for name, part in wanted.items() if part.required} <= set(parts) <= set(wanted)
    for name, array in parts.items():
        assert array.shape == wanted[name].shapes[packed.DTYPE_NAMES[array.dtype]], name
    return weights({"": layout.unpack(parts, *shape)})[""]


@pytest.mark.quick(7, slow=0)
@pytest.mark.parametrize("name", RECORDED)
def test_values_are_those_that_the_packages_compute(name):
    case = RECORDED[name]
    weight = loaded(case.config, case.parts, case.weight.shape)
    values = np.asarray(fireq.dequantize(weight))
    assert case.weight.dtype == weight.scales.dtype
    assert values.astype(case.weight.dtype).tobytes() == case.weight.tobytes()
    assert (weight.zeros is None) == name.endswith("-sym")
    # Subnormal scales and all, and nothing is rounded before.
    assert np.abs(case.weight.astype(np.float64) - values).max() <= np.abs(values).max() / 2**8


# Shapes of layers: outputs and inputs that are not whole blocks, groups that are not.
LAYERS = {
    "gptq": (packed.gptq_config(128), packed.gptq, (72, 192), 128, {}),
    "gptq, one scale": (packed.gptq_config(-1), packed.gptq, (8, 200), 200, {}),
    "gptq, groups of 256": (packed.gptq_config(256), packed.gptq, (40, 512), 256, {}),
    "gptq, act-order": (packed.gptq_config(32), packed.gptq_act_order, (40, 96), 32, {}),
    "awq": (packed.awq_config(128), packed.awq_gemm, (136, 256), 128, {}),
    "awq, gemv": (packed.awq_config(-1, version="gemv"), packed.awq_gemv, (24, 192), 192, {}),
    "compressed, odd": (packed.compressed_config(64), packed.compressed, (37, 64), 64, {}),
    "compressed, one scale": (packed.compressed_config(-1), packed.compressed, (11, 136), 136, {}),
    "compressed, early": (
        packed.compressed_config(32),
        lambda layer: packed.compressed(layer, unpacked_zeros=True),
        (24, 96),
        32,
        {"dtype": ml_dtypes.bfloat16},
    ),
}


@pytest.mark.quick(3, slow=0)
@pytest.mark.parametrize("case", LAYERS)
def test_values_are_those_of_the_formula(case):
    config, pack, shape, group_size, traits = LAYERS[case]
    layer = packed.random_layer(np.random.default_rng(3), shape, group_size, **traits)
    layout = reading.parse(config)
    codes = layout.unpack(pack(layer), *shape)
    weight = weights({"": codes})[""]
    expected = layer.weight()
    if codes.inputs is not None:
        expected = expected[:, np.argsort(packed.act_order(shape[1]))][:, codes.inputs]
    assert np.asarray(fireq.dequantize(weight)).tobytes() == expected.tobytes()
    # What the kernels take, wherever groups are whole blocks.
    assert weight.group_size == min(128, group_size if group_size in (32, 64) else 128)


def test_symmetric_weights_whose_zero_points_are_not_less_one():
    layer = packed.random_layer(np.random.default_rng(0), (32, 128), 128, symmetric=True)
    for less_one in (True, False):
        parts = packed.gptq(layer, less_one=less_one, index=False)
        weight = loaded(packed.gptq_config(128, sym=True), parts, (32, 128))
        assert weight.zeros is None
        assert np.asarray(fireq.dequantize(weight)).tobytes() == layer.weight().tobytes()
    # A file may call weights symmetric that are not: zero points are what is stored.
    layer = packed.random_layer(np.random.default_rng(0), (32, 128), 128)
    weight = loaded(packed.gptq_config(128, sym=True), packed.gptq(layer), (32, 128))
    assert np.asarray(fireq.dequantize(weight)).tobytes() == layer.weight().tobytes()


def test_sizes_that_are_not_whole_words():
    for config, shape, message in (
        (packed.gptq_config(-1), (8, 100), "100 inputs must be a multiple of 8"),
        (packed.gptq_config(128), (12, 128), "12 outputs must be a multiple of 8"),
        (packed.awq_config(128), (12, 128), "12 outputs must be a multiple of 8"),
        (packed.awq_config(-1, version="gemv"), (8, 100), "100 inputs must be a multiple of 8"),
    ):
        with pytest.raises(ValueError, match=message):
            reading.parse(config).parts(*shape)
    # The other axis may be any.
    for config, pack, shape in (
        (packed.awq_config(-1), packed.awq_gemm, (16, 100)),
        (packed.awq_config(-1, version="gemv"), packed.awq_gemv, (11, 104)),
    ):
        layer = packed.random_layer(np.random.default_rng(0), shape, shape[1])
        values = np.asarray(fireq.dequantize(loaded(config, pack(layer), shape)))
        assert values.tobytes() == layer.weight().tobytes()


def test_act_order_needs_its_groups():
    layer = packed.random_layer(np.random.default_rng(0), (8, 64), 32)
    parts = packed.gptq(layer, index=False)
    with pytest.raises(ValueError, match="desc_act=True .* must have g_idx"):
        loaded(packed.gptq_config(32, desc_act=True), parts, (8, 64))
    config = packed.gptq_config(32, desc_act=True, static_groups=True)
    values = np.asarray(fireq.dequantize(loaded(config, parts, (8, 64))))
    assert values.tobytes() == layer.weight().tobytes()
    for key in ("desc_act", "static_groups"):
        with pytest.raises(NotImplementedError, match=f"{key}='maybe' is not supported"):
            reading.parse(packed.gptq_config(32, **{key: "maybe"}))


def test_a_group_index_that_is_not_known():
    layer = packed.random_layer(np.random.default_rng(0), (8, 64), 32)
    parts = packed.compressed(layer) | {"weight_g_idx": np.full(64, -1, np.int32)}
    values = np.asarray(fireq.dequantize(loaded(packed.compressed_config(32), parts, (8, 64))))
    assert values.tobytes() == layer.weight().tobytes()


def test_layers_that_contradict_themselves():
    layer = packed.random_layer(np.random.default_rng(0), (32, 128), 128)
    layout = reading.parse(packed.compressed_config(128))
    parts = packed.compressed(layer)
    with pytest.raises(ValueError, match="weight_shape is .32, 127., must be .32, 128."):
        layout.unpack(parts | {"weight_shape": np.array([32, 127])}, 32, 128)
    early = {"weight_zero_point": np.full((32, 1), 9, np.int8)}
    with pytest.raises(ValueError, match="weight_zero_point must hold numbers from -8 to 7"):
        layout.unpack(parts | early, 32, 128)
