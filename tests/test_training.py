"""The corpus's filters, the order of the data, and a training run that is cut off and resumed."""

import dataclasses
import email
import hashlib
import json
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from training import corpus, report, train_embedded_model
from training.state import Settings, Trainer, window_starts
from turbojax.finetune.checkpoint import checkpoint_manager
from turbojax.finetune.documents import (
    Document,
    HeldOut,
    reason_to_drop,
    select,
    standard_library,
)
from turbojax.finetune.evaluate import bits_per_byte, windows
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


def metadata(**fields):
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    return email.message_from_string("\n".join(lines))


class TestLicences:
    @pytest.mark.parametrize(
        "fields",
        [
            {"License_Expression": "MIT"},
            {"License_Expression": "BSD-3-Clause AND (Apache-2.0 OR MIT)"},
            {"License": "BSD 3-Clause"},
            {"License": "Apache License, Version 2.0"},
            {"License": "Apache 2.0 License"},
            {"Classifier": "License :: OSI Approved :: Python Software Foundation License"},
            # An expression decides even where an old field says nothing useful.
            {"License_Expression": "ISC", "License": "see file"},
        ],
    )
    def test_permissive(self, fields):
        assert corpus.permissive_licence(metadata(**fields))

    @pytest.mark.parametrize(
        "fields",
        [
            {},
            {"License": "see LICENSE"},
            {"License": "GPL-3.0"},
            {"License_Expression": "LGPL-2.1-or-later"},
            {"License_Expression": "MIT AND MPL-2.0"},
            {"License_Expression": "LicenseRef-NVIDIA-Proprietary"},
            {"License": "NVIDIA Proprietary Software"},
            {"Classifier": "License :: OSI Approved :: GNU General Public License (GPL)"},
            {"Classifier": "License :: Other/Proprietary License"},
            {"Classifier": "License :: OSI Approved"},
            {"License_Expression": "AGPL-3.0-only", "License": "MIT"},
        ],
    )
    def test_not_permissive(self, fields):
        assert corpus.permissive_licence(metadata(**fields)) is None


def code(seed: int, lines: int = 40) -> bytes:
    """Lines long enough to count as text that was copied."""
    rows = (
        f"    result_{seed}_{i} = function_of_module(seed_{seed}, line_{i})" for i in range(lines)
    )
    return "\n".join(rows).encode()


def document(name: str, data: bytes) -> Document:
    return Document("package 1.0", "MIT", name, data)


class TestSelection:
    def test_drops_what_resembles_a_held_out_module(self):
        held_out = HeldOut({"textwrap.py": code(1)})
        near_copy = code(2, 100) + b"\n" + b"\n".join(code(1).splitlines()[:9])
        quotation = code(2, 100) + b"\n" + b"\n".join(code(1).splitlines()[:8])
        documents = [
            document("other/textwrap.py", code(3)),
            document("vendored_copy.py", near_copy),
            document("quotation.py", quotation),
        ]
        kept, dropped, resembling = select(documents, held_out)
        assert [d.name for d in kept] == ["quotation.py"]
        assert dropped == {"held out": 2}
        assert len(resembling) == 2

    @pytest.mark.parametrize(
        ("name", "data", "reason"),
        [
            ("a.py", b"x = 1\n", "size"),
            ("a.py", code(1, 20_000), "size"),
            ("pip/_vendor/distro.py", code(1), "vendored"),
            ("a.py", b"# GNU Lesser General Public License\n" + code(1), "licence notice"),
            ("a.py", b"# caf\xe9\n" + code(1), "not UTF-8"),
            ("a.py", b"\0" + code(1), "not text"),
            ("a.py", b"table = [" + b"123, " * 100 + b"]", "generated"),
            ("a.py", b'text = "' + b"a" * 2000 + b'"', "generated"),
            ("a.py", code(1), None),
        ],
    )
    def test_reasons(self, name, data, reason):
        assert reason_to_drop(document(name, data)) == reason

    def test_copies_are_kept_once_and_order_depends_on_contents_alone(self):
        documents = [document(f"{i}.py", code(i)) for i in range(5)]
        again = [document("copy.py", code(0)), *reversed(documents)]
        first = select(documents, HeldOut({}))[0]
        second, dropped, _ = select(again, HeldOut({}))
        assert dropped == {"copy": 1}
        stream = corpus.pack(first)
        np.testing.assert_array_equal(stream, corpus.pack(second))
        assert stream[0] == stream[-1] == 0
        assert sorted(stream.tobytes().strip(b"\0").split(b"\0")) == sorted(d.data for d in first)

    def test_repeats(self):
        twice = corpus.pack([document("a.py", code(1))], repeats={"package 1.0": 2})
        assert twice.tobytes() == (b"\0" + code(1)) * 2 + b"\0"

    def test_standard_library_and_packages_are_found(self):
        names = {d.name for d, _ in zip(standard_library(), range(50), strict=False)}
        assert all(name.endswith(".py") and "site-packages" not in name for name in names)
        package = next(iter(corpus.installed_packages()))
        assert package.licence
        assert package.name.endswith(".py")


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


@pytest.fixture
def no_orbax_log():
    """No log from orbax's threads, which outlives the test's streams."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


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
    monkeypatch.setattr(train_embedded_model, "MODEL", TINY)
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
    for a, b in zip(
        jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(second)), strict=True
    ):
        np.testing.assert_array_equal(a, b)

    folder = tmp_path / "second" / "model"
    report.write(folder, [log, second_log], manifest)
    card = (folder / "README.md").read_text()
    assert "| p 1 | MIT | 1 | 2 |" in card
    assert "Phase 2: 128 bytes" in card
    assert "--steps 2" in card
    assert (folder / report.CURVE_NAME).stat().st_size > 5000


def test_shipped_card_is_made_from_the_kept_logs():
    results = Path(__file__).parents[1] / "benchmarks" / "results"
    logs = report.read_logs(results / "embedded_training_2026-11-21.json")
    manifest = json.loads((embedded_path() / report.DATA_NAME).read_text())
    assert report.model_card(logs, manifest) == (embedded_path() / "README.md").read_text()
    weights = (embedded_path() / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == logs[-1]["weights_sha256"]
