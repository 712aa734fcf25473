"""Errors of each layer's attention, and recall from source code, against numpy."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from tests.tools.evaluation_helpers import CONFIG, CONTEXT, PROMPT, decoder, texts, tokens
from turbojax import caches as kv
from turbojax import evaluation, models
from turbojax.evaluation import layers, recall_items
from turbojax.evaluation.recall import RecallMeasure

ANSWER, CUE, PAIRS = recall_items.ANSWER, recall_items.CUE, recall_items.PAIRS


@pytest.fixture(scope="module")
def model():
    return decoder()


def attention(query, key, value, window=None, cap=None, sinks=None):
    """Causal, float64, of ``[T, N, H]`` and ``[T, K, H]``."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    group = query.shape[1] // key.shape[1]
    key, value = (np.repeat(x, group, axis=1) for x in (key, value))
    scores = np.einsum("tnh,snh->nts", query, key) / np.sqrt(query.shape[2])
    scores = scores if cap is None else cap * np.tanh(scores / cap)
    t, s = np.ogrid[: len(query), : len(key)]
    seen = (s <= t) & (s > t - (window or len(key) + 1))
    weights = np.where(seen, np.exp(scores), 0)
    more = 0 if sinks is None else np.exp(np.asarray(sinks, np.float64))[:, None]
    return np.einsum("nts,snh->tnh", weights / (weights.sum(axis=-1) + more)[..., None], value)


def test_the_definition(monkeypatch):
    """Some queries at a time, of which the last block shares some with the one before."""
    monkeypatch.setattr(layers, "_BLOCK", 8)
    rng = np.random.default_rng(0)
    query, key, value = (
        rng.normal(size=(2, 19, heads, 8)).astype(np.float32) for heads in (4, 2, 2)
    )
    sinks = jnp.asarray([0.5, -1, 2, 0], jnp.float32)
    for window, cap, given in [(None, None, None), (5, None, None), (None, 2.0, sinks)]:
        options = kv.AttentionOptions(local_window_size=window, logits_soft_cap=cap)
        found = layers._exact(*map(jnp.asarray, (query, key, value)), given, options)
        for i in range(2):
            wanted = attention(query[i], key[i], value[i], window, cap, given)
            np.testing.assert_allclose(found[i], wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_errors_are_those_of_each_layer_alone(model):
    """Of all tokens after the prompt at once, and in numpy."""
    method = evaluation.method("kv4", CONFIG)
    windows = tokens()[:, :CONTEXT]
    found = evaluation.layer_errors(model, windows, method, prompt=PROMPT, batch_size=2)
    operands = layers._operands(model, jnp.asarray(windows[:2]))
    more = layers._operands(model, jnp.asarray(windows[[2, 2]]))
    for layer in range(CONFIG.num_layers):
        parts = []
        for (q, k, v, _), rows in ((operands[layer], 2), (more[layer], 1)):
            cache = kv.init_layer_cache(2, CONTEXT, 2, 16, kind="kv4", dtype="float32")
            first, rest = ([x[:, part] for x in (q, k, v)] for part in _parts())
            lengths = jnp.full(2, PROMPT, jnp.int32)
            out, cache = kv.attend_prompt(lengths)(*first, cache)
            later, _ = kv.attend_new_tokens()(*rest, cache)
            ours = np.concatenate([out, later], axis=1).astype(np.float64)[:rows]
            exact = np.stack([attention(q[i], k[i], v[i]) for i in range(rows)])
            parts.append((ours, exact))
        ours, exact = (np.concatenate(x) for x in zip(*parts, strict=True))
        for errors, part in zip(
            (found, found.prefill, found.decode), (slice(None), *_parts()), strict=True
        ):
            a, b = ours[:, part], exact[:, part]
            norms = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
            cosine = np.mean(np.sum(a * b, axis=-1) / norms)
            assert errors.cosine[layer] == pytest.approx(cosine, abs=1e-5)
            l1 = np.abs(a - b).sum() / np.abs(b).sum()
            assert errors.relative_l1[layer] == pytest.approx(l1, rel=1e-3)
            rmse = np.sqrt(np.mean((a - b) ** 2))
            assert errors.rmse[layer] == pytest.approx(rmse, rel=1e-3)
        by_token = np.abs(ours - exact).sum(axis=(0, 2, 3)) / np.abs(exact).sum(axis=(0, 2, 3))
        np.testing.assert_allclose(found.by_token[layer], by_token, rtol=1e-3, atol=1e-6)


def _parts():
    return slice(None, PROMPT), slice(PROMPT, None)


@pytest.mark.slow
def test_layers_that_are_not_compressed(model):
    """Only the one between the first and the last is off."""
    method = evaluation.method("kv4:uncompressed_layers=1", CONFIG)
    found = evaluation.layer_errors(model, tokens()[:2, :CONTEXT], method, prompt=PROMPT)
    assert max(found.relative_l1[[0, 2]]) < 1e-5 < 1e-3 < found.relative_l1[1]
    assert np.all(found.cosine > 0.9)


def test_what_layers_refuse(model):
    method = evaluation.methods.Method("latent", "latent")
    with pytest.raises(NotImplementedError, match="must be one of keys and values"):
        evaluation.layer_errors(model, tokens(), method, prompt=PROMPT)
    with pytest.raises(ValueError, match="prompt=41 must be at most"):
        evaluation.layer_errors(model, tokens(), evaluation.method("kv4", CONFIG), prompt=41)


def source(count=3):
    plain = {name: np.frombuffer(x, np.uint8).astype(np.int32) for name, x in texts(count).items()}
    return recall_items.Source(plain, models.ByteTokenizer(), ord("\n"))


def make(kind, length=600, depth=0.5, seed=(0, 1), **options):
    return evaluation.make_item(source(**options), kind, length=length, depth=depth, seed=seed)


@pytest.mark.parametrize(("depth", "count"), [(0.0, 3), (0.3, 1), (0.3, 3), (1.0, 3)])
def test_copies(depth, count):
    """What is asked for stands once in the prompt, at its depth, and is followed by the answer."""
    item = make("copy", depth=depth, count=count)
    assert (len(item.prompt), len(item.asked), len(item.answer)) == (
        600 - CUE - ANSWER,
        CUE,
        ANSWER,
    )
    prompt = bytes(item.prompt.tolist())
    passage = bytes([*item.asked, *item.answer])
    assert prompt[0] == models.BEGINNING_OF_FILE
    assert prompt.count(passage) == prompt.count(passage[: CUE // 2]) == 1
    room = len(prompt) - 256 - 4
    assert prompt.index(passage) == 2 + round(depth * room)
    [name] = [name for name, text in texts(count).items() if passage in text]
    # A passage begins where a line does, among lines of other files, if there are any.
    assert passage in texts(count)[name]
    assert texts(count)[name][: texts(count)[name].index(passage)][-1:] in (b"\n", b"")
    others = b"".join(text for other, text in texts(count).items() if other != name) or b"\n"
    if count > 1:
        assert prompt[400:500] in others * 2 or depth > 0.4


@pytest.mark.parametrize("depth", [0.0, 0.6, 1.0])
def test_values_by_key(depth):
    item = make("key_value", depth=depth)
    prompt, asked, answer = (bytes(x.tolist()) for x in (item.prompt, item.asked, item.answer))
    assert len(prompt) == 600 - CUE - ANSWER
    assert asked.startswith(b"assert SETTING_")
    assert asked.endswith(b" == ")
    key = asked.removeprefix(b"assert ").removesuffix(b" == ")
    assert prompt.count(b"\n" + key + b" = " + answer + b"\n") == prompt.count(key) == 1
    assert prompt.count(b"SETTING_") == PAIRS
    assert len({line for line in prompt.split(b"\n") if line.startswith(b"SETTING_")}) == PAIRS
    before = prompt.index(key) / len(prompt)
    assert before == pytest.approx(0.05 + 0.9 * depth, abs=0.25)


def test_items_follow_from_the_seed():
    for kind in recall_items.IN_CODE:
        one, same = make(kind), make(kind)
        for field in dataclasses.fields(one):
            np.testing.assert_array_equal(getattr(one, field.name), getattr(same, field.name))
        other = make(kind, seed=(0, 2))
        assert not np.array_equal(one.answer, other.answer)


def test_texts_that_give_no_items():
    with pytest.raises(recall_items.NoItem, match="must have room for a passage"):
        make("copy", length=300)
    with pytest.raises(recall_items.NoItem, match="must have room for 8 lines"):
        make("key_value", length=200)
    with pytest.raises(recall_items.NoItem, match="the texts hold .* tokens beside a passage"):
        make("copy", length=20000)
    same = {"a": np.full(2000, 65, np.int32), "b": np.full(2000, 65, np.int32)}
    alike = recall_items.Source(same, models.ByteTokenizer(), None)
    with pytest.raises(recall_items.NoItem, match="come nowhere else"):
        evaluation.make_item(alike, "copy", length=600, depth=0, seed=(0,))


def test_answers():
    right = np.array([[1, 1, 1, 1], [1, 0, 1, 1], [0, 1, 1, 1]], bool)
    there = np.ones((3, 4), bool)
    found = evaluation.Answers(right, np.ones((3, 4), np.float32), there)
    short = evaluation.Answers(right, found.bits, np.arange(4)[None] < [[4], [1], [2]])
    assert short.whole().tolist() == [True, True, False]
    assert short.copied.tolist() == [1, 1, 0]
    assert short.part(slice(1, 2)).whole().tolist() == [True]
    assert found.whole().tolist() == [True, False, False]
    assert found.whole(1).tolist() == [True, True, False]
    assert found.copied.tolist() == [1, 0.25, 0]


@pytest.mark.slow
def test_recall_is_scored_as_text_is(model):
    """Bits of one pass, and greedy choices: those that `generate` makes up to its first error."""
    items = [make("copy", length=400, depth=depth) for depth in (0.0, 0.5, 1.0)]
    exact = evaluation.method("exact", CONFIG)
    found = evaluation.recall(model, items, exact, batch_size=2)
    windows = np.stack([np.concatenate([x.prompt, x.asked, x.answer]) for x in items])
    bits = models.token_bits(model, windows)[:, -ANSWER:]
    np.testing.assert_allclose(found.bits, bits, rtol=1e-4, atol=1e-4)
    assert found.right.shape == (3, ANSWER)
    assert found.there.all()
    # Another question and a shorter answer in the same batch, as tokenizers make them.
    question = np.append(items[1].asked, items[1].answer[:3])
    cut = [
        dataclasses.replace(items[0], answer=items[0].answer[:5]),
        dataclasses.replace(items[1], asked=question, answer=items[1].answer[3:]),
    ]
    ragged = evaluation.recall(model, cut, exact, batch_size=2)
    assert ragged.there.sum(axis=1).tolist() == [5, ANSWER - 3]
    np.testing.assert_array_equal(ragged.bits[0, :5], found.bits[0, :5])
    np.testing.assert_array_equal(ragged.bits[1], found.bits[1, 3:])
    with pytest.raises(ValueError, match="of one size"):
        evaluation.recall(model, [*items, make("copy", length=401)], exact)
    with pytest.raises(ValueError, match="of one size"):
        evaluation.recall(model, [], exact)


@pytest.mark.slow
def test_the_measure(model):
    """Cells of both kinds, and what is left out; texts of tokens need a tokenizer."""
    options = {"depths": (0.0, 1.0), "count": 1, "seed": 0, "max_length": 512, "batch_size": 2}
    measure = RecallMeasure(texts(), None, lengths=(300, 400, 1024), **options)
    assert [x.get("kind") for x in measure.left_out] == ["copy", None]
    done = []
    row = measure(model, evaluation.method("exact", CONFIG), lambda *x: done.append(x))
    assert done[-1] == (6, 6)
    assert [(x["length"], x["depth"]) for x in row["copy"]["cells"]] == [(400, 0.0), (400, 1.0)]
    assert len(row["key_value"]["cells"]) == 4
    assert row["copy"]["items"] == 2
    mean = np.mean([x["bits"] for x in row["copy"]["cells"]])
    assert row["copy"]["bits"] == pytest.approx(mean)
    numbers = {name: list(text) for name, text in texts().items()}
    without = RecallMeasure(numbers, None, lengths=(400,), **options)
    assert without.left_out == [{"why": "the tokens have no tokenizer"}]
    begun = {name: [0, *text] for name, text in texts().items()}
    with_one = RecallMeasure(begun, models.ByteTokenizer(), lengths=(400,), **options)
    # A chat of 304 tokens has no room for its turns.
    assert [x["kind"] for x in with_one.left_out] == ["chat"]
