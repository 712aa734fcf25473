"""Decoders over a mesh give what they give on one device: logits, tokens, with two sums a layer."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from turbojax import TurboConfig, models
from turbojax.caches import PagedLayer, causal_attention, init_layer_cache, kind_of
from turbojax.caches.comparison import Kivi
from turbojax.models.generation.saving import save_cache
from turbojax.models.generation.steps import decode_step, run_prompts
from turbojax.models.tensor_parallel import layout, programs, storing
from turbojax.models.tensor_parallel.programs import on_mesh
from turbojax.parallel import Axes
from turbojax.smoothing import Smoothing

pytestmark = pytest.mark.mesh

TINY = models.SHAPES["tiny"]
GEAR = Kivi(group_size=4, residual_length=4, rank=1)
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


def test_options_of_the_compiler_are_those_of_split_steps_alone(monkeypatch):
    """Where a step is a program by itself; what XLA does not know is left out."""
    assert programs.accepted_options({"no_such_option": True}) is None
    options = programs.accepted_options(programs._FOR_STEPS)
    assert options == programs._FOR_STEPS
    monkeypatch.setattr(programs, "_options_of_steps", lambda: options)
    run = programs.StepProgram(lambda decoder, x: decoder.norm[0] + x)
    split, one = models.shard(decoder(), axes_of(1, 2)), jnp.float32(1)
    assert run._of(decoder()) is run._plain
    assert run._of(split) is run._split is not run._plain
    assert run(split, one) == run(decoder(), one) == jax.jit(run)(split, one)


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


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(("cache", "shape"), [("kv4", (1, 4)), ("paged", (2, 2)), (GEAR, (2, 2))])
def test_other_caches_give_the_same_tokens(cache, shape):
    given = {"max_new_tokens": 4, "lengths": LENGTHS, "cache": cache}
    want = models.generate(decoder(), TOKENS, **given)
    got = models.generate(models.shard(decoder(), axes_of(*shape)), TOKENS, **given)
    assert np.array_equal(got, want)


STORED = {
    "pages": ("turbo4", (2, 2)),
    "pages-slots": ("turbo4", (1, 4)),
    "4bit-heads": (TurboConfig(block_kv=16, buffer_size=16), (2, 2)),
    "4bit-slots": (TurboConfig(block_kv=16, buffer_size=16), (1, 4)),
}


@pytest.mark.parametrize("name", STORED)
def test_caches_are_split_as_they_are_made_over_a_mesh(tmp_path, name):
    cache, shape = STORED[name]
    axes = layout.axes_of_model(TINY, axes_of(*shape))
    sizes = (4, 128, 2, 16)
    # All numbers are others, but for those that count tokens, heads and pages.
    one = jax.tree.map(
        lambda x: x if x.dtype in (jnp.int32, bool) else jnp.arange(x.size).reshape(x.shape),
        init_layer_cache(*sizes, kind=cache),
    )
    split, made = storing.split(one, axes), init_layer_cache(*sizes, kind=cache, axes=axes)
    for x, y in zip(jax.tree.leaves(split), jax.tree.leaves(made), strict=True):
        assert x.shape == y.shape
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
    if isinstance(one, PagedLayer):
        assert np.array_equal(split.block_tables, made.block_tables)
        last = split.pages.key.addressable_shards[-1]
        own = last.data[np.asarray(split.block_tables)[-1, -1]]
        assert np.array_equal(own, one.pages.key[-1, 1:])
    with pytest.raises(ValueError, match="own pages|head_slots|permutations"):
        save_cache(tmp_path / "cache", made)
    # Pages may lie elsewhere.
    rows = [kind_of(one).to_rows(x) for x in (storing.joined(split, axes), one)]
    for x, y in zip(*map(jax.tree.leaves, rows), strict=True):
        assert np.array_equal(x, y)


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", STORED)
def test_sessions_are_stored_as_one_device_has_them(tmp_path, name):
    """Files of one device go on over a mesh, and those of a mesh on one device and over it."""
    cache, shape = STORED[name]
    one = decoder()
    split = models.shard(one, axes_of(*shape))
    given = {"max_length": 64, "lengths": np.array([36, 5, 17, 30], np.int32), "cache": cache}
    tokens = []
    for model, path in ((one, tmp_path / "one"), (split, tmp_path / "split")):
        session = models.start(model, np.tile(TOKENS, 3), **given)
        models.save_session(path, session)
        tokens.append(np.stack(list(models.stream(session, 4))))
    for path, model in (("split", one), ("one", split), ("split", split)):
        session, _ = models.load_session(tmp_path / path, model)
        tokens.append(np.stack(list(models.stream(session, 4))))
    for got in tokens[1:]:
        assert np.array_equal(got, tokens[0])


def test_sessions_that_cannot_be_split_are_refused(tmp_path):
    three = np.tile(TOKENS[:3], 3)
    models.save_session(tmp_path / "three", models.start(decoder(), three, max_length=64))
    with pytest.raises(ValueError, match="3 sequences must be a multiple of 2"):
        models.load_session(tmp_path / "three", models.shard(decoder(), axes_of(2, 1)))


@pytest.mark.fuzz
def test_windows_over_slots():
    """Devices share a KV head's tokens; a layer with a window keeps no first ones apart."""
    config = dataclasses.replace(TINY, local_windows=(10, None))
    one = models.random_decoder(config, dtype="float32")
    given = {"max_length": 32, "lengths": LENGTHS, "cache": TurboConfig(block_q=8, block_kv=8)}
    logits = []
    for model in (one, models.shard(one, axes_of(1, 4))):
        session = models.start(model, TOKENS, **given)
        assert [c.config.num_first_tokens for c in session.caches.layers] == [0, 1]
        for token in range(8):
            session = session.step(np.full(4, token))
        logits.append(session.logits)
    assert relative(*logits) < 1e-3


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
        return model.logits(hidden), layout.likeliest(model.local_logits(hidden), model.axes)[1]

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
    plain = Smoothing(False, False, False, False)
    with pytest.raises(ValueError, match="axes=.* must be None: quantize the whole model"):
        models.quantize_model(split, smoothing=plain)


@pytest.mark.slow
def test_split_int4_weights_are_not_saved(tmp_path):
    config = dataclasses.replace(TINY, num_layers=1)
    split = models.shard(models.random_quantized_decoder(config), axes_of(1, 2))
    with pytest.raises(ValueError, match="axes=.* must be None: a device's weights"):
        models.save_quantized(split, tmp_path / "model")
