"""Padding: where it stands never changes what a prompt is continued with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models import tiny
from turbojax import models
from turbojax.models.generation.padding import align

LENGTHS, NEW = (17, 5), 6


@pytest.fixture(scope="module")
def model() -> models.Decoder:
    return models.unstack(tiny.transformer())


@pytest.fixture(scope="module")
def prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(64, size=length, dtype=np.int32) for length in LENGTHS]


def pad(prompts, before: list[int], size: int, filler: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and mask, with so much padding before each."""
    tokens, mask = (
        np.full((len(prompts), size), filler, np.int32),
        np.zeros((len(prompts), size), np.int32),
    )
    for row, (prompt, start) in enumerate(zip(prompts, before, strict=True)):
        tokens[row, start : start + len(prompt)] = prompt
        mask[row, start : start + len(prompt)] = 1
    return tokens, mask


PLACES = {
    "right": ([0, 0], 17),
    "left": ([0, 12], 17),
    "both": ([0, 3], 17),
    "more": ([2, 18], 23),
}


# The others are of the same kinds, with other numbers.
@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("cache", ["exact", "4bit", "2/4bit", "turbo4"])
def test_padding_never_changes_results(model, prompts, cache):
    kind = models.cache_by_name(cache, 2)

    def run(tokens, **options):
        return np.asarray(
            models.generate(model, jnp.asarray(tokens), max_new_tokens=NEW, cache=kind, **options)
        )

    alone = np.concatenate([run(prompt[None]) for prompt in prompts])
    # Ids beyond the vocabulary, which padding may have, do not matter either.
    for name in ("right", "left", "both", *(["more"] if cache == "exact" else [])):
        tokens, mask = pad(prompts, *PLACES[name], filler=-100)
        np.testing.assert_array_equal(run(tokens, attention_mask=mask), alone)
    tokens, _ = pad(prompts, [0, 0], 17, filler=63)
    np.testing.assert_array_equal(run(tokens, lengths=jnp.asarray(LENGTHS)), alone)


def test_padding_takes_no_room_in_the_context(model, prompts):
    tokens, mask = pad(prompts, [40, 3], 63, filler=0)
    got = models.generate(model, jnp.asarray(tokens), max_new_tokens=47, attention_mask=mask)
    tokens, _ = pad(prompts, [0, 0], 17, filler=0)
    lengths = jnp.asarray(LENGTHS)
    wanted = models.generate(model, jnp.asarray(tokens), max_new_tokens=47, lengths=lengths)
    np.testing.assert_array_equal(got, wanted)
    with pytest.raises(
        ValueError, match=r"65 tokens, 17 of the longest prompt and 48 new ones, .*"
    ):
        models.generate(model, jnp.asarray(tokens), max_new_tokens=48, lengths=lengths)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [bool, np.int64, np.float32])
def test_align(prompts, place, dtype):
    tokens, mask = pad(prompts, *PLACES[place], filler=-1)
    if dtype is np.float32:
        with pytest.raises(TypeError, match=r"attention_mask.dtype=float32 must be bool or an int"):
            align(tokens, mask.astype(dtype))
        return
    aligned, lengths = align(jnp.asarray(tokens), mask.astype(dtype))
    assert (aligned.dtype, lengths.dtype) == (jnp.int32, jnp.int32)
    assert aligned.shape == tokens.shape
    assert lengths.tolist() == list(LENGTHS)
    for row, prompt in zip(np.asarray(aligned), prompts, strict=True):
        assert row.tolist() == [*prompt.tolist(), *[0] * (len(row) - len(prompt))]


@pytest.mark.parametrize(
    ("tokens", "mask", "error", "message"),
    [
        ([[1, 2, 3]], [[1, 0, 1]], ValueError, r"rows \[0\] must not have padding between"),
        ([[1, 2], [1, 2]], [[1, 1], [0, 0]], ValueError, r"rows \[1\] must have at least one real"),
        ([[1, 2]], [[2, 1]], ValueError, "holds 2, must be 0 and 1"),
        ([[1, 2]], [[-1, 1]], ValueError, "holds -1, must be 0 and 1"),
        (
            [[1, 2]],
            [1, 1],
            ValueError,
            r"attention_mask.shape=\(2,\) must be tokens.shape=\(1, 2\)",
        ),
        ([1, 2], [1, 1], ValueError, r"tokens.shape=\(2,\) must be \[B, T\]"),
        (np.zeros((0, 3), int), np.zeros((0, 3)), ValueError, "no axis empty"),
        ([[1.0]], [[1]], TypeError, "tokens.dtype=float"),
        ([[2**40]], [[1]], ValueError, "tokens holds 1099511627776"),
    ],
)
def test_masks_that_do_not_fit(tokens, mask, error, message):
    with pytest.raises(error, match=message):
        align(np.array(tokens), np.array(mask))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[1, 2], [3]], "tokens holds lists of different lengths: pad them on the right"),
        ([], r"tokens.shape=\(0,\) must be \[B, T\], no axis empty"),
        ([[]], r"tokens.shape=\(1, 0\) must be \[B, T\], no axis empty"),
        (3, r"tokens.shape=\(\) must be"),
    ],
)
def test_prompts_that_are_no_table(model, tokens, message):
    for call in (models.generate, models.start):
        with pytest.raises(ValueError, match=message):
            call(
                model, tokens, **{"max_new_tokens" if call is models.generate else "max_length": 4}
            )


def test_lengths_and_a_mask_are_one_too_many(model):
    tokens, mask = jnp.ones((1, 4), jnp.int32), np.ones((1, 4), bool)
    with pytest.raises(ValueError, match="give lengths or an attention_mask, one of them"):
        models.generate(
            model, tokens, max_new_tokens=1, attention_mask=mask, lengths=jnp.array([4])
        )


def test_a_mask_of_jax(model, prompts):
    tokens, mask = pad(prompts, *PLACES["left"], filler=0)
    aligned, _ = align(jnp.asarray(tokens), jnp.asarray(mask, bool))
    assert isinstance(aligned, jax.Array)
    assert aligned[1, :5].tolist() == prompts[1].tolist()


@pytest.mark.parametrize("wrong", [2**32 + 5, -(2**32) + 5, 64, -1])
def test_tokens_outside_the_vocabulary_are_refused(model, wrong):
    tokens, message = np.array([[3, wrong]]), "must be within"
    for given in (tokens, tokens.tolist()):
        with pytest.raises(ValueError, match=message):
            models.start(model, given, max_length=8)
        with pytest.raises(ValueError, match=message):
            models.generate(model, given, max_new_tokens=2)
    session = models.start(model, [[3, 5]], max_length=8)
    with pytest.raises(ValueError, match=message):
        session.step(np.array([wrong]))
    with pytest.raises(ValueError, match=message):
        session.step([wrong])
    with pytest.raises(ValueError, match=message):
        models.score(session, tokens)


def test_lists_are_tokens(model):
    expected = models.generate(model, jnp.array([[3, 5]]), max_new_tokens=3)
    np.testing.assert_array_equal(models.generate(model, [[3, 5]], max_new_tokens=3), expected)
    session = models.start(model, [[3, 5]], max_length=8)
    np.testing.assert_array_equal(session.step([7]).logits.shape, (1, 64))
    with pytest.raises(TypeError, match="must be an integer type"):
        models.start(model, [[3, 5]], max_length=8).step(jnp.array([7.0]))


@pytest.mark.quick(2)
@pytest.mark.parametrize("wrong", [64, 9999, -1])
def test_on_the_device_they_give_nan_in_their_own_sequence(model, wrong):
    session = models.start(model, [[3, 5], [3, 5]], max_length=8)
    expected = models.start(model, [[3, 5], [3, 5]], max_length=8).step([7, 7]).logits
    logits = session.step(jnp.array([7, wrong])).logits
    assert np.isnan(logits[1]).all()
    np.testing.assert_array_equal(logits[0], expected[0])


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("wrong", [64, -1])
def test_a_forward_pass_gives_nan_for_them_but_not_for_padding(wrong):
    llama = models.Transformer(
        tiny.config(max_length=32),
        rngs=nnx.Rngs(0),
    )
    logits = np.asarray(llama(np.array([[3, wrong, 5], [3, 4, 5]])))
    assert np.isnan(logits[0, 1:]).all()
    assert np.isfinite(logits[1]).all()
    mask = np.array([[0, 1, 1]])
    padded = llama(jnp.array([[wrong, 3, 5]]), attention_mask=jnp.asarray(mask))
    other = llama(jnp.array([[7, 3, 5]]), attention_mask=jnp.asarray(mask))
    np.testing.assert_array_equal(padded[0, 1:], other[0, 1:])
    assert np.isfinite(padded[0, 1:]).all()
