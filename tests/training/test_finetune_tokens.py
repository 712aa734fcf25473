"""Fine-tuning of models whose tokens are words: losses in chunks, runs, and the command."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models import tokenizer_helpers
from tests.training.finetune_helpers import SETTINGS, TINY, command, corpus, text, tiny_model
from turbojax import finetune, models
from turbojax.finetune import base
from turbojax.finetune.losses import cross_entropy
from turbojax.models import pooled_by_name

WORDS = dataclasses.replace(TINY, vocab_size=320, max_length=256)
SEPARATOR = 1
# Every block at level 1, so that only what documents do not see of each other can differ.
EXACT = pooled_by_name("window", window=256, block_size=32)
RHYTHM = finetune.Rhythm(log_every=2, save_every=2, evaluate_every=2, evaluate_windows=2)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
    pytest.mark.usefixtures("no_orbax_log"),
]


def word_model() -> models.Transformer:
    return models.Transformer(WORDS, rngs=nnx.Rngs(1))


def tokens(seed=0, documents=12, size=90) -> np.ndarray:
    """Documents of words that repeat, each after the separator."""
    rng = np.random.default_rng(seed)
    texts = [[SEPARATOR, *(rng.integers(2, 12, size=size) * 29)] for _ in range(documents)]
    return np.concatenate(texts).astype(np.uint16)


def chat_folder(path):
    """A tokenizer whose template writes conversations as SmolLM2 and Qwen do."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    made = tokenizer_helpers.KINDS["byte_level"]()
    return tokenizer_helpers.save(made, path, {"tokenizer_config.json": config})


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Which dog?"},
    {"role": "assistant", "content": "The lazy one."},
    {"role": "user", "content": "And which fox <|im_end|>?"},
    {"role": "assistant", "content": "The quick one."},
]


def token_corpus() -> finetune.TokenCorpus:
    return finetune.TokenCorpus(tokens(), tokens(1), "words", SEPARATOR)


def oracle(logits, targets) -> np.ndarray:
    """Losses in float64 by numpy: ``[n]`` of ``[n, V]``."""
    logits = np.asarray(logits, np.float64)
    largest = logits.max(axis=-1, keepdims=True)
    log_sum = np.log(np.exp(logits - largest).sum(axis=-1)) + largest[:, 0]
    return log_sum - logits[np.arange(len(targets)), targets]


@pytest.mark.parametrize("most", [1, 120, 250, 500])
def test_losses_in_chunks_are_those_of_all_logits(most):
    """Of one token, of chunks that do not divide, of all but one and of all; gradients too."""
    rng = np.random.default_rng(0)
    batch, count, width, vocabulary = 2, 5, 8, 50
    hidden, table = rng.normal(size=(batch, count, width)), rng.normal(size=(vocabulary, width))
    targets = rng.integers(vocabulary, size=(batch, count))
    weights = rng.normal(size=(batch, count))

    def weighted(hidden, table):
        losses = cross_entropy(
            lambda x: x @ table.T, hidden, jnp.asarray(targets), vocabulary, most=most
        )
        return jnp.sum(losses * jnp.asarray(weights, jnp.float32)), losses

    arrays = jnp.asarray(hidden, jnp.float32), jnp.asarray(table, jnp.float32)
    with jax.default_matmul_precision("highest"):
        gradient = jax.value_and_grad(weighted, argnums=(0, 1), has_aux=True)
        (_, losses), (d_hidden, d_table) = jax.jit(gradient)(*arrays)
    rows, flat = hidden.reshape(-1, width), targets.reshape(-1)
    logits = rows @ table.T
    np.testing.assert_allclose(losses.reshape(-1), oracle(logits, flat), rtol=1e-5, atol=1e-5)
    chances = np.exp(logits - logits.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    chances[np.arange(len(flat)), flat] -= 1
    d_logits = chances * weights.reshape(-1, 1)
    np.testing.assert_allclose(d_hidden.reshape(-1, width), d_logits @ table, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(d_table, d_logits.T @ rows, rtol=1e-4, atol=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("unit", "packed"), [("token", False), ("token", True), ("byte", True)], ids=str
)
def test_a_step_has_the_loss_of_its_windows(unit, packed):
    """In float64; packed documents each by themselves, of bytes after byte 0."""
    stream, model, separator = tokens(), word_model(), SEPARATOR
    options = {"pooled": EXACT, "packed": True, "separator": SEPARATOR} if packed else {}
    if unit == "byte":
        stream, separator = corpus().stream, 0
        del options["separator"]
        model = models.Transformer(finetune.for_context(TINY, 256), rngs=nnx.Rngs(1))
    starts = base.window_starts(
        np.arange(SETTINGS.batch_size),
        num_bytes=stream.size,
        context=SETTINGS.context,
        seed=SETTINGS.seed,
    )
    losses, cut = [], 0
    for start in starts:
        window = stream[start : start + SETTINGS.context + 1].astype(np.int32)
        cuts = np.flatnonzero(window[1:-1] == separator) + 1 if packed else []
        cut += len(cuts)
        for begin, end in zip([0, *cuts], [*cuts, SETTINGS.context], strict=True):
            # Of one length: what comes after a token does not change its logits.
            alone = np.pad(window[begin:end], (0, SETTINGS.context - (end - begin)))
            logits = model(jnp.asarray(alone[None]))[0, : end - begin]
            losses += list(oracle(logits, window[begin + 1 : end + 1]))
    given = tiny_model() if unit == "byte" else model
    found = finetune.Trainer(given, SETTINGS, stream, **options).run_step()
    name = f"bits_per_{unit}"
    assert set(found) >= {name, "grad_norm"}
    assert float(found[name]) == pytest.approx(np.mean(losses) / np.log(2), abs=1e-5)
    assert (cut > 0) == packed
    if unit == "byte":
        across = finetune.Trainer(given, SETTINGS, stream, pooled=EXACT).run_step()
        assert abs(float(across[name]) - float(found[name])) > 1e-4
        assert float(found["density"]) <= float(across["density"])


def marks(size, seed=3) -> np.ndarray:
    return np.random.default_rng(seed).random(size) < 0.3


@pytest.mark.slow
def test_tokens_that_do_not_count_are_only_read():
    """The mean in float64 over those that do; a step without any moves nothing."""
    stream, model = tokens(), word_model()
    learn = marks(stream.size)
    trainer = finetune.Trainer(model, SETTINGS, stream, learn=learn)
    losses = []
    for start in trainer._starts(0):
        window = stream[start : start + SETTINGS.context + 1].astype(np.int32)
        found = oracle(model(jnp.asarray(window[None, :-1]))[0], window[1:])
        losses += list(found[learn[start + 1 : start + SETTINGS.context + 1]])
    found = trainer.run_step()
    assert float(found["bits_per_token"]) == pytest.approx(np.mean(losses) / np.log(2), abs=1e-5)
    # One token counts, and no window of the step has it.
    seen = (trainer._starts(0)[:, None] + np.arange(SETTINGS.context + 1)).ravel()
    elsewhere = ~np.isin(np.arange(stream.size), seen)
    elsewhere &= np.cumsum(elsewhere) == 1
    found = finetune.Trainer(model, SETTINGS, stream, learn=elsewhere).run_step()
    assert float(found["bits_per_token"]) == float(found["grad_norm"]) == 0
    with pytest.raises(ValueError, match="must have a token that counts"):
        finetune.Trainer(model, SETTINGS, stream, learn=np.zeros(stream.size, bool))
    with pytest.raises(TypeError, match="learn.dtype=int64 must be bool"):
        finetune.Trainer(model, SETTINGS, stream, learn=learn.astype(int))
    with pytest.raises(ValueError, match="must be that of the tokens"):
        finetune.Trainer(model, SETTINGS, stream, learn=learn[1:])


@pytest.mark.fuzz
def test_adapters_learn_what_counts():
    config = dataclasses.replace(WORDS, hidden_size=32, intermediate_size=64)
    decoder = models.random_quantized_decoder(config, dtype=jnp.float32)
    stream = tokens()
    learn = marks(stream.size)
    adapters = models.init_adapters(decoder, rank=2)
    trainer = finetune.LoraTrainer(decoder, adapters, SETTINGS, stream, learn=learn)
    starts = trainer._starts(0)[:, None] + np.arange(SETTINGS.context + 1)
    losses = finetune.token_losses(trainer.model(), jnp.asarray(stream[starts].astype(np.int32)))
    want = np.asarray(losses, np.float64)[learn[starts[:, 1:]]].mean() / np.log(2)
    assert float(trainer.run_step()["bits"]) == pytest.approx(want, abs=1e-5)


def test_of_a_conversation_the_answers_count(tmp_path):
    tokenizer = models.load_tokenizer(chat_folder(tmp_path / "model"))
    rows = [{"text": "The\u2028dog"}, {"messages": CHAT}]
    file = tmp_path / "rows.jsonl"
    lines = (json.dumps(row, ensure_ascii=False) for row in rows)
    file.write_text("\r\n\n".join(lines), encoding="utf-8", newline="")
    given = finetune.tokens_of(tokenizer, [file], [file], separator=1)
    first = [1, *tokenizer.encode("The\u2028dog", add_special_tokens=False)]
    assert given.stream[: len(first)].tolist() == first
    assert given.learn[: len(first)].all()
    rest, learn = given.stream[len(first) :], given.learn[len(first) :]
    assert rest[0] == 1
    assert not learn[0]
    # Runs of tokens that count, as text: each answer, and what ends it.
    edges = np.flatnonzero(np.diff(learn.astype(int), prepend=0, append=0)).reshape(-1, 2)
    end = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    said = []
    for begin, stop in edges:
        run = rest[begin:stop].tolist()
        assert run[-len(end) - 1 : -1] == end
        said.append(tokenizer.decode(run[: -len(end) - 1]))
    assert said == ["The lazy one.", "The quick one."]
    np.testing.assert_array_equal(given.held_out_learn, given.learn)
    windows = given.held_out_windows(8, 99)[:, 1:]
    counts = given.learn[1 : windows.size + 1].reshape(windows.shape)
    np.testing.assert_array_equal(windows >= 0, counts)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("[1]", 'must be an object with "text" or "messages"'),
        ('{"text": "a", "messages": []}', 'must be an object with "text" or "messages"'),
        ('{"text": 3}', "text=3 must be a string"),
        ('{"messages": 3}', "messages=3 must be a list of objects"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "must hold an assistant's answer"),
        ("{", "line 2"),
    ],
)
def test_a_line_that_is_neither_is_named(tmp_path, row, message):
    tokenizer = models.load_tokenizer(chat_folder(tmp_path / "model"))
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a"}\n' + row + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="rows.jsonl, line 2: ") as error:
        finetune.tokens_of(tokenizer, [file], [file])
    assert message in str(error.value)


def test_an_interrupted_run_ends_with_the_same_bits_and_its_model_loads(tmp_path):
    def tune(folder, report=lambda row: None):
        extra = {"extra_config": {"eos_token_id": 7}, "companions": {"tokenizer.json": b"{}"}}
        given = word_model(), SETTINGS, token_corpus()
        return finetune.fine_tune(folder, *given, rhythm=RHYTHM, report=report, **extra)

    def interrupt(row):
        if row["step"] == 4 and "learning_rate" in row:
            raise KeyboardInterrupt

    whole = tune(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        tune(tmp_path / "cut", interrupt)
    cut = tune(tmp_path / "cut")
    for name in ("losses", "evaluations", "held_out_bits_per_token", "identity"):
        assert cut[name] == whole[name]
    assert whole["data"] == {"description": "words", "tokens": 1092, "held_out_tokens": 1092}
    assert [row["step"] for row in whole["evaluations"]] == [0, 2, 4]
    assert whole["losses"][-1] < whole["losses"][0]
    found, other = (models.load_transformer(tmp_path / x / "model") for x in ("whole", "cut"))
    for x, y in zip(*(jax.tree.leaves(nnx.state(m)) for m in (found, other)), strict=True):
        np.testing.assert_array_equal(x, y)
    assert models.read_config(tmp_path / "cut" / "model")["eos_token_id"] == 7
    assert (tmp_path / "cut" / "model" / "tokenizer.json").read_bytes() == b"{}"


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="vocab_size=320 must be 256 for a Corpus, which holds"):
        finetune.fine_tune(tmp_path, word_model(), SETTINGS, corpus())
    with pytest.raises(ValueError, match="token 320 must be below 320"):
        finetune.Trainer(word_model(), SETTINGS, np.full(600, 320, np.int32))
    with pytest.raises(ValueError, match="packed=True needs pooled attention"):
        finetune.Trainer(tiny_model(), SETTINGS, corpus().stream, packed=True)
    with pytest.raises(ValueError, match="packed=True needs a separator"):
        finetune.Trainer(word_model(), SETTINGS, tokens(), pooled=EXACT, packed=True)
    few = finetune.TokenCorpus(tokens(), tokens()[:256])
    with pytest.raises(ValueError, match="256 held-out tokens must be more than context=256"):
        finetune.fine_tune(tmp_path, word_model(), SETTINGS, few)


def test_texts_begin_with_the_separator(tmp_path):
    for name, content in (("a.txt", "The dog"), ("b.txt", "A fox")):
        (tmp_path / name).write_text(content, encoding="utf-8")
    tokenizer = models.load_tokenizer(tokenizer_helpers.folder("byte_level", tmp_path / "model"))
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    given = finetune.tokens_of(tokenizer, files[:1], files[1:], separator=2)
    plain = tokenizer.encode("The dog", add_special_tokens=False)
    assert given.stream.tolist() == [2, *plain]
    assert given.held_out[0] == given.separator == 2
    usual = finetune.tokens_of(tokenizer, files[:1], files[1:])
    assert usual.stream.tolist() == tokenizer.encode("The dog")


@pytest.mark.slow
def test_the_command(tmp_path):
    """From a folder with a tokenizer and a text to a model that generates."""
    folder = tokenizer_helpers.folder("byte_level", tmp_path / "start")
    models.save(word_model(), folder, extra_config={"eos_token_id": 1})
    (tmp_path / "text.txt").write_bytes(text(0, 6000))
    base = ["train", "--model", str(folder), "--out", str(tmp_path / "out")]
    options = "--context 64 --batch 2 --steps 2 --log-every 1 --evaluate-windows 2"
    result = command(*base, *options.split())
    assert result.exit_code == 2
    assert "--data is needed: model" in result.stderr
    plot = tmp_path / "loss.png"
    data = ["--data", str(tmp_path / "text.txt"), "--plot", str(plot)]
    result = command(*base, *options.split(), *data)
    assert result.exit_code == 0, result.stderr
    assert "tokens of text" in result.stdout
    assert "held out, with this attention" in result.stdout
    assert "bits per token" in result.stdout
    assert plot.stat().st_size > 5000
    log = json.loads((tmp_path / "out" / "log.json").read_text(encoding="utf-8"))
    assert finetune.unit(log) == "token"
    generate = ["generate", "ab", "--max-new-tokens", "2", "--json"]
    result = command(*generate, "--model", str(tmp_path / "out" / "model"))
    assert result.exit_code == 0, result.stderr
