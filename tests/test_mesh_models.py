"""Decoders over a mesh give what they give on one device: logits, tokens, with two sums a layer."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from turbojax import models
from turbojax.kv import causal_attention
from turbojax.models.generation.steps import decode_step, run_prompts
from turbojax.models.tensor_parallel import layout, vocabulary
from turbojax.models.tensor_parallel.programs import on_mesh
from turbojax.parallel import Axes

pytestmark = pytest.mark.mesh

TINY = models.SHAPES["tiny"]
LAYERS, VOCAB = TINY.num_layers, TINY.vocab_size
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (4, 12))
LENGTHS = np.array([12, 5, 7, 9], np.int32)
# A sum of so many numbers in another order, once for each of these places of the model.
BOUND = (2 * LAYERS + 1) * TINY.intermediate_size * 2.0**-24


def axes_of(data: int, model: int) -> Axes:
    return Axes.of(jax.make_mesh((data, model), ("data", "model")))


@functools.cache
def decoder(dtype: str = "float32") -> models.Decoder:
    plain = models.random_decoder(TINY, dtype=dtype)
    # Norms that are not all 1.
    return dataclasses.replace(plain, norm=plain.norm + jnp.linspace(0, 1, 64, dtype=dtype))


def relative(got, want) -> float:
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def session(model, cache="exact"):
    """After prompts of two sequences of each device at a time, and one more token."""
    started = models.start(
        model, TOKENS, max_length=16, lengths=LENGTHS, cache=cache, prefill_batch_size=2
    )
    first = started.logits
    return first, started.step(np.array([3, 1, 4, 1])).logits


@functools.cache
def of_one_device(dtype: str = "float32"):
    return session(decoder(dtype))


# (1, 4) has two KV heads for four devices: its sequence's axis has two of them.
@pytest.mark.parametrize("shape", [(1, 2), (2, 2), (1, 4)])
@pytest.mark.quick(first=1)
def test_logits_are_those_of_one_device(shape):
    split = models.shard(decoder(), axes_of(*shape))
    for got, want in zip(session(split), of_one_device(), strict=True):
        assert got.shape == want.shape
        assert relative(got, want) < BOUND


@pytest.mark.slow
def test_bfloat16_is_as_near_as_one_device():
    exact = of_one_device()
    split = session(models.shard(decoder("bfloat16"), axes_of(2, 2)))
    for got, plain, want in zip(split, of_one_device("bfloat16"), exact, strict=True):
        assert relative(got, want) < 2 * relative(plain, want)


def test_a_step_has_two_sums_a_layer_and_one_more():
    split = models.shard(decoder(), axes_of(1, 2))
    caches = jax.eval_shape(lambda: models.init_caches(decoder(), 4, 16, "exact"))
    rows = jnp.zeros(4, jnp.int32)
    step = jax.make_jaxpr(functools.partial(decode_step, implementation=None))
    prompts = functools.partial(run_prompts, implementation=None, pooled=None)
    for program in (
        step(split, caches, rows, rows),
        jax.make_jaxpr(prompts)(split, caches, jnp.asarray(TOKENS, jnp.int32), rows, rows[0]),
    ):
        found = collections.Counter(collectives(program.jaxpr))
        assert found == {"psum": 2 * LAYERS + 1, "all_gather": 1}
    compiled = decode_step.lower(split, *(caches, rows, rows), implementation=None).compile()
    text = compiled.as_text()
    assert text.count(" all-reduce(") == 2 * LAYERS + 1
    assert text.count(" all-gather(") == 1
    assert "all-to-all" not in text
    assert "collective-permute" not in text


def collectives(jaxpr):
    """Names of all collectives, those of called functions too."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in ("psum", "psum_invariant", "all_gather", "ppermute", "all_to_all", "pmax"):
            yield name.removesuffix("_invariant")
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from collectives(inner)


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "shape"), [("kv4", (1, 4)), ("paged", (2, 2))])
def test_other_caches_give_the_same_tokens(cache, shape):
    given = {"max_new_tokens": 4, "lengths": LENGTHS, "cache": cache}
    want = models.generate(decoder(), TOKENS, **given)
    got = models.generate(models.shard(decoder(), axes_of(*shape)), TOKENS, **given)
    assert np.array_equal(got, want)


@pytest.mark.slow
def test_the_embedded_model_says_the_same():
    embedded = models.load_decoder(models.embedded_path())
    tokens = np.frombuffer(b"The house stood in ", np.uint8)[None]
    want = models.generate(embedded, tokens, max_new_tokens=16)
    got = models.generate(models.shard(embedded, axes_of(1, 2)), tokens, max_new_tokens=16)
    assert np.array_equal(got, want)


def test_tokens_and_vocabularies_that_do_not_divide():
    """33 tokens on two devices: 17 and 16. A token that is none gives NaN, as on one device."""
    config = dataclasses.replace(TINY, vocab_size=33, num_layers=1, intermediate_size=95)
    one = models.random_decoder(config, dtype="float32")
    split = models.shard(one, axes_of(1, 2))
    assert split.embedding.shape == (34, 64)
    assert split.layers[0]["mlp"]["down_proj"]["kernel"].shape == (96, 64)
    stored = layout.stored_config(config, split.axes)
    assert (stored.vocab_size, stored.intermediate_size) == (34, 96)
    tokens = jnp.array([[0, 16, 17, 32], [1, 2, 33, 5], [-1, 3, 4, 31]])
    positions = jnp.broadcast_to(jnp.arange(4)[None], tokens.shape)

    def logits(model, tokens, positions):
        hidden, _ = model.hidden(tokens, positions, causal_attention, (None,))
        return model.logits(hidden), vocabulary.greedy(model.local_logits(hidden), model.axes)

    want, likeliest = jax.jit(logits)(one, tokens, positions)
    specs = ((P(), P()), (P(), P()))
    run = jax.jit(lambda model, *arrays: on_mesh(logits, model, *specs)(*arrays))
    got, same = run(split, tokens, positions)
    assert np.array_equal(np.isnan(got), np.isnan(want))
    assert relative(np.nan_to_num(got), np.nan_to_num(want)) < BOUND
    assert np.array_equal(same, likeliest)
    assert same.dtype == likeliest.dtype == jnp.int32


def test_more_devices_than_kv_heads_go_to_the_sequence():
    axes = layout.axes_of_model(TINY, axes_of(2, 4))
    assert dict(axes.mesh.shape) == {"data": 2, "model": 2, "sequence": 2}
    assert (axes.heads, axes.sequence) == (("model",), ("sequence",))
    assert list(axes.mesh.devices.flat) == list(axes_of(2, 4).mesh.devices.flat)
    three = jax.make_mesh((2, 1, 4), ("sequence", "data", "model"))
    axes = layout.axes_of_model(dataclasses.replace(TINY, num_heads=8), Axes.of(three))
    assert dict(axes.mesh.shape) == {"data": 1, "model": 2, "sequence": 4}
    assert len({device.id for device in axes.mesh.devices.flat}) == 8
    specs = models.partition_specs(decoder(), axes).layers[0]
    both = ("model", "sequence")
    assert specs["attention"]["q_proj"]["kernel"] == P(None, both)
    assert specs["attention"]["k_proj"]["kernel"] == P(None, "model")
    assert specs["mlp"]["down_proj"]["kernel"] == P(both, None)
    assert specs["mlp_norm"]["scale"] == P()


def test_what_cannot_be_split_is_named():
    three = Axes.of(jax.make_mesh((3,), ("model",)))
    with pytest.raises(ValueError, match=r"num_heads=4 must be a multiple of 3, .*\('model',\)"):
        models.shard(decoder(), three)
    heads = dataclasses.replace(TINY, num_heads=6, num_kv_heads=3)
    with pytest.raises(ValueError, match="num_kv_heads=3 must be a multiple of 2"):
        layout.check_axes(heads, axes_of(1, 2))
    both = Axes.of(jax.make_mesh((1, 2), ("model", "sequence")))
    with pytest.raises(NotImplementedError, match="num_kv_heads=2: a device must have one"):
        layout.check_axes(TINY, both)
    split = models.shard(decoder(), axes_of(2, 2))
    with pytest.raises(ValueError, match="must be None: it is split already"):
        models.shard(split, split.axes)
    with pytest.raises(ValueError, match="3 sequences must be a multiple of 2"):
        models.start(split, TOKENS[:3], max_length=16)
