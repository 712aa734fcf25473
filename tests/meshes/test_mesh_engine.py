"""An engine on several devices: texts, programs, pages, and what travels between the devices."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from tests.models.test_latent_models import CONFIG as LATENT
from tests.serving import engine_helpers
from tests.serving.engine_helpers import TINY, requests_of
from turbojax import models
from turbojax.models import Draft, NGram, Penalties, Replicas, Request, Sampling
from turbojax.models.engine import placement
from turbojax.models.engine.step import idle_work, run_step
from turbojax.models.generation.sampling import NOTHING, sample, sampling_rows
from turbojax.models.tensor_parallel.placing import shard
from turbojax.parallel import Axes

pytestmark = pytest.mark.mesh

PROMPTS = [[5, 9, 3 + i, *range(10, 10 + 7 * i)] for i in range(6)]
WANTED = [
    Request(PROMPTS[0], 24),
    Request(PROMPTS[1], 24, sampling=Sampling(temperature=0.8, seed=1)),
    Request(PROMPTS[2], 24, sampling=Sampling(temperature=0.8, seed=2, top_k=9)),
    Request(PROMPTS[3], 24, logprobs=3, penalties=Penalties(frequency=0.5)),
    Request(PROMPTS[4], 24),
]


def make(model, **options):
    """One program for all steps, which is quickly compiled."""
    return engine_helpers.make(model, **{"reproducible": True, **options})


def axes_of(**sizes):
    shape = tuple(sizes.values())
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return Axes.of(Mesh(devices, tuple(sizes)))


@pytest.fixture(scope="module")
def model():
    return models.random_decoder(TINY, dtype=jnp.float32)


def texts_of(made, wanted=WANTED):
    numbers = [made.add(request) for request in wanted]
    results = made.run()
    return [results[number] for number in numbers]


@pytest.fixture(scope="module")
def alone(model):
    return texts_of(make(model))


def is_alike(results, wanted):
    """Whether texts are the same: other orders of sums are far less than what tokens differ by."""
    if [x.tokens for x in results] != [x.tokens for x in wanted]:
        return False
    for result, other in zip(results, wanted, strict=True):
        for mine, theirs in zip(result.logprobs or (), other.logprobs or (), strict=True):
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
            np.testing.assert_allclose(mine.logprob, theirs.logprob, rtol=1e-4)
    return True


# Two devices have a KV head each; of four, two and two have the same one and other queries.
@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("count", [2, 4])
def test_texts_are_those_of_one_device(model, alone, count):
    made = make(shard(model, axes_of(model=count)))
    assert is_alike(texts_of(made), alone)
    [whole, *_] = made._device.caches
    assert whole.key.addressable_shards[0].data.shape[1] == whole.key.shape[1] // 2
    assert made._device._state.tables.is_fully_replicated
    assert len(made._device._state.tables.devices()) == count


def test_pages_come_back_from_the_host_with_the_same_bits(model):
    part = shard(model, axes_of(model=2))
    wanted = requests_of([x[:4] for x in PROMPTS], 0.0)
    expected = texts_of(make(part), wanted)
    made = make(part, num_pages=5)
    assert [x.tokens for x in texts_of(made, wanted)] == [x.tokens for x in expected]
    assert made.statistics().swaps


def test_a_step_sums_twice_a_layer_and_gathers_two_numbers_a_row(model):
    part = shard(model, axes_of(model=2))
    made = make(part)
    device = made._device
    [program] = device.programs.prompts
    packed = idle_work(program, 4).packed()
    static = device.programs.static_of(program)
    text = run_step.lower(part, device.caches, device._state, packed, **static).compile().as_text()
    found = re.findall(r" (all-reduce|all-gather|all-to-all|collective-permute)[-(]", text)
    assert found.count("all-reduce") == 2 * TINY.num_layers + 1
    assert found.count("all-gather") == 1
    assert len(found) == 2 * TINY.num_layers + 2
    rows = program.rows + program.pieces
    assert re.search(rf"s32\[2,2,{rows}\]\S* all-gather", text)


def test_the_likeliest_token_is_that_of_the_whole_row():
    vocabulary = placement.Vocabulary(13, axes_of(model=4))
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((9, 13)).astype(np.float32)
    logits[1, 3] = logits[1, 11] = 9.0  # the first of equals
    logits[2, 12], logits[3, 0], logits[4, 5] = np.nan, np.nan, np.inf
    logits[5] = -np.inf
    logits[6, 12] = 8.0
    padded = np.pad(logits, ((0, 0), (0, vocabulary.padded - 13)), constant_values=-np.inf)
    rows = sampling_rows([Sampling(temperature=0.7, seed=i) for i in range(9)], 0)
    for kind in ("greedy", "draw"):
        run = placement.run_on(
            lambda x, kind=kind: vocabulary.sample(x, rows, kind),
            vocabulary.axes,
            (vocabulary.spec(2),),
            placement.SAME,
        )
        np.testing.assert_array_equal(jax.jit(run)(padded), sample(logits, rows, kind))
    assert NOTHING in np.asarray(jax.jit(run)(padded))


@pytest.mark.slow
def test_replicas_of_several_devices_each(model, alone):
    axes = axes_of(data=2, model=2)
    parts = models.replicate(model, axes)
    split_already = shard(model, axes)
    again = models.replicate(split_already)
    for part, other in zip(parts, again, strict=True):
        assert part.axes == other.axes
        for x, y in zip(jax.tree.leaves(part), jax.tree.leaves(other), strict=True):
            assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
            np.testing.assert_array_equal(x, y)
    made = Replicas([make(part) for part in again])
    assert is_alike(texts_of(made), alone)
    assert all(part.finished for part in made.statistics_of_each())
    with pytest.raises(ValueError, match=r"one part of the axes \('data',\), of which there are 2"):
        make(split_already)
    with pytest.raises(ValueError, match="must be left out"):
        models.replicate(split_already, axes_of(data=2))


@pytest.mark.fuzz
@pytest.mark.parametrize(
    "kind",
    ["int4", "latent", "windows", "turbo4", "ngram", "draft", "together", "padded vocabulary"],
)
def test_other_models_and_settings(model, kind):
    options, config = {}, TINY
    if kind == "latent":
        config = dataclasses.replace(LATENT, max_length=128)
    elif kind == "windows":
        config = dataclasses.replace(TINY, local_windows=(20, None))
    elif kind == "padded vocabulary":
        config = dataclasses.replace(TINY, vocab_size=95)
    elif kind == "turbo4":
        options = {"kv_dtype": "turbo4"}
    elif kind in ("ngram", "draft", "together"):
        options = {"reproducible": False, "max_sequences": 2, "step_tokens": 16}
    whole = models.random_decoder(config, dtype=jnp.float32)
    if kind == "int4":
        # Tokens in e4m3 have a scale on each device, and other roundings than on one.
        whole = models.random_quantized_decoder(config, dtype=jnp.float32)
        whole = whole.with_activations("bf16")
    wanted = [x for x in WANTED if max(x.tokens) < config.vocab_size]
    if kind == "together":
        options["tokens_together"] = 3
    if kind in ("ngram", "draft", "together"):
        wanted = wanted[:2]

    def texts(part):
        how = {"ngram": NGram(2, shortest=1), "draft": Draft(part, 2)}.get(kind)
        made = make(part, speculation=how, **options)
        if how is not None and part.axes is not None:
            made.compile()
        results = texts_of(made, wanted)
        counts = made.statistics()
        assert (how is None) == (counts.proposed_tokens == 0)
        if how is not None and part.axes is not None:
            # What was compiled ahead is what steps run, on whatever mesh.
            assert counts.first_step_seconds == 0
        return results

    assert is_alike(texts(shard(whole, axes_of(model=2))), texts(whole))
