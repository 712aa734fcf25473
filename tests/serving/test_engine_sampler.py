"""The program that chooses tokens after the engine's model step, against float64 in numpy."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.benchmarks.sampler_helpers import (
    LENGTH,
    SLOTS,
    Row,
    V,
    changed,
    everything,
    log_softmax,
    run,
)
from tests.models.sampling_helpers import KINDS, SIZE, rows
from turbojax.models import Penalties, Request, Sampling
from turbojax.models.engine.requests import MOST_LOGPROBS
from turbojax.models.engine.sampler import (
    Chosen,
    Wanted,
    biased,
    choose,
    masked,
    most_likely,
    no_processors,
    penalized,
    wanted_of,
)
from turbojax.models.generation.constraints import pack
from turbojax.models.generation.sampling import NOTHING, greedy_rows, sample


def cases(seed: int, *, temperature: float = 0.0) -> tuple[np.ndarray, np.ndarray, list[Row]]:
    """Rows that want all kinds of things, one of them nothing, and one that means nothing."""
    rng = np.random.default_rng(seed)
    history = rng.integers(0, V, (SLOTS, LENGTH)).astype(np.int32)
    history[:, ::3] = 7  # some token often
    wishes = [
        {},
        {"penalties": Penalties(1.7, 0.4, 0.3)},
        {"penalties": Penalties(0.6)},
        {"penalties": Penalties(frequency=-0.8)},
        {"logit_bias": {5: 2.0, 76: -1.5, 0: -math.inf}},
        {"logit_bias": {t: float(rng.normal()) for t in range(V)}, "logprobs": 5},
        {"constraint": everything(), "penalties": Penalties(1.1, 1.0, 1.0)},
        {"constraint": everything(), "logit_bias": {3: 1.0}, "penalties": Penalties(2.0)},
    ]
    rows = []
    for slot, (wish, number) in enumerate(zip(wishes, rng.permutation(8), strict=True)):
        length = int(rng.integers(2, LENGTH))
        prompt = int(rng.integers(1, length + 1))
        sampling = Sampling(temperature=temperature, seed=slot)
        row = Row(Request([1], sampling=sampling, **wish), int(number), length, prompt)
        if row.request.constraint is not None:
            row.allowed = rng.random(V) < 0.4
        rows.append(row)
    rows.append(Row(Request([1]), SLOTS, 0, 0))
    return rng.normal(scale=2.0, size=(len(rows), V)).astype(np.float32), history, rows


@pytest.mark.parametrize("seed", range(4))
def test_the_largest_of_what_bias_penalties_and_masks_leave(seed):
    logits, history, rows = cases(seed)
    after, chosen = run(logits, history, rows)
    expected = history.copy()
    for i, row in enumerate(rows[:-1]):
        values = changed(logits[i], history[row.slot], row)
        # No two are so close that float32 could choose the other.
        assert np.diff(np.sort(values[np.isfinite(values)]))[-1] > 1e-4
        assert chosen.tokens[i] == np.argmax(values), i
        expected[row.slot, row.length] = chosen.tokens[i]
    np.testing.assert_array_equal(after, expected)


@pytest.mark.parametrize("seed", [0, 1])
def test_every_logit_is_what_the_definition_says(seed):
    logits, history, rows = cases(seed)
    rows = rows[:-1]
    processors = no_processors(len(rows), V, wanted_of(row.request for row in rows))
    for i, row in enumerate(rows):
        processors.set(i, row.request, None if row.allowed is None else pack(row.allowed))
    texts = history[[row.slot for row in rows]]
    lengths, prompts = (
        jnp.asarray([getattr(row, name) for row in rows], jnp.int32)
        for name in ("length", "prompt")
    )
    found = biased(jnp.asarray(logits[:-1]), processors.bias_tokens, processors.bias_values)
    found = jax.jit(penalized)(found, texts, lengths, prompts, processors.penalties)
    found = np.asarray(masked(found, processors.masks))
    wanted = np.stack([changed(*x) for x in zip(logits[:-1], texts, rows, strict=True)])
    # Some four roundings of numbers below 32: 4 * 32 * 2**-24.
    np.testing.assert_allclose(found, wanted, rtol=0, atol=8e-6)


def test_one_token_that_each_step_of_the_order_decides():
    """Bias comes before repetition, and the mask last."""
    logits = np.full((1, V), -5.0, np.float32)
    logits[0, [3, 4, 9]] = 1.0, 3.5, 10.0
    history = np.full((SLOTS, LENGTH), 3, np.int32)
    request = Request([3], logit_bias={3: 8.0}, penalties=Penalties(2.0), constraint=everything())
    allowed = np.arange(V) < 9
    # (1 + 8) / 2 is above 3.5, and (1 + 5.9) / 2 is not, while 1 / 2 + 5.9 would be.
    for bias, token in ((8.0, 3), (5.9, 4)):
        wish = dataclasses.replace(request, logit_bias={3: bias})
        _, chosen = run(logits, history, [Row(wish, 0, 4, 2, allowed)])
        assert chosen.tokens.tolist() == [token]


def test_draws_are_of_the_changed_logits_and_have_the_bits_of_sample():
    logits, history, rows = cases(11, temperature=0.9)
    # The rows' bias and penalties are powers of two, so that float64 and float32 agree.
    exact = [
        {"penalties": Penalties(2.0, 0.5, 0.25)},
        {"logit_bias": {5: 2.0, 6: -math.inf}},
        {"constraint": everything(), "logit_bias": {7: 0.5}},
    ]
    logits = np.round(logits * 64) / 64
    for row, wish in zip(rows, [*exact, *exact[:2], {}, *exact[::2], {}], strict=True):
        row.request = Request([1], sampling=row.request.sampling, **wish)
        row.allowed = np.arange(V) % 3 > 0 if "constraint" in wish else None
    values = [changed(x, history[row.slot], row) for x, row in zip(logits, rows[:-1], strict=False)]
    values = jnp.asarray(np.stack([*values, logits[-1]]), jnp.float32)
    _, chosen = run(logits, history, rows)
    sampling = greedy_rows(len(rows))
    for i, row in enumerate(rows):
        sampling.set(i, row.request.sampling, row.length - row.prompt)
    wanted = jax.jit(sample, static_argnames="kind")(values, sampling, "draw")
    np.testing.assert_array_equal(chosen.tokens, wanted)
    assert len(set(chosen.tokens.tolist())) > 4


ALL = Wanted("restrict", penalties=True, bias=128, mask=True, logprobs=True)


def test_a_row_depends_on_itself_alone():
    """In company and among rows without wishes: the same bits, of log-probabilities, too."""
    for temperature in (0.0, 1.1):
        logits, history, rows = cases(5, temperature=temperature)
        history_after, together = run(logits, history, rows, ALL)
        for i, row in enumerate(rows[:-1]):
            others = [
                Row(Request([1], logprobs=0), other.slot, other.length, other.prompt)
                for other in rows
            ]
            lone = [*others[:i], row, *others[i + 1 :]]
            noise = np.random.default_rng(i).normal(size=logits.shape).astype(np.float32)
            noise[i], elsewhere = logits[i], np.roll(history, 5, 1)
            elsewhere[row.slot, : row.length] = history[row.slot, : row.length]
            after, alone = run(noise, elsewhere, lone, ALL)
            assert after[row.slot, row.length] == history_after[row.slot, row.length]
            for one, other in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
                assert one[i].tobytes() == other[i].tobytes()


def test_logits_of_rows_without_wishes_keep_their_bits():
    logits = np.random.default_rng(0).normal(size=(2, V)).astype(np.float32)
    logits[:, :6] = -0.0, 0.0, np.inf, -np.inf, np.nan, np.float32(1e-42)
    history = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (2, LENGTH))
    processors = no_processors(2, V, ALL)
    lengths, prompts = jnp.asarray([20, 20]), jnp.asarray([0, 10])

    @jax.jit
    def all_of_it(logits, processors):
        one = biased(logits, processors.bias_tokens, processors.bias_values)
        two = penalized(one, history, lengths, prompts, processors.penalties)
        return one, two, masked(two, processors.masks)

    for found in all_of_it(logits, processors):
        assert np.asarray(found).tobytes() == logits.tobytes()


def test_what_comes_after_a_text_counts_for_nothing():
    """Also where it is no token at all."""
    logits, history, rows = cases(3)
    clean = run(logits, history, rows)[1].tokens
    for garbage in (-1, V, 2**31 - 1, -(2**31)):
        dirty = history.copy()
        for row in rows[:-1]:
            dirty[row.slot, row.length :] = garbage
        np.testing.assert_array_equal(run(logits, dirty, rows)[1].tokens, clean)


def test_nothing_in_a_text_is_no_token():
    """It is there until the host has read that the text failed."""
    logits = np.zeros((1, V), np.float32)
    logits[0, V - 1] = 0.5
    history = np.full((1, 8), NOTHING, np.int32)
    request = Request([1], penalties=Penalties(2.0, 2.0, 2.0))
    assert run(logits, history, [Row(request, 0, 6, 1)])[1].tokens.tolist() == [V - 1]


def test_prompts_count_for_repetition_alone():
    logits = np.zeros((3, V), np.float32)
    logits[:, 5] = 1.0
    logits[:, 6] = 0.9
    history = np.full((3, 8), 5, np.int32)
    wishes = Penalties(repetition=2.0), Penalties(presence=1.0), Penalties(frequency=1.0)
    rows = [Row(Request([1], penalties=x), i, 6, 6) for i, x in enumerate(wishes)]
    assert run(logits, history, rows)[1].tokens.tolist() == [6, 5, 5]
    for row in rows:
        row.prompt = 5
    assert run(logits, history, rows)[1].tokens.tolist() == [6, 6, 6]


def test_frequency_counts_and_presence_does_not():
    logits = np.zeros((2, V), np.float32)
    logits[:, 5], logits[:, 6] = 1.0, 0.9
    history = np.asarray([[1, 5, 6, 5, 5, 0]] * 2, np.int32)
    wishes = Penalties(presence=0.4), Penalties(frequency=0.4)
    rows = [Row(Request([1], penalties=x), i, 5, 1) for i, x in enumerate(wishes)]
    # 1 - 0.4 and 0.9 - 0.4; 1 - 3 * 0.4 and 0.9 - 0.4.
    assert run(logits, history, rows)[1].tokens.tolist() == [5, 6]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_nothing_is_left_there_is_no_token(temperature):
    logits, history, rows = cases(1)
    sampling = Sampling(temperature=temperature, top_k=3 if temperature else None)
    none = dict.fromkeys(range(V), -math.inf)
    half = dict.fromkeys(range(40), -math.inf)
    wishes = [
        Request([1], sampling=sampling, constraint=everything()),
        Request([1], sampling=sampling, logit_bias=none),
        Request([1], sampling=sampling, logit_bias=half, constraint=everything()),
        Request([1], sampling=sampling, logit_bias={1: -math.inf}),
        Request([1], sampling=sampling, penalties=Penalties(1.5, 1.0, 1.0)),
        Request([1], sampling=sampling),
    ]
    masks = [np.zeros(V, bool), None, np.arange(V) < 40, None, None, None]
    rows = [
        Row(wish, slot, 6, 3, mask)
        for slot, (wish, mask) in enumerate(zip(wishes, masks, strict=True))
    ]
    logits = logits[:6]
    logits[4] = -np.inf
    wanted = wanted_of(wishes)._replace(logprobs=True)
    after, chosen = run(logits, history, rows, wanted)
    assert (chosen.tokens == NOTHING).tolist() == [True, True, True, False, True, False]
    assert np.array_equal(np.isnan(chosen.logprobs), chosen.tokens == NOTHING)
    np.testing.assert_array_equal(after[np.arange(6), 6], chosen.tokens)


def test_bits_beyond_the_vocabulary_mean_nothing():
    logits = np.zeros((2, V), np.float32)
    rows = [Row(Request([1], constraint=everything()), i, 1, 1) for i in range(2)]
    processors = no_processors(2, V, Wanted(mask=True))
    for i, words in enumerate(([0, 0, 0xFFFFE000], [0, 0, 0xFFFFF000])):
        processors.set(i, rows[i].request, np.array(words, np.uint32))
    given = (np.ones(2, np.int32), np.ones(2, np.int32), np.arange(2, dtype=np.int32))
    history = jnp.zeros((2, 4), jnp.int32)
    _, chosen = choose(
        jnp.asarray(logits), history, *given, greedy_rows(2), processors, wanted=Wanted(mask=True)
    )
    # 64 + 12 is the last token, and its bit is the 12th.
    assert np.asarray(chosen.tokens).tolist() == [NOTHING, 76]


@pytest.mark.parametrize("value", [np.nan, -np.nan])
def test_nan_anywhere_gives_no_token(value):
    """Also at a token that is forbidden: something is wrong with the whole row."""
    logits = np.zeros((4, V), np.float32)
    logits[:, 50] = value
    logits[3, 50] = 0
    allowed = np.arange(V) < 20
    wishes = [
        {"constraint": everything()},
        {"logit_bias": {50: -math.inf}},
        {"penalties": Penalties(2.0, 1.0)},
        {},
    ]
    rows = [
        Row(Request([1], logprobs=3, **wish), i, 5, 2, allowed if i == 0 else None)
        for i, wish in enumerate(wishes)
    ]
    _, chosen = run(logits, np.full((4, 8), 50, np.int32), rows)
    assert chosen.tokens.tolist() == [NOTHING] * 3 + [0]
    assert np.all(np.isnan(chosen.logprobs[:3]))
    assert np.isfinite(chosen.logprobs[3])


def test_a_forbidden_token_is_not_chosen_even_if_infinite():
    logits = np.zeros((2, V), np.float32)
    logits[:, 9] = np.inf
    allowed = np.arange(V) != 9
    bias, mask = {"logit_bias": {9: -math.inf}}, {"constraint": everything()}
    rows = [Row(Request([1], **bias), 0, 1, 1), Row(Request([1], **mask), 1, 1, 1, allowed)]
    assert run(logits, np.zeros((2, 4), np.int32), rows)[1].tokens.tolist() == [0, 0]


def test_a_full_history_and_rows_that_mean_nothing_are_not_written():
    logits, history, rows = cases(0)
    nothing = [Row(row.request, SLOTS, 0, 0, row.allowed) for row in rows[:-1]]
    full = Row(Request([1]), 4, LENGTH, 3)
    after, chosen = run(logits, history, [*nothing, full])
    np.testing.assert_array_equal(after, history)
    assert chosen.tokens[-1] == np.argmax(logits[-1])


def test_the_history_is_written_in_place():
    given = (np.ones(1, np.int32), np.ones(1, np.int32), np.zeros(1, np.int32), greedy_rows(1))
    history = jnp.zeros((1, 4), jnp.int32)
    place = history.unsafe_buffer_pointer()
    processors = no_processors(1, V, Wanted())
    after, _ = choose(jnp.ones((1, V)), history, *given, processors, wanted=Wanted())
    assert history.is_deleted()
    assert after.unsafe_buffer_pointer() == place


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ([], Wanted()),
        ([{}, {"priority": 3, "timeout": 1.0}], Wanted()),
        ([{}, {"penalties": Penalties(presence=0.1)}], Wanted(penalties=True)),
        ([{"penalties": Penalties(1, 0, 0)}], Wanted()),
        ([{}, {"logprobs": 0}], Wanted(logprobs=True)),
        ([{"constraint": everything()}, {}], Wanted(mask=True)),
        ([{"logit_bias": {1: 0.5}}, {}], Wanted(bias=16)),
        ([{"logit_bias": dict.fromkeys(range(16), 1.0)}], Wanted(bias=16)),
        ([{"logit_bias": dict.fromkeys(range(17), 1.0)}], Wanted(bias=128)),
        ([{"logit_bias": {}}, {"logit_bias": dict.fromkeys(range(1025), 1.0)}], Wanted(bias=8192)),
        ([{"sampling": Sampling(0.5)}, {"logprobs": 3}], Wanted("draw", logprobs=True)),
        ([{"sampling": Sampling(0.5, top_k=3)}], Wanted("restrict")),
    ],
)
def test_what_is_wanted_is_what_the_requests_want(options, wanted):
    found = wanted_of(Request([1], **option) for option in options)
    assert found == wanted
    assert found.is_plain == (wanted == Wanted())


def test_processors_hold_what_is_wanted_and_no_more():
    processors = no_processors(3, V, Wanted())
    assert jax.tree.leaves(processors) == []
    processors = no_processors(3, V, Wanted(penalties=True, bias=16, mask=True))
    shapes = [(x.dtype.name, x.shape) for x in jax.tree.leaves(processors)]
    assert shapes == [
        ("float32", (3, 3)),
        ("int32", (3, 16)),
        ("float32", (3, 16)),
        ("uint32", (3, 3)),
    ]


BIAS = Request([1], logit_bias={1: 1.0})
MASK = Request([1], constraint=everything())


@pytest.mark.parametrize(
    ("wanted", "request_", "allowed", "error", "message"),
    [
        (Wanted(), BIAS, None, ValueError, "logit_bias={1: 1.0} must be among what is wanted"),
        (
            Wanted(),
            Request([1], penalties=Penalties(2.0)),
            None,
            ValueError,
            "penalties=.* must be among",
        ),
        (Wanted(), MASK, np.zeros(3, np.uint32), ValueError, "constraint=.* must be among"),
        (Wanted(mask=True), MASK, None, ValueError, "allowed is None, must be given exactly"),
        (
            Wanted(mask=True),
            Request([1]),
            np.zeros(3, np.uint32),
            ValueError,
            "allowed is given, must be given exactly where there is a constraint, which is None",
        ),
        (
            Wanted(mask=True),
            MASK,
            np.zeros(4, np.uint32),
            ValueError,
            r"allowed.shape=\(4,\) must be \(3,\)",
        ),
        (Wanted(mask=True), MASK, np.zeros(3, bool), TypeError, "allowed is of bool, must be"),
        (Wanted(mask=True), MASK, [1, 2, 3], TypeError, "allowed is of list, must be"),
    ],
)
def test_processors_refuse(wanted, request_, allowed, error, message):
    with pytest.raises(error, match=message):
        no_processors(1, V, wanted).set(0, request_, allowed)


def test_tokens_that_a_tokenizer_does_not_have_are_not_allowed():
    """Those of a padded table; the row may have been another one's before."""
    processors = no_processors(1, V, Wanted(mask=True))
    for allowed in ([7, 5, 3], [2**32 - 1, 9], [1], []):
        processors.set(0, MASK, np.array(allowed, np.uint32))
        assert processors.masks[0].tolist() == allowed + [0] * (3 - len(allowed))


def test_choose_refuses_processors_for_another_program():
    given = (np.zeros(1, np.int32),) * 3
    logits, history = jnp.zeros((1, V)), jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(
        ValueError, match="processors with penalties, bias, masks = .* must fit Wanted"
    ):
        choose(
            logits,
            history,
            *given,
            greedy_rows(1),
            no_processors(1, V, Wanted()),
            wanted=Wanted(mask=True),
        )


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("size", [5, 20, 64, 77])
def test_logprobs_are_of_the_raw_logits(size):
    rng = np.random.default_rng(size)
    logits = rng.normal(scale=4.0, size=(3, size)).astype(np.float32)
    logits[2, 3] = -np.inf
    history = rng.integers(0, size, (3, 8)).astype(np.int32)
    request = Request(
        [1],
        sampling=Sampling(temperature=2.0),
        logprobs=20,
        penalties=Penalties(3.0),
        logit_bias={2: 5.0, int(np.argmax(logits[0])): -math.inf},
    )
    _, chosen = run(logits, history, [Row(request, i, 5, 2) for i in range(3)])
    count = min(size, MOST_LOGPROBS)
    for i in range(3):
        wanted = log_softmax(logits[i])
        order = np.argsort(-wanted, kind="stable")[:count]
        # The sum of `size` float32 exponentials, and differences up to some 20.
        close = {"rtol": 1e-6, "atol": 1e-5}
        np.testing.assert_allclose(chosen.logprobs[i], wanted[chosen.tokens[i]], **close)
        np.testing.assert_array_equal(chosen.top_tokens[i, :count], order)
        np.testing.assert_allclose(chosen.top_logprobs[i, :count], wanted[order], **close)
        assert np.all(chosen.top_tokens[i, count:] == -1)
        assert np.all(chosen.top_logprobs[i, count:] == -np.inf)
        entry = chosen.logprobs_of(i, 4)
        assert entry.logprob == float(chosen.logprobs[i])
        assert [token for token, _ in entry.top] == order[:4].tolist()
        assert len(chosen.logprobs_of(i, 20).top) == count
        assert chosen.logprobs_of(i, 0).top == ()
    assert chosen.tokens[0] != np.argmax(logits[0])


def test_top_logprobs_of_equal_tokens_begin_with_the_smaller():
    logits = np.zeros((1, V), np.float32)
    _, chosen = run(logits, np.zeros((1, 4), np.int32), [Row(Request([1], logprobs=20), 0, 1, 1)])
    assert chosen.top_tokens[0].tolist() == list(range(20))
    np.testing.assert_allclose(chosen.logprobs, [-np.log(V)], rtol=1e-6)


@pytest.mark.quick(4, slow=0)
@pytest.mark.parametrize(("size", "count"), [(20, 20), (21, 20), (1000, 20), (5001, 20), (77, 3)])
def test_the_most_likely_are_those_of_top_k_also_of_equal_ones(size, count):
    rng = np.random.default_rng(size)
    # The largest are few, and many are equal, in parts of a row that others lead.
    logits = rng.geometric(0.5, (40, size)).astype(np.float32)
    logits[10:20] = rng.normal(size=(10, size))
    logits[20:30, rng.integers(0, size, size // 2)] = -np.inf
    logits[30] = -np.inf
    logits[31, 1:] = -np.inf
    values, tokens = (np.asarray(x) for x in jax.jit(most_likely, static_argnums=1)(logits, count))
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    np.testing.assert_array_equal(tokens, order)
    np.testing.assert_array_equal(values, np.take_along_axis(logits, order, -1))


def test_a_logit_of_infinity_is_certain():
    logits = np.zeros((1, V), np.float32)
    logits[0, 30] = np.inf
    _, chosen = run(logits, np.zeros((1, 4), np.int32), [Row(Request([1], logprobs=2), 0, 1, 1)])
    assert chosen.logprobs_of(0, 2).top == ((30, 0.0), (0, -math.inf))


def test_logprobs_that_nobody_wanted_are_refused():
    with pytest.raises(ValueError, match="logprobs of these tokens are None"):
        Chosen(np.zeros(1, np.int32)).logprobs_of(0, 1)


def chosen(logits, sampling, wanted):
    """Tokens of rows that are a slot each, without a history."""
    count = len(logits)
    history, counts = jnp.zeros((count, 2), jnp.int32), np.zeros(count, np.int32)
    processors = no_processors(count, logits.shape[1], wanted)
    slots = np.arange(count, dtype=np.int32)
    after, found = choose(
        logits, history, counts, counts, slots, sampling, processors, wanted=wanted
    )
    assert np.array_equal(after[:, 0], found.tokens)
    assert not np.any(after[:, 1])
    return np.asarray(found.tokens)


def test_a_draw_from_all_tokens_is_the_same_whatever_the_others_ask_for():
    rng = np.random.default_rng(4)
    count, size = 200, 500
    logits = jnp.asarray(rng.normal(scale=3.0, size=(count, size)), jnp.float32)
    temperature = rng.choice([0.0, 0.3, 1.0], count)
    restricted = rng.random(count) < 0.5
    options = (
        temperature,
        *(np.where(restricted, x, y) for x, y in ((3, 0), (0.9, 1.0), (0.2, 0.0))),
    )
    draw, mixed = (
        chosen(logits, rows(count, *x), Wanted(kind))
        for kind, x in (("draw", options[:1]), ("restrict", options))
    )
    assert np.array_equal(draw[~restricted], mixed[~restricted])
    assert not np.array_equal(draw[restricted], mixed[restricted])


def test_no_kind_has_a_branch_on_the_device():
    """The host would have to read the predicate before it could go on."""
    logits, history = jnp.zeros((4, SIZE), jnp.float32), jnp.zeros((4, 3), jnp.int32)
    counts, slots = np.ones(4, np.int32), np.arange(4, dtype=np.int32)
    for kind in KINDS:
        wanted = Wanted(kind, penalties=True, bias=16, mask=True, logprobs=True)
        processors = no_processors(4, SIZE, wanted)
        arguments = logits, history, counts, counts, slots, rows(4), processors
        program = choose.lower(*arguments, wanted=wanted).as_text()
        assert "argmax" in program or "reduce" in program
        assert "stablehlo.case" not in program
        assert "stablehlo.if" not in program
    assert "sort" in program
