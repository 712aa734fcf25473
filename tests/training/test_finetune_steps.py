"""Steps of fine-tuning: in parts, by each optimizer and schedule, and resumed to the bit."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.training.finetune_helpers import SETTINGS, command, corpus, tiny_model
from turbojax import finetune, models
from turbojax.finetune import base, checkpoint
from turbojax.finetune.base import in_parts
from turbojax.finetune.log import Log
from turbojax.finetune.optimizer import OPTIMIZERS, default_promotion
from turbojax.finetune.settings import with_defaults
from turbojax.models.lora import Adapter

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

SETTINGS = dataclasses.replace(SETTINGS, context=64, batch_size=4, steps=4)
STEPS = 4
EXACT = models.pooled_by_name("window", window=SETTINGS.context, block_size=32)
"""Pooled attention that pools nothing."""
ROOT = Path(__file__).parents[2]


def learn(size: int) -> np.ndarray:
    """By stretches of a window's length none of the tokens, a quarter, a half, and most of them."""
    share = np.arange(size) // SETTINGS.context % 4 / 4
    return np.random.default_rng(0).random(size) < share


def gradient(run: finetune.Trainer, parts: int):
    """Loss and gradient of the first step in so many parts."""
    _, _, *given = run._arguments(0)
    settings = dataclasses.replace(run.settings, accumulate=parts)
    find = jax.jit(in_parts(run._make_loss(), settings, beside=jnp.zeros(())))
    (value, _), grads = find(run.params, *given)
    return float(value), jax.tree.leaves(grads)


def each_sequence(run: finetune.Trainer, mask: np.ndarray | None):
    """The same from the logits of one sequence after the other, added in float64."""
    graph = nnx.graphdef(run.model())

    def total(params, tokens, counts):
        log_p = jax.nn.log_softmax(nnx.merge(graph, params)(tokens[None, :-1])[0])
        chosen = jnp.take_along_axis(log_p, tokens[1:, None], axis=1)[:, 0]
        return -jnp.sum(jnp.where(counts, chosen, 0.0))

    find, stream = jax.jit(jax.value_and_grad(total)), corpus().stream
    value, count = 0.0, 0
    grads = [np.zeros(x.shape) for x in jax.tree.leaves(run.params)]
    for start in run._starts(0):
        window = slice(start, start + SETTINGS.context + 1)
        counts = np.ones(SETTINGS.context, bool) if mask is None else mask[window][1:]
        one, more = find(run.params, jnp.asarray(stream[window], jnp.int32), jnp.asarray(counts))
        value, count = value + float(one), count + int(counts.sum())
        grads = [x + np.asarray(y) for x, y in zip(grads, jax.tree.leaves(more), strict=True)]
    return value / count, [x / count for x in grads]


class TestParts:
    @pytest.mark.quick(first=1, slow=1)
    @pytest.mark.parametrize(
        ("is_marked", "parts", "remat"),
        [(True, 2, "full"), (False, 2, "attention"), (True, 4, "none"), (False, 1, "none")],
    )
    def test_loss_and_gradient_of_the_whole_batch(self, is_marked, parts, remat):
        """In parts, and with layers that are computed again in the backward pass."""
        stream = corpus().stream
        mask = learn(stream.size) if is_marked else None
        settings = dataclasses.replace(SETTINGS, remat=remat)
        pooled = EXACT if remat == "attention" else None
        run = finetune.Trainer(tiny_model(), settings, stream, learn=mask, pooled=pooled)
        if mask is not None:
            counts = [mask[x + 1 : x + 1 + SETTINGS.context].sum() for x in run._starts(0)]
            assert len(set(counts)) > 1  # else the parts' means would do
        value, grads = gradient(run, parts)
        expected, oracle = each_sequence(run, mask)
        # A float32 sum of n numbers is off by n units of rounding of their size at most.
        units = SETTINGS.tokens_per_step * 2.0**-24
        assert value == pytest.approx(expected, rel=units)
        for found, wanted in zip(grads, oracle, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=units * np.abs(wanted).max())

    @pytest.mark.slow
    def test_memory_of_a_part(self):
        """A step in four parts has the activations of a step of one, and a gradient more."""

        def temporary(batch_size: int, accumulate: int) -> int:
            sizes = {"batch_size": batch_size, "accumulate": accumulate, "context": 128}
            settings = dataclasses.replace(SETTINGS, **sizes)
            run = finetune.Trainer(tiny_model(), settings, corpus().stream)
            run.compile()
            return run._compiled.memory_analysis().temp_size_in_bytes

        weights = 4 * tiny_model().config.num_parameters
        part, whole, parts = temporary(2, 1), temporary(8, 1), temporary(8, 4)
        assert parts <= part + 3 * weights
        assert parts < whole / 3

    def test_refusals(self):
        with pytest.raises(ValueError, match="batch_size=4 must be a multiple of accumulate=3"):
            dataclasses.replace(SETTINGS, accumulate=3)
        with pytest.raises(ValueError, match="accumulate=0 must be at least 1"):
            dataclasses.replace(SETTINGS, accumulate=0)


CLIP, DECAY = 0.5, 0.1
PARAMS = {"a": {"kernel": (2, 128, 130)}, "bias": (2, 5), "scale": (2, 3)}


def rate(step):
    return 0.01 / (1 + step)


def drawn(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.normal(size=x), PARAMS, is_leaf=lambda x: type(x) is tuple)


def clipped(grads: list[np.ndarray]) -> list[np.ndarray]:
    norm = np.sqrt(sum((x**2).sum() for x in grads))
    return [x * min(1.0, CLIP / norm) for x in grads]


def adamw(g, state, step):
    m, v = state.get("m", 0.0), state.get("v", 0.0)
    state["m"], state["v"] = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
    m, v = state["m"] / (1 - 0.9 ** (step + 1)), state["v"] / (1 - 0.95 ** (step + 1))
    return m / (np.sqrt(v) + 1e-8)


def lion(g, state, step):
    m = state.get("m", 0.0)
    state["m"] = 0.99 * m + 0.01 * g
    return np.sign(0.9 * m + 0.1 * g)


def sgd(g, state, step):
    state["m"] = g + 0.9 * state.get("m", 0.0)
    return state["m"]


def adafactor(g, state, step):
    """Section 7 of the paper, with optax's decay; matrices below 128 are not factored."""
    keep, square = 1 - (step + 1.0) ** -0.8, g**2 + 1e-30
    axes = [None] if min(g.shape[-2:]) < 128 else [-1, -2]
    means = [square if axis is None else square.mean(axis, keepdims=True) for axis in axes]
    for i, mean in enumerate(means):
        state[i] = keep * state.get(i, 0.0) + (1 - keep) * mean
    v = state[0] if len(means) == 1 else state[0] * state[1] / state[0].mean(-2, keepdims=True)
    u = g / np.sqrt(v)
    return u / max(1.0, np.sqrt((u**2).mean()))


class TestOptimizers:
    @pytest.mark.parametrize("oracle", [adamw, lion, sgd, adafactor])
    def test_against_float64(self, oracle):
        """Three steps; matrices alone decay, by the rate times the weights."""
        optimizer = OPTIMIZERS[oracle.__name__](rate, weight_decay=DECAY, clip_norm=CLIP)
        begun, names = drawn(0), ("kernel", "bias", "scale")
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), begun)
        wanted, states = jax.tree.leaves(begun), [{}, {}, {}]
        with default_promotion():
            opt_state, update = optimizer.init(params), jax.jit(optimizer.update)
            for step in range(3):
                grads = drawn(step + 1)
                low = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), grads)
                updates, opt_state = update(low, opt_state, params)
                params = jax.tree.map(jnp.add, params, updates)
                moved = [
                    oracle(g, state, step)
                    for g, state in zip(clipped(jax.tree.leaves(grads)), states, strict=True)
                ]
                wanted = [
                    x - rate(step) * (u + (DECAY * x if name == "kernel" else 0.0))
                    for x, u, name in zip(wanted, moved, names, strict=True)
                ]
        # Three steps of at most the rate times 1 each, in float32; sums of 33k squares before.
        for found, expected in zip(jax.tree.leaves(params), wanted, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)

    def test_muon_needs_kernels(self):
        muon = OPTIMIZERS["muon"](rate, weight_decay=0.0, clip_norm=1.0)
        with pytest.raises(ValueError, match="'muon' must be another one: there are no kernels"):
            muon.init({"scale": jnp.ones(3)})

    @pytest.mark.slow
    def test_muon_takes_both_matrices_of_an_adapter(self):
        """Moves have singular values near 1, times the size that fits Adam's; a zero gradient none.

        New adapters have the latter: `B` is zero.
        """
        rng = np.random.default_rng(0)
        shapes = Adapter(jnp.ones((2, 12)), jnp.zeros((9, 2)))
        muon = OPTIMIZERS["muon"](lambda step: 0.5, weight_decay=0.0, clip_norm=1e9)
        grads = [Adapter(jnp.zeros((2, 12)), jnp.asarray(rng.normal(size=(9, 2)), jnp.float32))]
        params = [shapes]
        with default_promotion():
            moved = muon.update(grads, muon.init(params), params)[0][0]
        np.testing.assert_array_equal(moved.a, 0.0)
        values = np.linalg.svd(np.asarray(moved.b), compute_uv=False)
        assert (np.abs(values / (0.5 * 0.2 * np.sqrt(9)) - 1) < 0.45).all()

    @pytest.mark.slow
    def test_muon_decays_kernels_alone_and_takes_experts_one_by_one(self):
        rng = np.random.default_rng(0)
        params = {"kernel": jnp.ones((2, 3, 4, 6)), "embedding": jnp.ones((5, 4))}
        grads = {
            "kernel": jnp.asarray(rng.normal(size=(2, 3, 4, 6)), jnp.float32),
            "embedding": jnp.zeros((5, 4)),
        }

        def moved(decay: float):
            muon = OPTIMIZERS["muon"](lambda step: 0.5, weight_decay=decay, clip_norm=1e9)
            with default_promotion():
                return muon.update(grads, muon.init(params), params)[0]

        plain, decayed = moved(0.0), moved(0.1)
        np.testing.assert_allclose(decayed["kernel"] - plain["kernel"], -0.05, atol=1e-6)
        np.testing.assert_array_equal(decayed["embedding"], 0.0)
        # Each expert's singular values lie between those of five Newton-Schulz iterations.
        values = np.linalg.svd(np.asarray(plain["kernel"]), compute_uv=False)
        assert (np.abs(values / (0.5 * 0.2 * np.sqrt(6)) - 1) < 0.45).all()


class TestSchedules:
    @pytest.mark.parametrize("name", ["linear", "constant", "wsd"])
    def test_rates(self, name):
        given = {"decay_fraction": 0.25} if name == "wsd" else {}
        settings = finetune.Settings(
            steps=50, warmup_steps=10, learning_rate=2.0, schedule_name=name, **given
        )
        rates = np.array([float(settings.schedule()(step)) for step in range(52)])
        np.testing.assert_allclose(rates[:10], 0.2 * np.arange(1, 11), rtol=1e-6)
        points = {
            "linear": ([10, 50, 51], [2.0, 0.2, 0.2]),
            "constant": ([10, 51], [2.0, 2.0]),
            "wsd": ([10, 40, 50, 51], [2.0, 2.0, 0.2, 0.2]),
        }[name]
        np.testing.assert_allclose(rates[10:], np.interp(np.arange(10, 52), *points), rtol=1e-5)

    def test_recorded_rates_of_the_cosine(self):
        """A run of November 2026 on a GPU: its log has the rates that it had."""
        path = ROOT / "benchmarks" / "results" / "pooled_training_2026-11-21.json"
        log = json.loads(path.read_text())["runs"][0]
        schedule = finetune.Settings(**log["identity"]["settings"]).schedule()
        found = [float(schedule(row["step"] - 1)) for row in log["records"]]
        # The cosine of another processor: two units of rounding of the peak.
        atol = 3e-4 * 2.0**-23
        recorded = [x["learning_rate"] for x in log["records"]]
        np.testing.assert_allclose(found, recorded, rtol=0, atol=atol)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"optimizer_name": "adam"}, "optimizer_name='adam' must be one of adamw, lion"),
            ({"schedule_name": "step"}, "schedule_name='step' must be one of cosine"),
            ({"decay_fraction": 0.1}, "decay_fraction=0.1 must be None with 'cosine'"),
            ({"schedule_name": "wsd", "decay_fraction": 0.0}, "decay_fraction=0.0 must be above 0"),
            ({"schedule_name": "constant", "final_rate": 0.0}, "final_rate=0.0 must not be given"),
        ],
    )
    def test_refusals(self, change, message):
        with pytest.raises(ValueError, match=message):
            finetune.Settings(**change)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ("--optimizer best", "optimizer_name='best' must be one of"),
            ("--schedule best", "schedule_name='best' must be one of"),
            ("--decay-fraction 0.2", "decay_fraction=0.2 must be None with 'cosine'"),
            ("--accumulate 3", "batch_size=8 must be a multiple of accumulate=3"),
            ("--remat all", "remat='all' must be one of none, full, attention"),
            ("--remat attention", "remat='attention' must be 'none' or 'full' without pooled"),
        ],
    )
    def test_the_command_refuses(self, tmp_path, options, message):
        result = command("train", "--out", str(tmp_path), *options.split())
        assert result.exit_code == 2
        assert message in result.stderr


NEW = ("accumulate", "optimizer_name", "schedule_name", "decay_fraction", "remat")


class TestIdentity:
    def test_a_log_without_newer_settings_has_their_defaults(self, tmp_path):
        settings = dataclasses.asdict(SETTINGS)
        old = {name: value for name, value in settings.items() if name not in NEW}
        file = tmp_path / "log.json"
        kept = {"losses": [1.0], "records": [], "evaluations": []}
        file.write_text(json.dumps({"identity": {"settings": old}, **kept}))
        log = Log(file, {"identity": {"settings": settings}})
        assert log.content["losses"] == [1.0]
        # What the backward pass keeps may change: a run that had too little memory goes on.
        assert Log(file, {"identity": {"settings": {**settings, "remat": "full"}}})
        other = {"identity": {"settings": {**settings, "optimizer_name": "lion"}}}
        with pytest.raises(ValueError, match=r"settings\.optimizer_name='adamw' instead of 'lion'"):
            Log(file, other)

    def test_they_can_be_compared(self):
        settings = dataclasses.asdict(SETTINGS)
        logs = [
            {
                "identity": {"settings": found, "attention": {"kind": "dense"}},
                "losses": [2.0],
                "records": [{"step": 1, "seconds": 1.0, "density": 1.0}],
            }
            for found in ({k: v for k, v in settings.items() if k not in NEW}, settings)
        ]
        finetune.compare(*logs)
        logs[1]["identity"]["settings"] = {**settings, "accumulate": 2}
        with pytest.raises(ValueError, match="settings of the runs must be the same"):
            finetune.compare(*logs)
        assert with_defaults({"settings": "damaged"}) == {"settings": "damaged"}


class Counter(base.BaseTrainer):
    """Moves an array of weights towards another: all of a trainer but a model."""

    def __init__(self, settings: finetune.Settings) -> None:
        model = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), drawn(0))
        super().__init__(model, settings, np.zeros(1000, np.uint8))

    def _value_and_grad(self):
        goal = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), drawn(1))

        def gradient(params, stream, starts):
            return (jnp.zeros(()), None), jax.tree.map(jnp.subtract, params, goal)

        return gradient


@pytest.mark.usefixtures("no_orbax_log")
class TestResuming:
    @pytest.mark.quick(2)
    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_the_state_of_each_optimizer(self, tmp_path, name):
        settings = dataclasses.replace(SETTINGS, optimizer_name=name, schedule_name="wsd")
        whole = Counter(settings)
        with checkpoint.checkpoint_manager(tmp_path) as manager:
            for step in range(STEPS):
                if step == 2:
                    whole.save(manager)
                    manager.wait_until_finished()
                whole.run_step()
            second = Counter(settings)
            assert second.restore(manager)
        for _ in range(STEPS - 2):
            second.run_step()
        ends = ((run._trained, run.opt_state) for run in (whole, second))
        jax.tree.map(np.testing.assert_array_equal, *ends)

    @pytest.mark.fuzz
    @pytest.mark.parametrize(("optimizer", "remat"), [("adafactor", "attention"), ("muon", "full")])
    def test_a_run_in_parts_ends_with_the_same_bits(self, tmp_path, optimizer, remat):
        settings = dataclasses.replace(
            SETTINGS,
            accumulate=2,
            optimizer_name=optimizer,
            schedule_name="linear",
            remat=remat,
        )
        pooled = EXACT if remat == "attention" else None
        rhythm = finetune.Rhythm(log_every=1, save_every=2, evaluate_every=0)

        class Stop(Exception):
            pass

        def stop(row):
            if row["step"] == 3:
                raise Stop

        def tune(folder: Path, **more) -> dict:
            return finetune.fine_tune(
                folder, tiny_model(), settings, corpus(), pooled=pooled, rhythm=rhythm, **more
            )

        expected = tune(tmp_path / "whole")
        with pytest.raises(Stop):
            tune(tmp_path / "stopped", report=stop)
        rows = []
        found = tune(tmp_path / "stopped", report=rows.append)
        assert rows[0] == {"step": 2, "resumed": True}
        assert found["losses"] == expected["losses"]
        assert expected["losses"][-1] < expected["losses"][0]
        one, two = (
            jax.tree.leaves(nnx.state(models.load(tmp_path / name / "model")))
            for name in ("whole", "stopped")
        )
        for a, b in zip(one, two, strict=True):
            np.testing.assert_array_equal(a, b)
