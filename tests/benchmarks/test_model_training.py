"""The benchmark of fine-tuning with pooled and with dense attention, over seeds."""

import numpy as np
import pytest
from flax import nnx

from benchmarks import model_training
from benchmarks.model_training import DENSE, POOLED, Contest, Plan, last_loss, ratio, section
from turbojax.models import Transformer, TransformerConfig


def run(attention, seed, loss, seconds):
    losses = [9.0, *[loss] * 20]
    density = 0.25 if attention == POOLED else 1.0
    return {
        "attention": attention,
        "seed": seed,
        "losses": losses,
        "step_seconds": seconds,
        "density": density,
        "held_out": loss + 1,
    }


RUNS = [
    run(DENSE, 0, 2.0, 0.4),
    run(POOLED, 0, 2.2, 0.2),
    run(POOLED, 1, 4.8, 0.2),
    run(DENSE, 1, 4.0, 0.4),
]


def test_ratios_are_of_runs_with_the_same_seed():
    mean, half = ratio(RUNS, last_loss)
    assert mean == pytest.approx((1.1 + 1.2) / 2)
    # Two ratios that differ by 0.1: their mean is uncertain by t * 0.1 / 2.
    assert half == pytest.approx(12.706 * 0.1 / 2)
    assert ratio(RUNS[:2], last_loss) == (pytest.approx(1.1), None)


def test_a_row_for_each_context():
    row = {"context": 1024, "batch": 2, "steps": 21, "seeds": 2, "runs": RUNS}
    result = {"rows": [row], "device": "a device", "jax": "0.1", "date": "2000-01-01"}
    line = section("x.json", result).splitlines()[2]
    assert line.startswith("| 2 x 1,024 | 21, 2 | 0.250 | 5,120 | 10,240 | 2.00x | 3.0000 | 1.1500")


@pytest.mark.parametrize("text", ["8192", "8192:8:60", "a:b:c:d"])
def test_a_plan_that_is_none_is_named(text):
    assert Plan.of("8192:8:60:3") == Plan(8192, 8, 60, 3)
    with pytest.raises(ValueError, match=f"plan '{text}' must be CONTEXT:BATCH:STEPS:SEEDS"):
        Plan.of(text)


@pytest.mark.fuzz
def test_runs_of_a_seed_begin_alike(monkeypatch):
    monkeypatch.setattr(model_training, "_WINDOWS", 1)
    config = TransformerConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        max_length=256,
    )
    model = Transformer(config, rngs=nnx.Rngs(0))
    stream = np.random.default_rng(0).integers(0, 256, 3000).astype(np.uint8)
    contest = Contest(model, Plan(256, 1, 3, 2), stream, stream)
    for kind in (DENSE, POOLED):
        contest.compile(kind)
    first, again, other = (contest.run(POOLED, seed) for seed in (0, 0, 1))
    assert first["losses"] == again["losses"] != other["losses"]
    assert first["losses"][0] == pytest.approx(contest.run(DENSE, 0)["losses"][0], rel=0.01)
