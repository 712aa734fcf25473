"""The order of the data, the optimizers, and a training run that is cut off and resumed."""

import dataclasses
import functools
import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from training import pace, report, state, train_embedded_model
from training.shapes import EMBEDDED, SHAPES
from training.state import Settings, Trainer, window_starts
from turbojax.finetune.checkpoint import checkpoint_manager
from turbojax.finetune.evaluate import bits_per_byte, windows
from turbojax.finetune.optimizer import OPTIMIZERS, default_promotion
from turbojax.models import Transformer, TransformerConfig, embedded_path, load

TINY = TransformerConfig(
    vocab_size=256,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_length=64,
    tie_embeddings=True,
)
SETTINGS = Settings(
    steps=4,
    tokens_per_step=64,
    short_context=16,
    long_context=32,
    long_fraction=0.5,
    warmup_steps=2,
    precision="float32",
)


class TestShapes:
    def test_names_are_sizes(self):
        sizes = {name: round(shape.num_parameters / 1e6) for name, shape in SHAPES.items()}
        assert sizes == {EMBEDDED: 8, "32m": 32, "59m": 59}

    def test_slowest_channels_turn_no_further_than_the_embedded_models(self):
        small = SHAPES[EMBEDDED]
        for shape in SHAPES.values():
            rotated = shape.max_length * shape.rope_theta ** (2 / shape.head_dim - 1)
            assert rotated <= small.max_length * small.rope_theta ** (2 / small.head_dim - 1)


@pytest.mark.fuzz
def test_muon_moves_matrices_by_orthogonal_updates():
    """Against numpy's singular vectors: all singular values between those of five iterations."""
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(2, 6, 12)).astype(np.float32)
    scale = rng.normal(size=(2, 6)).astype(np.float32)
    params = {"a": {"kernel": jnp.zeros((2, 6, 12))}, "scale": jnp.zeros((2, 6))}
    optimizer = OPTIMIZERS["muon"](lambda step: 0.5, weight_decay=0.0, clip_norm=1e9)
    with default_promotion():
        updates, _ = optimizer.update(
            {"a": {"kernel": jnp.asarray(kernel)}, "scale": jnp.asarray(scale)},
            optimizer.init(params),
            params,
        )
    for one, gradient in zip(np.asarray(updates["a"]["kernel"]), kernel, strict=True):
        u, _, vt = np.linalg.svd(gradient.astype(np.float64), full_matrices=False)
        along = np.diag(u.T @ one @ vt.T) / (-0.5 * 0.2 * np.sqrt(12))
        assert (along > 0.6).all()
        assert (along < 1.3).all()
        np.testing.assert_allclose(u.T @ one @ vt.T, np.diag(np.diag(u.T @ one @ vt.T)), atol=1e-4)
    # The first step of Adam is the sign of the gradient, by Nesterov's look ahead 1.47 times.
    nesterov = 1 + 0.9 * 0.1 / (1 - 0.9**2)
    np.testing.assert_allclose(updates["scale"], -0.5 * nesterov * np.sign(scale), rtol=1e-4)


class TestOrder:
    def test_an_epoch_visits_every_window_once(self):
        settings = Settings(
            steps=100, tokens_per_step=64, short_context=16, long_context=32, long_fraction=0.0
        )
        num_bytes = 16 * 41 + 1  # 40 windows: ten steps of four
        starts = np.concatenate([window_starts(settings, step, num_bytes) for step in range(10)])
        assert len(set(starts.tolist())) == 40
        assert len(set((starts % 16).tolist())) == 1
        assert starts.min() >= 0
        assert starts.max() + 16 < num_bytes
        later = np.concatenate([window_starts(settings, s, num_bytes) for s in range(10, 20)])
        assert not np.array_equal(starts, later)
        np.testing.assert_array_equal(window_starts(settings, 3, num_bytes), starts[12:16])

    def test_context_grows(self):
        assert [SETTINGS.context(step) for step in range(4)] == [16, 16, 32, 32]
        assert window_starts(SETTINGS, 1, 1000).shape == (4,)
        assert window_starts(SETTINGS, 2, 1000).shape == (2,)

    def test_three_contexts(self):
        settings = dataclasses.replace(
            SETTINGS, steps=10, longest_context=64, longest_fraction=0.2, long_fraction=0.3
        )
        assert [settings.context(step) for step in range(10)] == [16] * 5 + [32] * 3 + [64] * 2
        # Each phase begins its data anew.
        assert window_starts(settings, 8, 1000).shape == (1,)
        alone = dataclasses.replace(SETTINGS, short_context=64)
        np.testing.assert_array_equal(
            window_starts(settings, 9, 1000), window_starts(alone, 1, 1000)
        )

    def test_schedule_rises_and_falls_to_zero(self):
        schedule = Settings(steps=100, warmup_steps=10, decay_fraction=0.5).schedule()
        rates = np.array([float(schedule(step)) for step in range(101)])
        np.testing.assert_allclose(rates[[9, 30, 50, 100]], [3e-3, 3e-3, 3e-3, 0], atol=1e-9)
        assert (np.diff(rates[:10]) > 0).all()
        assert (np.diff(rates[50:]) < 0).all()

    def test_linear_decay(self):
        settings = Settings(steps=10, warmup_steps=2, decay_fraction=1.0, decay_shape="linear")
        rates = [float(settings.schedule()(step)) / 3e-3 for step in (0, 1, 5, 9)]
        np.testing.assert_allclose(rates, [0.5, 0.9, 0.5, 0.1], rtol=1e-6)

    def test_seed_changes_the_order(self):
        other = dataclasses.replace(SETTINGS, seed=1)
        assert not np.array_equal(window_starts(SETTINGS, 0, 3000), window_starts(other, 0, 3000))

    @pytest.mark.parametrize(
        "change",
        [
            {"steps": 0},
            {"tokens_per_step": 100},
            {"long_fraction": 1.5},
            {"decay_fraction": -0.1},
            {"decay_shape": "cosine"},
            {"optimizer": "sgd"},
            {"long_fraction": 0.7, "longest_fraction": 0.5},
            {"longest_fraction": 0.1, "longest_context": 100},
        ],
    )
    def test_bad_settings(self, change):
        with pytest.raises(ValueError, match="must be"):
            Settings(**{"steps": 10, **change})

    def test_stream_too_short(self):
        with pytest.raises(ValueError, match="num_bytes=40 must be more than twice context=32"):
            window_starts(SETTINGS, 3, 40)


def test_windows_cover_the_file_and_start_with_the_separator():
    cut = windows(bytes(range(1, 11)), 4)
    assert cut.tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    with pytest.raises(ValueError, match="must have at least context=11"):
        windows(bytes(10), 11)


def code(seed: int, lines: int = 40) -> bytes:
    """A text like any other module's."""
    rows = (
        f"    result_{seed}_{i} = function_of_module(seed_{seed}, line_{i})" for i in range(lines)
    )
    return "\n".join(rows).encode()


@pytest.fixture(scope="module")
def stream():
    return np.frombuffer(b"\0".join(code(i) for i in range(10)), np.uint8)


def leaves(trainer: Trainer) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves((trainer.params, trainer.opt_state))]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.usefixtures("no_orbax_log")
def test_resuming_equals_an_uninterrupted_run_bit_for_bit(tmp_path, stream):
    settings = dataclasses.replace(SETTINGS, long_fraction=0.0)  # one context, one compilation
    whole = Trainer(TINY, settings, stream)
    losses = [float(whole.run_step()["bits_per_byte"]) for _ in range(2)]
    with checkpoint_manager(tmp_path) as manager:
        whole.save(manager)
    losses += [float(whole.run_step()["bits_per_byte"]) for _ in range(2)]
    assert np.isfinite(losses).all()
    assert losses[0] == pytest.approx(8, abs=1)

    resumed = Trainer(TINY, settings, stream)
    with checkpoint_manager(tmp_path) as manager:
        assert resumed.restore(manager)
    assert resumed.step == 2
    assert [float(resumed.run_step()["bits_per_byte"]) for _ in range(2)] == losses[2:]
    for a, b in zip(leaves(whole), leaves(resumed), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_starting_from_a_model_of_another_shape(stream):
    other = dataclasses.replace(TINY, num_layers=1)
    with pytest.raises(ValueError, match=r"num_layers=1.*must have Transformer.*num_layers=2"):
        Trainer(TINY, SETTINGS, stream, init=Transformer(other, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
    ("change", "devices", "error"),
    [
        ({"long_context": 64, "tokens_per_step": 64, "longest_context": 128}, 1, None),
        ({"long_context": 128, "tokens_per_step": 128}, 1, "128 must be at most max_length=64"),
        ({}, 10_000, "devices=10000 must be from 1 to"),
    ],
)
def test_steps_that_do_not_fit(stream, change, devices, error):
    settings = dataclasses.replace(SETTINGS, **change)
    if error is None:
        state._check_fits(TINY, settings, devices)
        return
    with pytest.raises(ValueError, match=error):
        Trainer(TINY, settings, stream, devices=devices)


@pytest.mark.slow
def test_minutes_are_measured_once(tmp_path, stream, capsys):
    settings = dataclasses.replace(
        SETTINGS, steps=1, long_fraction=0.25, longest_fraction=0.25, longest_context=64
    )
    make = functools.partial(Trainer, TINY, stream=stream)
    found = pace.for_minutes(0.01, settings, make, tmp_path)
    kept = json.loads((tmp_path / pace.PACE_NAME).read_text())
    each = kept["seconds_per_step"]
    mean = 0.5 * each["16"] + 0.25 * each["32"] + 0.25 * each["64"]
    assert found == dataclasses.replace(settings, steps=max(1, int(0.6 / mean)))
    assert "context 64: " in capsys.readouterr().out

    assert pace.for_minutes(0.01, settings, None, tmp_path) == found  # nothing is measured
    with pytest.raises(ValueError, match="must be 2 with"):
        pace.for_minutes(2, settings, None, tmp_path)
    with pytest.raises(ValueError, match="minutes=0 must be positive"):
        pace.for_minutes(0, settings, None, tmp_path)


def train(folder, *options: str) -> tuple[dict, Transformer]:
    """Runs the command on the corpus in `folder`: the log, and the exported model."""
    sizes = "--tokens-per-step 64 --short-context 16 --long-context 32 --precision float32"
    rhythm = "--log-every 2 --warmup-steps 2 --evaluate-every 2 --unroll 1"
    arguments = ["--out", str(folder), *sizes.split(), *rhythm.split(), *options]
    train_embedded_model.main(arguments)
    return json.loads((folder / "log.json").read_text()), load(folder / "model")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.usefixtures("no_orbax_log")
def test_command_trains_exports_and_starts_from_an_export(tmp_path, monkeypatch, stream):
    held_out = {"a.py": code(100)}
    monkeypatch.setitem(train_embedded_model.SHAPES, EMBEDDED, TINY)
    monkeypatch.setattr(train_embedded_model, "EVAL_CONTEXTS", (32,))
    monkeypatch.setattr(train_embedded_model, "read_held_out", lambda names: held_out)
    package = {"package": "p 1", "licence": "MIT", "files": 1, "bytes": 2}
    manifest = {"total_bytes": 2, "repeats": {"p 1": 3}, "held_out": [], "packages": [package]}
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "corpus.npy", stream)
        (tmp_path / name / "corpus.json").write_text(json.dumps(manifest))

    log, model = train(tmp_path / "first", *["--steps", "2", "--long-fraction", "0"])
    assert [row["step"] for row in log["records"]] == [2]
    assert [row["context"] for row in log["evaluations"]] == [16]
    assert log["tokens_seen"] == 128
    assert log["init_sha256"] is None
    assert model.config == TINY
    assert model.dtype == jnp.bfloat16
    again = bits_per_byte(model, held_out, 32)
    assert again["all"] == pytest.approx(log["held_out_bits_per_byte"]["32"]["all"], rel=1e-6)

    # A rate of 0: what comes out is what it started from.
    exported = tmp_path / "first" / "model"
    options = "--steps 2 --long-fraction 1 --learning-rate 0 --decay-shape linear --seed 1"
    options = ["--init", str(exported), *options.split()]
    second_log, second = train(tmp_path / "second", *options)
    assert [row["context"] for row in second_log["records"]] == [32]
    assert len(second_log["init_sha256"]) == 64
    assert f"--init {exported}" in second_log["command"]
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(second))

    folder = tmp_path / "second" / "model"
    report.write(folder, [log, second_log], manifest)
    card = (folder / "README.md").read_text()
    assert "| p 1 | MIT | 1 | 2 |" in card
    assert "Phase 2: 128 bytes" in card
    assert "--steps 2" in card
    assert (folder / report.CURVE_NAME).stat().st_size > 5000


def test_shipped_card_is_made_from_the_kept_logs():
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    logs = report.read_logs(results / "embedded_training_2026-11-21.json")
    manifest = json.loads((embedded_path() / report.DATA_NAME).read_text())
    assert report.model_card(logs, manifest) == (embedded_path() / "README.md").read_text()
    weights = (embedded_path() / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == logs[-1]["weights_sha256"]
