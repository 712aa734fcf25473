"""Gemma 3 with images: the vision tower, soft tokens in prompts, every kind of cache, gradients."""

import dataclasses
import json
import math
import re
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export
from PIL import Image

from tests.models import image_helpers as tiny
from tests.models.family_helpers import cases
from tests.recordings import image_recordings as recordings
from turbojax import models
from turbojax.caches import CACHE_NAMES, cache_by_name
from turbojax.models.checkpoint.huggingface import to_hf_tensors
from turbojax.models.vision.checkpoint import expected_shapes, to_tensors
from turbojax.models.vision.model import Preprocessing, project
from turbojax.parallel import Axes

# Float32 logits of these models have a standard deviation of about 1.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def model(folder):
    return models.load(folder)


@pytest.fixture(scope="module")
def decoder(folder):
    return models.load_decoder(folder)


@pytest.fixture(scope="module")
def vision(folder):
    return models.load_vision(folder)


@pytest.fixture(scope="module")
def images(vision):
    return vision.images(tiny.images())


def of_prompt(images, i):
    return dataclasses.replace(images, embeddings=images.embeddings[tiny.OF_PROMPTS[i]])


def test_pixels_are_those_of_transformers(vision):
    """Where nothing is resized to the bit of a rounding, else as Pillow resizes."""
    got = np.stack([vision.preprocessing.pixels(x, 24) for x in tiny.images()])
    np.testing.assert_allclose(got, recordings.arrays()["pixels"], rtol=0, atol=2e-7)
    opened = [Image.fromarray(x) for x in tiny.images()]
    again = np.stack([vision.preprocessing.pixels(x, 24) for x in opened])
    np.testing.assert_array_equal(again, got)


def test_tower_and_projector_are_those_of_transformers(vision, images):
    recorded = recordings.arrays()
    got = jax.jit(lambda v, x: v.encode(x))(vision, jnp.asarray(recorded["pixels"]))
    np.testing.assert_allclose(got, recorded["tower"], rtol=0, atol=2e-5)
    assert 0.5 < recorded["soft"].std() < 3
    np.testing.assert_allclose(images.embeddings, recorded["soft"], rtol=0, atol=2e-5)


def test_pooling_against_float64(vision):
    """Means of squares of patches, RMSNorm with 1 + scale, and the projection."""
    config, tokens = vision.config, 3
    hidden = np.random.default_rng(0).normal(size=(2, 36, 36)).astype(np.float32)
    patches = hidden.astype(np.float64).reshape(2, 6, 6, 36)
    pooled = np.zeros((2, tokens, tokens, 36))
    for row in range(tokens):
        for column in range(tokens):
            square = patches[:, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            pooled[:, row, column] = square.reshape(2, 4, 36).mean(1)
    scale, kernel = (np.asarray(vision.projector[x], np.float64) for x in ("scale", "kernel"))
    rms = np.sqrt((pooled**2).mean(-1, keepdims=True) + config.norm_eps)
    want = (pooled / rms * (1 + scale)).reshape(2, 9, 36) @ kernel
    np.testing.assert_allclose(project(vision, jnp.asarray(hidden)), want, rtol=0, atol=1e-5)


def test_logits_are_those_of_transformers(model, images):
    """All prompts at once, padded on either side: images in windows, and across their edges."""
    tokens, lengths = tiny.batch()
    call = nnx.jit(lambda model, *x: model(x[0], attention_mask=x[1], images=x[2]))
    for side in ("right", "left"):
        ids, mask = tokens, np.arange(tokens.shape[1])[None] < lengths[:, None]
        if side == "left":
            moves = tokens.shape[1] - lengths
            ids = np.stack([np.roll(*row) for row in zip(ids, moves, strict=True)])
            mask = mask[:, ::-1]
        got = np.asarray(call(model, jnp.asarray(ids), jnp.asarray(mask), images))
        for i in range(len(tokens)):
            want = recordings.arrays()[f"logits{i}"]
            np.testing.assert_allclose(got[i][mask[i]], want, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_greedy_texts_of_a_ragged_batch(decoder, images):
    """Token by token those of transformers, which has each prompt by itself."""
    tokens, lengths = tiny.batch()
    arguments = {"max_new_tokens": tiny.NEW, "lengths": lengths, "images": images}
    want = np.stack([recordings.arrays()[f"greedy{i}"] for i in range(len(tokens))])
    np.testing.assert_array_equal(models.generate(decoder, tokens, **arguments), want)


@pytest.mark.slow
def test_prompts_in_parts(decoder, images):
    """A few prompts at a time, each part with its own images."""
    tokens, lengths = tiny.batch()
    arguments = {"max_new_tokens": tiny.NEW, "lengths": lengths, "images": images}
    want = np.stack([recordings.arrays()[f"greedy{i}"] for i in range(len(tokens))])
    for size in (1, 2):
        parts = models.generate(decoder, tokens, prefill_batch_size=size, **arguments)
        np.testing.assert_array_equal(parts, want)


def test_session_and_prefill_logits(decoder, images):
    tokens, lengths = tiny.batch()
    session = models.start(decoder, tokens, max_length=64, lengths=lengths, images=images)
    for i, length in enumerate(lengths):
        want = recordings.arrays()[f"logits{i}"][length - 1]
        np.testing.assert_allclose(session.logits[i], want, rtol=0, atol=TOLERANCE)


def test_the_text_model_is_a_gemma_3(model, decoder):
    jax.tree.map(np.testing.assert_array_equal, models.unstack(model), decoder)
    assert decoder.config.family == "gemma3_text"


@pytest.mark.slow
def test_without_images_nothing_changes(tmp_path, model, decoder):
    """A text model from files of its own has the same bits, through caches and without."""
    models.save(model, tmp_path)
    assert models.read_config(tmp_path)["architectures"] == ["Gemma3ForCausalLM"]
    prompt = np.array([tiny.PROMPTS[2]])
    sessions = [
        models.start(x, prompt, max_length=64) for x in (decoder, models.load_decoder(tmp_path))
    ]
    np.testing.assert_array_equal(*(x.logits for x in sessions))
    np.testing.assert_array_equal(*(x.step([7]).logits for x in sessions))
    new = models.generate(decoder, prompt, max_new_tokens=tiny.NEW)
    np.testing.assert_array_equal(new[0], recordings.arrays()["greedy2"])


def _check_close(decoder, images, name):
    """Logits after the prompts and after some steps, beside those of exact caches."""
    tokens, lengths = tiny.batch()
    kind = cache_by_name(name, decoder.config.num_kv_heads)
    found = []
    # What stands in padding is no image.
    tokens[-1, -1] = tiny.IMAGE
    for cache in ("exact", kind):
        session = models.start(
            decoder, tokens, max_length=64, lengths=lengths, images=images, cache=cache
        )
        logits = [session.logits]
        for step in np.array([[5, 6, 7], [8, 9, 10]]):
            session = session.step(step)
            logits.append(session.logits)
        found.append(np.stack(logits))
    exact, got = found
    np.testing.assert_allclose(got[0], exact[0], rtol=0, atol=TOLERANCE)
    # The logits are those of random weights, whose attention is peaked: two bits are far off.
    least = 0.6 if name in ("2bit", "2/4bit", "3bit") else 0.9
    for row in range(3):
        one, other = got[1:, row].ravel(), exact[1:, row].ravel()
        assert one @ other / np.sqrt((one @ one) * (other @ other)) > least, name


USUAL = ("kv4", "4bit", "turbo4")


@pytest.mark.fuzz
@pytest.mark.parametrize("name", USUAL)
def test_usual_caches(decoder, images, name):
    """Prompts attend exactly, whatever the cache; what it holds of them is close."""
    _check_close(decoder, images, name)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", sorted({*CACHE_NAMES} - {*USUAL, "exact"}))
def test_other_caches(decoder, images, name):
    _check_close(decoder, images, name)


def _losses(graph, state, vision, tokens, pixels):
    model = nnx.merge(graph, state)
    logits = model(tokens, images=vision.with_pixels(pixels))[:, :-1]
    picked = jnp.take_along_axis(
        jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1, mode="clip"
    )
    text = (tokens[:, 1:] != vision.config.image_token_id).astype(jnp.float32)
    return -jnp.sum(picked[..., 0] * text) / jnp.sum(text)


@pytest.mark.fuzz
def test_gradients_are_those_of_transformers(model, vision):
    """Of the text tokens' loss, by weights of text model, projector and tower."""
    graph, state = nnx.split(model)
    pixels = jnp.asarray(recordings.arrays()["pixels"][tiny.OF_PROMPTS[0]])
    tokens = jnp.asarray([tiny.PROMPTS[0]])
    differentiate = jax.jit(jax.value_and_grad(_losses, argnums=(1, 2)), static_argnums=0)
    loss, (of_text, of_vision) = differentiate(graph, state, vision, tokens, pixels)
    np.testing.assert_allclose(loss, recordings.arrays()["loss"], rtol=1e-5)
    found = {f"model.{name}": x for name, x in to_tensors(of_vision).items()}
    for name, x in to_hf_tensors(nnx.merge(graph, of_text)).items():
        found[name.replace("model.", "model.language_model.", 1)] = x
    for name in recordings.DIFFERENTIATED:
        want = recordings.arrays()[f"d {name}"]
        error = np.abs(np.asarray(found[name]) - want).max() / np.abs(want).max()
        assert error < 2e-4, name


@pytest.mark.slow
def test_the_tower_is_exported(vision):
    """With its configuration, and with any number of images."""
    pytest.importorskip("flatbuffers")
    number = export.symbolic_shape("n")[0]
    pixels = jax.ShapeDtypeStruct((number, 24, 24, 3), jnp.float32)
    whole = export.export(jax.jit(lambda v, x: v(x)))(vision, pixels)
    found = export.deserialize(whole.serialize())
    got = found.call(vision, jnp.asarray(recordings.arrays()["pixels"]))
    np.testing.assert_allclose(got, recordings.arrays()["soft"], rtol=0, atol=2e-5)


class _Letters:
    """Letters are their numbers in the alphabet, and special texts single tokens."""

    special: ClassVar = {"<start_of_image>": 61, "<image_soft_token>": 64, "<end_of_image>": 62}
    special_tokens: ClassVar = {"boi_token": "<start_of_image>"}

    def encode(self, text, *, add_special_tokens=True):
        pieces = re.findall("|".join([*self.special, "(?s:.)"]), text)
        return [2] * add_special_tokens + [
            self.special[x] if x in self.special else ord(x) % 32 for x in pieces
        ]


def test_prompts_of_texts(vision, monkeypatch):
    """What the processor of transformers writes for an image: line breaks on either side."""
    one = [10, 10, 61, *[64] * 9, 62, 10, 10]
    tokens = models.image_prompt(_Letters(), "a<start_of_image>b<start_of_image>", vision.config)
    assert tokens == [2, 1, *one, 2, *one]
    alone = models.image_prompt(_Letters(), "ab", vision.config, add_special_tokens=False)
    assert alone == [1, 2]
    with pytest.raises(ValueError, match="text must not hold '<image_soft_token>'"):
        models.image_prompt(_Letters(), "<image_soft_token>", vision.config)
    monkeypatch.setattr(_Letters, "special", {})
    with pytest.raises(ValueError, match="must have the token 61, as config.json says, for '<sta"):
        models.image_prompt(_Letters(), "<start_of_image>", vision.config)


def test_the_published_file():
    """Of google/gemma-3-4b-it: text model and tower have 4,300,079,472 numbers together."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"model_type": "gemma3_text", "sliding_window": 1024}
    text["rope_scaling"] = {"factor": 8.0, "rope_type": "linear"}
    tower = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27}
    tower |= {"model_type": "siglip_vision_model", "image_size": 896, "patch_size": 14}
    tower |= {"num_attention_heads": 16, "vision_use_head": False}
    file = {**tiny.config(), "text_config": text, "vision_config": tower}
    for key in ("boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image"):
        del file[key]
    config, vision = models.TransformerConfig.from_hf(file), models.VisionConfig.from_hf(file)
    shapes = expected_shapes(vision).values()
    assert config.num_parameters + sum(map(math.prod, shapes)) == 4_300_079_472
    assert config.local_windows[:6] == (1024, 1024, 1024, 1024, 1024, None)
    assert (vision.tokens_per_image, vision.patches_per_side) == (256, 64)
    tokens = (vision.begin_token_id, vision.end_token_id, vision.image_token_id)
    assert tokens == (255999, 256000, 262144)


def test_prompts_of_conversations(tmp_path, vision):
    """Images are those of the template; what a user says is none, or is refused."""
    tiny.write_tokenizer(tmp_path)
    tokenizer = models.JsonTokenizer(tmp_path)

    def tokens(*said, **options):
        content = [{"type": "text", "text": x} if x else {"type": "image"} for x in said]
        messages = [{"role": "user", "content": content}]
        return models.chat_tokens(tokenizer, messages, images=vision.config, **options)

    image = [tiny.BEGIN, *[tiny.IMAGE] * tiny.TOKENS, tiny.END]
    assert tokens(None, "what", None) == tokens(None, "what", None, allow_special=True)
    assert tokens(None, "what", None) == [2, *image, 3, *image]
    with pytest.raises(ValueError, match="a message is written like a special token"):
        tokens(None, "<start_of_image>")
    assert tokens("<start_of_image>", allow_special=True) == [2, *image]


@pytest.mark.slow
def test_bfloat16_is_close(folder, vision):
    """A tower in 16 bits: 2 layers, each sum some units of 2**-9 off."""
    low = models.load_vision(folder, dtype="bfloat16")
    exact = recordings.arrays()["soft"]
    got = np.asarray(low.images(tiny.images()).embeddings, np.float32)
    assert np.linalg.norm(got - exact) / np.linalg.norm(exact) < 16 * 2.0**-9


def test_files_of_all_versions(tmp_path, vision):
    for kind in tiny.KINDS:
        more = {"vision_tower.head.probe": np.zeros((1, 1, 36), np.float32)}
        found = models.load_vision(tiny.write(tmp_path / kind, kind, more=more))
        jax.tree.map(np.testing.assert_array_equal, found, vision)


def test_saved_beside_another_model(tmp_path, model, vision):
    models.save(model, tmp_path)
    models.save_vision(vision, tmp_path / "vision")
    found = models.load_vision(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, found, vision)
    assert found.config == vision.config
    assert found.preprocessing == vision.preprocessing
    half = models.load_vision(tmp_path, dtype="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(half)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.slow
@pytest.mark.mesh
def test_over_a_mesh(decoder, images):
    """Sequences and heads over devices: each has its prompts' images, in parts and at once."""
    tokens, lengths = (np.concatenate([x, x[:1]]) for x in tiny.batch())
    again = jnp.concatenate([images.embeddings, images.embeddings[:2]])
    options = {"max_length": 64, "lengths": lengths, "cache": "exact"}
    options["images"] = dataclasses.replace(images, embeddings=again)
    want = models.start(decoder, tokens, **options).logits
    axes = Axes.of(jax.make_mesh((2, 2), ("data", "model")))
    split = models.shard(decoder, axes)
    for size in (None, 2):
        got = models.start(split, tokens, prefill_batch_size=size, **options)
        np.testing.assert_allclose(got.logits, want, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_int4_text_model_with_images(decoder, images):
    """The text model is rounded, the tower is not."""
    rounded = models.quantize_model(
        decoder, smoothing=models.quantize.Smoothing(rpn=False, crs=False)
    )
    tokens, lengths = tiny.batch()
    options = {"max_length": 64, "lengths": lengths, "images": images}
    exact, got = (models.start(x, tokens, **options).logits for x in (decoder, rounded))
    assert np.corrcoef(np.ravel(exact), np.ravel(got))[0, 1] > 0.8


REFUSED = {
    NotImplementedError: [
        ({"tower": {"hidden_act": "gelu"}}, "vision_config: hidden_act='g"),
        ({"tower": {"model_type": "clip"}}, "model_type='clip' is not sup"),
        ({"tower": {"new_idea": 1}}, "vision_config: new_idea=1 is not"),
        (
            {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
            "'LlamaForCausalLM'. has no images here: must be 'Gemma3ForCond",
        ),
    ],
    ValueError: [
        ({"tower": {"num_attention_heads": 5}}, "hidden_size=36 must be a multiple"),
        ({"tower": {"image_size": 26}}, "image_size=26 must be a multiple of patch"),
        ({"tower": {"patch_size": 0}}, "patch_size=0 must be an integer of at leas"),
        ({"mm_tokens_per_image": 8}, "mm_tokens_per_image=8 must be a square numbe"),
        ({"mm_tokens_per_image": 16}, "divides the 6 patches of a side"),
        ({"vision_config": None}, "vision_config=None must be an object"),
        ({"image_token_index": -1}, "image_token_index=-1 must be an integer"),
    ],
}


class TestRefused:
    @pytest.mark.parametrize(("kind", "keys", "message"), cases(REFUSED))
    def test_config(self, kind, keys, message):
        with pytest.raises(kind, match=message):
            models.VisionConfig.from_hf(tiny.config(**keys))

    @pytest.mark.parametrize(
        ("name", "shape", "message"),
        [
            (
                "vision_tower.vision_model.post_layernorm.bias",
                None,
                "lacks vision_tower.post_layer",
            ),
            ("multi_modal_projector.mm_soft_emb_norm.weight", (35,), "shape .35,., must be .36,."),
            (
                "vision_tower.vision_model.extra.weight",
                (2,),
                "unexpected tensors: vision_tower.ext",
            ),
            (
                "vision_tower.vision_model.encoder.layers.1.mlp.fc1.bias",
                None,
                "lacks vision_tower.encoder.layers.1.mlp.fc1.bias",
            ),
        ],
    )
    def test_tensors(self, tmp_path, name, shape, message):
        more = {name: None if shape is None else np.zeros(shape, np.float32)}
        with pytest.raises(ValueError, match=message):
            models.load_vision(tiny.write(tmp_path, more=more))

    @pytest.mark.parametrize(
        ("keys", "kind", "message"),
        [
            (
                {"do_pan_and_scan": True},
                NotImplementedError,
                "do_pan_and_scan=True is not supported",
            ),
            ({"resample": 3}, NotImplementedError, "resample=3 is not supported: must be 2"),
            ({"do_resize": False}, NotImplementedError, "do_resize=False is not supported"),
            ({"size": {"height": 9, "width": 9}}, ValueError, "must be the tower's image_size=24"),
            ({"image_std": [0.5, 0.5]}, ValueError, "image_std=.0.5, 0.5. must be three numbers"),
            ({"image_std": [0.5, 0.5, 0]}, ValueError, "image_std.* must not hold 0"),
            ({"rescale_factor": "a"}, ValueError, "rescale_factor='a' must be positive"),
        ],
    )
    def test_preprocessing(self, tmp_path, keys, kind, message):
        tiny.write(tmp_path)
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(keys), encoding="utf-8")
        with pytest.raises(kind, match=message):
            models.load_vision(tmp_path)

    def test_images(self, vision, monkeypatch):
        with pytest.raises(TypeError, match="dtype float64 must be uint8"):
            vision.images([np.zeros((24, 24, 3))])
        with pytest.raises(ValueError, match=r"shape \(24, 24\) must be \[H, W, 3\]"):
            vision.images([np.zeros((24, 24), np.uint8)])
        with pytest.raises(ValueError, match="images must hold at least one"):
            vision.images([])
        with pytest.raises(ValueError, match=r"pixels.shape=\(1, 24, 24, 4\) must be \[n, 24"):
            vision(jnp.zeros((1, 24, 24, 4)))
        monkeypatch.setitem(__import__("sys").modules, "PIL", None)
        with pytest.raises(ImportError, match="needs the package pillow: pip install 'pillow"):
            Preprocessing().pixels(np.zeros((9, 9, 3), np.uint8), 24)
        assert Preprocessing().pixels(np.zeros((24, 24, 3), np.uint8), 24).min() == -1

    def test_prompts(self, decoder, images):
        tokens, lengths = tiny.batch()

        def start(tokens, images=images, **options):
            models.start(decoder, tokens, max_length=64, lengths=lengths, images=images, **options)

        with pytest.raises(ValueError, match="hold 27 tokens 64, must hold 18: 9 for each of 2 im"):
            start(tokens, of_prompt(images, 0))
        moved = tokens.copy()
        moved[0, 4], moved[0, 0] = 5, tiny.IMAGE
        with pytest.raises(ValueError, match="hold 1 tokens 64 in a row, must hold 9"):
            start(moved)
        with pytest.raises(ValueError, match=r"within 0..63"):
            start(tokens, None)
        with pytest.raises(TypeError, match="images is a ndarray, must be Images"):
            start(tokens, np.zeros((3, 9, 32)))
        narrow = dataclasses.replace(images, embeddings=images.embeddings[..., :8])
        with pytest.raises(ValueError, match=r"\(3, 9, 8\) must be \[n, M, 32\]"):
            start(tokens, narrow)
        with pytest.raises(NotImplementedError, match="cudnn: it has no key_bounds, which prompts"):
            start(tokens, implementation="cudnn")
        with pytest.raises(ValueError, match="implementation='triton' must be None or one of"):
            start(tokens, implementation="triton")
        pooled = models.pooled_by_name("window", window=1024)
        with pytest.raises(NotImplementedError, match="pooled_prefill must be None with images"):
            start(tokens, pooled_prefill=pooled)

    def test_forward(self, model, images):
        tokens = jnp.asarray([tiny.PROMPTS[0]])
        first = of_prompt(images, 0)
        with pytest.raises(ValueError, match="images have no use with another attend"):
            model(tokens, images=first, attend=lambda *x: x)
        with pytest.raises(ValueError, match="caches must be None with images"):
            model(tokens, images=first, caches=jnp.zeros((3, 1)))
        with pytest.raises(ValueError, match="must hold 9: 9 for each of 1 images"):
            model(tokens, images=of_prompt(images, 1))
