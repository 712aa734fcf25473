"""Fine-tuning at a long context: data, rates, a run that is killed and goes on, comparison."""

import dataclasses
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.training.finetune_helpers import SETTINGS, TINY, command, corpus, text, tiny_model
from turbojax import finetune, models
from turbojax.app import train
from turbojax.finetune import checkpoint, comparison, documents
from turbojax.levels import Threshold, TopK
from turbojax.models import pooled_by_name

POOLED = pooled_by_name("threshold", block_size=32)
KILLS = 8
RHYTHM = finetune.Rhythm(log_every=2, save_every=2, evaluate_every=0)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
    pytest.mark.usefixtures("no_orbax_log"),
]


def weights(folder: Path) -> list[np.ndarray]:
    model = models.load(folder / "model")
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(model))]


def tune(folder: Path, **options) -> dict:
    options = {"pooled": POOLED, "rhythm": RHYTHM, **options}
    return finetune.fine_tune(folder, tiny_model(), SETTINGS, corpus(), **options)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, dict]:
    """An uninterrupted pooled run."""
    folder = tmp_path_factory.mktemp("whole")
    logging.disable(logging.WARNING)
    log = tune(folder)
    logging.disable(logging.NOTSET)
    return folder, log


class TestSettings:
    def test_rate_rises_to_the_peak_and_falls_to_the_last(self):
        settings = finetune.Settings(steps=101, warmup_steps=10, learning_rate=2.0, final_rate=0.1)
        schedule = settings.schedule()
        rates = np.array([float(schedule(step)) for step in range(102)])
        np.testing.assert_allclose(rates[:10], 0.2 * np.arange(1, 11), rtol=1e-6)
        done = (np.arange(10, 102) - 10) / 91
        expected = 2.0 * (0.1 + 0.9 * np.cos(np.pi * done / 2) ** 2)
        np.testing.assert_allclose(rates[10:], expected, rtol=1e-5)

    @pytest.mark.parametrize(
        "change",
        [
            {"steps": 0},
            {"context": 0},
            {"batch_size": 0},
            {"learning_rate": -1.0},
            {"learning_rate": float("nan")},
            {"clip_norm": 0.0},
            {"final_rate": 2.0},
            {"precision": "int8"},
        ],
    )
    def test_bad_settings(self, change):
        with pytest.raises(ValueError, match=f"{next(iter(change))}=.*must be"):
            finetune.Settings(**change)

    def test_longer_context_keeps_fast_channels_and_stretches_the_slowest(self):
        longer = finetune.for_context(TINY, 256)
        assert longer.max_length == 256
        assert dataclasses.replace(longer, max_length=64, rope_theta=TINY.rope_theta) == TINY
        exponent = -np.arange(8) / 8
        ratio = (longer.rope_theta / TINY.rope_theta) ** exponent
        np.testing.assert_allclose(ratio[[0, -1]], [1.0, 1 / 4], rtol=1e-12)
        assert finetune.for_context(TINY, 64) is TINY
        some = finetune.for_context(dataclasses.replace(TINY, rotary_dim=8), 256)
        ratio = (some.rope_theta / TINY.rope_theta) ** (-np.arange(4) / 4)
        np.testing.assert_allclose(ratio[[0, -1]], [1.0, 1 / 4], rtol=1e-12)
        with pytest.raises(ValueError, match="2 rotated channels must be at least 4"):
            finetune.for_context(dataclasses.replace(TINY, head_dim=2), 256)

    def test_rhythm(self):
        rhythm = finetune.Rhythm(log_every=4, save_every=6, evaluate_every=0)
        stops = [0]
        while stops[-1] < 13:
            stops.append(rhythm.next_stop(stops[-1], 13))
        assert stops == [0, 4, 6, 8, 12, 13]
        with pytest.raises(ValueError, match="save_every=0 must be at least 1"):
            finetune.Rhythm(save_every=0)


class TestData:
    def test_folders_and_files(self, tmp_path):
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "one.txt").write_bytes(b"one")
        (tmp_path / "b" / "zero.bin").write_bytes(b"\0\1")
        (tmp_path / "b" / "latin.txt").write_bytes(b"caf\xe9")
        (tmp_path / "b" / ".hidden").write_bytes(b"hidden")
        (tmp_path / "a.txt").write_bytes(b"caf\xc3\xa9")
        assert documents.read_texts([tmp_path]) == [b"caf\xc3\xa9", b"one"]
        both = [tmp_path / "b" / "one.txt", tmp_path / "a.txt"]
        assert documents.read_texts(both) == [b"one", b"caf\xc3\xa9"]
        with pytest.raises(ValueError, match=r"zero\.bin must be UTF-8 text without byte 0"):
            documents.read_texts([tmp_path / "b" / "zero.bin"])
        with pytest.raises(FileNotFoundError):
            documents.read_texts([tmp_path / "c"])

    def test_the_end_is_held_out_where_nothing_else_is(self, tmp_path):
        file = tmp_path / "a.txt"
        file.write_bytes(text(0, 998))
        found = finetune.corpus_of([file])
        assert found.stream.tobytes() + found.held_out == b"\0" + text(0, 998) + b"\0"
        assert len(found.held_out) == 50
        other = tmp_path / "b.txt"
        other.write_bytes(b"other")
        found = finetune.corpus_of([file], [other])
        assert (found.stream.size, found.held_out) == (1000, b"other")
        (tmp_path / "empty").mkdir()
        with pytest.raises(ValueError, match="must hold text"):
            finetune.corpus_of([tmp_path / "empty"])

    def test_standard_library_without_what_is_held_out(self, tmp_path, monkeypatch):
        lines = [b"    line_%d_of_a_module = another_name_of_it" % i for i in range(40)]
        held_out, other = b"\n".join(lines[:20]), b"\n".join(lines[20:])
        (tmp_path / "heapq.py").write_bytes(held_out)
        (tmp_path / "copy.py").write_bytes(held_out + b"\n")
        (tmp_path / "other.py").write_bytes(other)
        monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
        found = finetune.standard_library_corpus()
        assert found.stream.tobytes() == b"\0" + other + b"\0"
        assert found.held_out == held_out
        (tmp_path / "heapq.py").unlink()
        with pytest.raises(FileNotFoundError, match="name some with --data"):
            finetune.standard_library_corpus()


# Trains like `tune` and kills itself when step 4 is logged; a checkpoint of step 2 is there, one of
# step 4 is not.
_KILLED = """
import os, signal, sys
from pathlib import Path
import jax
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
sys.path.insert(0, sys.argv[2])
from tests.training import test_finetune as here

def kill(row):
    if row["step"] == 4:
        deadline = os.times().elapsed + 60
        while not (Path(sys.argv[1]) / "checkpoints" / "2").is_dir():
            assert os.times().elapsed < deadline
        os.kill(os.getpid(), signal.SIGKILL)

here.tune(Path(sys.argv[1]), report=kill)
"""


_REPORTING = """
import sys
from pathlib import Path
import jax
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
sys.path.insert(0, sys.argv[2])
from tests.training import test_finetune as here

here.tune(Path(sys.argv[1]), report=lambda row: print(row["step"], flush=True))
"""


def start(script: str, folder: Path, **options) -> subprocess.Popen:
    """A process that tunes, with the programs that are compiled already."""
    root = Path(__file__).parents[2]
    programs = {
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.Popen(
        [sys.executable, "-c", script, str(folder), str(root)],
        env={**os.environ, **programs},
        text=True,
        **options,
    )


class TestRun:
    @pytest.mark.fuzz
    def test_log_and_model(self, whole):
        folder, log = whole
        assert json.loads((folder / "log.json").read_text()) == log
        assert len(log["losses"]) == 5
        assert log["losses"][0] == pytest.approx(8, abs=2)
        assert log["losses"][-1] < log["losses"][0] - 0.3
        assert [row["step"] for row in log["records"]] == [2, 4, 5]
        seconds = [row["seconds"] for row in log["records"]]
        assert seconds == sorted(seconds)
        assert all(0 < row["density"] < 1 for row in log["records"])
        assert log["identity"]["attention"]["kind"] == "pooled"
        assert set(log["held_out_bits_per_byte"]) == {"run", "dense"}
        model = models.load(folder / "model")
        assert model.config == finetune.for_context(TINY, 256)
        config = json.loads((folder / "model" / "config.json").read_text())
        assert config["max_position_embeddings"] == 256

    @pytest.mark.slow
    def test_a_killed_run_goes_on_to_the_same_bits(self, whole, tmp_path):
        run = start(_KILLED, tmp_path, stderr=subprocess.PIPE)
        errors = run.communicate()[1]
        assert run.returncode == -signal.SIGKILL, errors
        assert not (tmp_path / "model").exists()
        rows = []
        log = tune(tmp_path, report=rows.append)
        assert rows[0] == {"step": 2, "resumed": True}
        assert log["losses"] == whole[1]["losses"]
        assert [row["step"] for row in log["records"]] == [2, 4, 5]
        assert log["held_out_bits_per_byte"] == whole[1]["held_out_bits_per_byte"]
        for one, two in zip(weights(whole[0]), weights(tmp_path), strict=True):
            np.testing.assert_array_equal(one, two)

    @pytest.mark.fuzz
    def test_killed_at_random_moments(self, whole, tmp_path, count):
        """After so many of its reports, of which the first says where it begins, and some time."""
        rng, starts = np.random.default_rng(0), []
        for i in range(KILLS):
            run = start(_REPORTING, tmp_path, stdout=subprocess.PIPE)
            reports = [run.stdout.readline() for _ in range(1 + i % 4)]
            starts.append(int(reports[0]))
            time.sleep(rng.uniform(0, 0.2))
            run.kill()
            run.communicate()
            assert run.returncode in (0, -signal.SIGKILL)
        assert starts == sorted(starts)
        assert starts[-1] > 0
        log = tune(tmp_path)
        assert log["losses"] == whole[1]["losses"]
        for one, two in zip(weights(whole[0]), weights(tmp_path), strict=True):
            np.testing.assert_array_equal(one, two)
        count(f"killed training: {KILLS} kills, begun at steps {starts}, the same bits")

    @pytest.mark.slow
    def test_a_second_run_is_refused_and_the_first_goes_on(self, tmp_path):
        """At once, before it reads a model or a text; see also `_writing.exclusive`."""
        seen = []

        def report(row):
            if not seen:
                seen.append(command("train", "--out", str(tmp_path), "--model", "/no/such/model"))
                with pytest.raises(BlockingIOError, match="being written by another program"):
                    tune(tmp_path)

        tune(tmp_path, report=report)
        assert seen[0].exit_code == 2
        assert seen[0].stderr.count("\n") == 1
        assert f"'{tmp_path}' is being written by another program (process" in seen[0].stderr
        assert (tmp_path / "model" / "config.json").exists()
        assert not (tmp_path / ".turbojax-lock").exists()

    @pytest.mark.slow
    def test_a_folder_is_one_run(self, whole):
        with pytest.raises(
            ValueError, match=r"holds another run, with attention\.kind=.*choose another folder"
        ):
            tune(whole[0], pooled=None)
        other = models.Transformer(TINY, rngs=nnx.Rngs(2))
        with pytest.raises(ValueError, match="holds another run, with start_sha256="):
            finetune.fine_tune(whole[0], other, SETTINGS, corpus(), pooled=POOLED)
        with pytest.raises(ValueError, match="holds another run, with held_out_sha256="):
            tune(whole[0], rhythm=finetune.Rhythm(evaluate_windows=1))
        short = finetune.Corpus(corpus().stream, b"abc", "")
        with pytest.raises(
            ValueError, match="3 bytes of held-out text must be at least context=256"
        ):
            finetune.fine_tune(whole[0], tiny_model(), SETTINGS, short)


def log_of(losses, seconds, *, density=1.0, kind="dense") -> dict:
    steps = len(losses)
    return {
        "identity": {
            "settings": {"context": 256, "batch_size": 2},
            "model": {},
            "stream_sha256": "",
            "attention": {"kind": kind},
        },
        "environment": {"device": "cpu"},
        "losses": list(losses),
        "records": [
            {"step": steps // 2, "seconds": seconds / 2, "density": density},
            {"step": steps, "seconds": seconds, "density": density},
        ],
        "evaluations": [{"step": steps, "held_out_bits_per_byte": 2.0}],
        "held_out_bits_per_byte": {"run": 2.0},
    }


class TestCheckpoints:
    def test_a_damaged_one_is_refused_and_the_one_before_goes_on(self, tmp_path):
        """The bits that change lie in the weights, of which Orbax keeps no checksum."""
        rng = np.random.default_rng(0)
        trees = {step: {"weight": jnp.asarray(rng.normal(size=4000))} for step in (3, 7)}
        with checkpoint.checkpoint_manager(tmp_path) as manager:
            for step, tree in trees.items():
                checkpoint.save_tree(manager, step, tree)
        largest = max((tmp_path / "7").rglob("*"), key=lambda path: path.stat().st_size)
        data = largest.read_bytes()
        reasons = []
        for place in range(len(data) // 4, len(data) * 3 // 4, len(data) // 20):
            largest.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            with (
                checkpoint.checkpoint_manager(tmp_path) as manager,
                pytest.raises(ValueError, match="checkpoint .*7 cannot be read") as refused,
            ):
                checkpoint.restore_tree(manager, trees[7])
            reasons.append(str(refused.value))
        assert all(x.endswith("if you remove it, training goes on from step 3") for x in reasons)
        assert any("its numbers are not those that were written" in x for x in reasons)

        shutil.rmtree(tmp_path / "7")
        with checkpoint.checkpoint_manager(tmp_path) as manager:
            step, found = checkpoint.restore_tree(manager, trees[7])
        assert step == 3
        np.testing.assert_array_equal(found["weight"], trees[3]["weight"])


class TestComparison:
    def test_figures(self):
        dense = log_of([4.0, 3.0, 2.0, 2.0], 8.0)
        pooled = log_of([4.0, 3.0, 3.0, 2.1], 2.0, density=0.25, kind="pooled")
        pooled["held_out_bits_per_byte"]["run"] = 2.02
        row = finetune.compare(dense, pooled, width=2)["comparison"]
        ratios = np.array([3.5 / 3.5, 3.0 / 2.5, 2.55 / 2.0])
        assert row["final_ratio"] == pytest.approx(ratios[-1])
        assert row["largest_ratio"] == pytest.approx(ratios.max())
        assert row["mean_ratio"] == pytest.approx(ratios.mean(), abs=1e-5)
        assert (row["speedup"], row["seconds_saved"], row["density"]) == (4.0, 6.0, 0.25)
        pooled["records"] = [{**row, "density": 0.5 / row["step"]} for row in pooled["records"]]
        pooled["records"][0]["step"] = 3
        row = finetune.compare(dense, pooled, width=2)["comparison"]
        assert row["density"] == pytest.approx((3 * 0.25 + 0.125) / 4)
        assert row["held_out_ratio"] == pytest.approx(1.01)

    def test_runs_of_different_length_are_compared_where_both_are(self):
        row = finetune.compare(log_of([4.0] * 4, 8.0), log_of([4.0] * 2, 2.0))["comparison"]
        assert (row["steps"], row["seconds"]) == (2, [4.0, 2.0])

    def test_other_data_cannot_be_compared(self):
        other = log_of([4.0], 1.0)
        other["identity"]["stream_sha256"] = "1"
        with pytest.raises(ValueError, match="stream_sha256 of the runs must be the same"):
            finetune.compare(log_of([4.0], 1.0), other)

    def test_a_field_that_models_got_later_does_not_matter(self):
        old, new = log_of([4.0], 1.0), log_of([4.0], 1.0)
        old["identity"]["model"] = {"vocab_size": 256}
        new["identity"]["model"] = {"vocab_size": 256, "experts": None}
        finetune.compare(old, new)
        new["identity"]["model"]["experts"] = {"count": 8}
        with pytest.raises(ValueError, match="model of the runs must be the same"):
            finetune.compare(old, new)

    def test_no_log(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            comparison.read_log(tmp_path)
        (tmp_path / "log.json").write_text("{}")
        with pytest.raises(ValueError, match="must be the log of a run"):
            comparison.read_log(tmp_path)


class TestCommands:
    def test_defaults_of_pooled_training(self):
        nothing = dict.fromkeys(("window", "bounds", "near", "samples"))

        def chosen(policy=None, **choice):
            return train._pooled("pooled", policy, None, None, {**nothing, **choice}).policy

        assert chosen() == chosen("threshold") == Threshold((0.7, 0.85, 0.93, 0.98), near=256)
        assert chosen(near=0) == Threshold((0.7, 0.85, 0.93, 0.98))
        bounds = (0.62, 0.77, 0.89, 0.97)
        assert chosen(bounds=bounds) == Threshold(bounds)
        assert chosen("topk") == TopK()

    @pytest.mark.fuzz
    def test_train_twice_and_compare(self, tmp_path):
        models.save(tiny_model(), tmp_path / "start")
        (tmp_path / "words.txt").write_bytes(text(0, 6000))
        options = "--context 256 --batch 2 --steps 2 --log-every 1"
        pooled = ["--block-size", "32", "--policy", "window", "--window", "64"]
        base = ["train", "--data", str(tmp_path / "words.txt"), "--model", str(tmp_path / "start")]
        pooled += ["--packed"]
        for kind in ("dense", "pooled"):
            out = str(tmp_path / kind)
            plot = ["--plot", f"{out}.png", "--evaluate-every", "1" if kind == "dense" else "0"]
            plot += pooled if kind == "pooled" else []
            result = command(*base, *options.split(), "--attention", kind, "--out", out, *plot)
            assert result.exit_code == 0, result.stderr
            assert "held out, with this attention" in result.stdout
            assert (tmp_path / f"{kind}.png").stat().st_size > 5000
        # A prompt longer than the context that the model had at first.
        prompt = ["generate", "a" * 200, "--max-new-tokens", "1", "--json"]
        result = command(*prompt, "--model", str(tmp_path / "pooled" / "model"))
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["prompt_tokens"] == 201
        log = comparison.read_log(tmp_path / "pooled")
        # Eight blocks. A block's nearest key is 32 (i - j) - 31 tokens away: up to 64, that is
        # i - j = 2, level 1; then 8. Block 0 has level 1.
        rows = [min(i + 1, 4) + max(i - 3, 0) / 8 for i in range(8)]
        assert log["records"][-1]["density"] == pytest.approx(sum(rows) / 36, abs=1e-5)
        log = comparison.read_log(tmp_path / "dense")
        assert [row["step"] for row in log["evaluations"]] == [0, 1, 2]
        assert log["identity"]["settings"]["precision"] == "float32"

        picture, figures = tmp_path / "both.png", tmp_path / "both.json"
        files = ["--plot", str(picture), "--write", str(figures)]
        result = command("compare", str(tmp_path / "dense"), str(tmp_path / "pooled"), *files)
        assert result.exit_code == 0, result.stderr
        assert "times as fast" in result.stdout
        assert picture.stat().st_size > 5000
        assert json.loads(figures.read_text())["comparison"]["steps"] == 2

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ("--attention sparse", "attention 'sparse' must be dense or pooled"),
            ("--attention pooled --policy best", "policy 'best' must be one of"),
            ("--attention dense --window 3", "are for --attention pooled, not dense"),
            ("--attention dense --near 3", "are for --attention pooled, not dense"),
            ("--attention pooled --policy window --near 3", "near=3 is for other policies"),
            ("--attention pooled --bounds 1,2", "must be four, of the levels 1, 2, 4 and 8"),
            ("--attention pooled --bounds a", "--bounds='a' must be four numbers with commas"),
            ("--attention pooled --near -1", "near=-1 must be at least 0"),
            ("--attention pooled --samples 0", "query_samples=0 must be"),
            ("--attention pooled --policy topk --window 3", "window=3 is for policy 'window'"),
            ("--steps 0", "steps=0 must be at least 1"),
            ("--packed", "--packed is for --attention pooled, not dense"),
            ("--held-out x", "--held-out is for --data"),
            ("--data /nowhere/at/all", "No such file"),
        ],
    )
    def test_errors(self, tmp_path, options, message):
        result = command("train", "--out", str(tmp_path), *options.split())
        assert result.exit_code == 2
        assert message in result.stderr

    def test_no_runs_to_compare(self, tmp_path):
        result = command("compare", str(tmp_path), str(tmp_path))
        assert result.exit_code == 2
        assert "log.json" in result.stderr
