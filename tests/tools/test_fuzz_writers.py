"""Whatever interrupts a writer, and whenever: what it wrote is the old, or the new, and whole."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.contracts.storage_helpers import filled
from tests.tools.interrupting import Lines, lines_of, points
from turbojax import _writing, fireq, models
from turbojax.models.generation.saving import load_cache, save_cache

CONFIG = models.TransformerConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_length=64,
)
ROOT = Path(__file__).parents[2]


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


class Checkpoint:
    """A float model in one file or many, which differ in their tensors' sizes, too."""

    def __init__(self):
        self.values = [models.Transformer(CONFIG, rngs=nnx.Rngs(i)) for i in range(2)]

    def write(self, folder, which):
        models.save(self.values[which], folder, max_shard_bytes=(1 << 30, 4000)[which])

    def read(self, folder):
        return bits(nnx.to_pure_dict(nnx.state(models.load(folder))))

    def wanted(self):
        return [bits(nnx.to_pure_dict(nnx.state(x))) for x in self.values]


class Quantized:
    def __init__(self):
        self.values = [
            models.random_quantized_decoder(CONFIG, dtype=jnp.float32, seed=i) for i in range(2)
        ]

    def write(self, folder, which):
        models.save_quantized(self.values[which], folder)

    def read(self, folder):
        return bits(models.load(folder))

    def wanted(self):
        return [bits(x) for x in self.values]


class Cache:
    def __init__(self):
        self.values = [filled("exact", 70), filled("kv4", 70)]

    def write(self, folder, which):
        folder.mkdir(exist_ok=True)
        save_cache(folder / "cache", self.values[which])

    def read(self, folder):
        return bits(load_cache(folder / "cache")[0])

    def wanted(self):
        return [bits(x) for x in self.values]


class Weights:
    def __init__(self):
        rng = np.random.default_rng(0)
        self.values = [
            fireq.quantize_weight(jnp.asarray(rng.normal(size=(128, 16)), jnp.float32))
            for _ in range(2)
        ]

    def write(self, folder, which):
        folder.mkdir(exist_ok=True)
        fireq.save_weights({"w": self.values[which]}, folder / "w.safetensors")

    def read(self, folder):
        return bits(fireq.load_weights(folder / "w.safetensors"))

    def wanted(self):
        return [bits({"w": x}) for x in self.values]


WRITERS = [Checkpoint, Quantized, Cache, Weights]


def interrupt(writer, folder, places):
    """Interrupts at these lines; how often the old was found, and the new."""
    old, new = writer.wanted()
    seen = [0, 0]
    for point in places:
        writer.write(folder, 0)
        try:
            with Lines(point):
                writer.write(folder, 1)
        except KeyboardInterrupt:
            pass
        found = writer.read(folder)
        assert found in (old, new), f"neither after an interruption at line {point}"
        seen[found == new] += 1
    return seen


# An interruption just before a file is closed leaves that to Python, which says so.
@pytest.mark.quick(slow=1)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("tries", [4, pytest.param(200, marks=pytest.mark.fuzz)])
@pytest.mark.parametrize("kind", WRITERS, ids=lambda x: x.__name__.lower())
def test_interrupted_anywhere(tmp_path, count, kind, tries):
    writer = kind()
    writer.write(tmp_path / "x", 0)
    lines = lines_of(lambda: writer.write(tmp_path / "x", 1))
    assert writer.read(tmp_path / "x") == writer.wanted()[1]
    old, new = interrupt(writer, tmp_path / "x", [*points(tries - 1, lines, seed=0), lines - 1])
    assert old
    count(
        f"interrupted writers: {kind.__name__.lower()}, {tries} interruptions at "
        f"{lines} lines, {old} times the old, {new} times the new"
    )


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, pytest.param(100, marks=pytest.mark.fuzz)])
def test_killed(tmp_path, count, kills):
    command = [
        *(sys.executable, "-m", "tests.tools.kill_writers"),
        *(str(tmp_path), str(kills), "0"),
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name, seen in json.loads(done.stdout).items():
        count(f"killed writers: {name}, {kills} kills, {seen}")


_WRITE = """
import sys
from flax import nnx
from turbojax import models
from tests.tools.test_fuzz_writers import CONFIG
model = models.Transformer(CONFIG, rngs=nnx.Rngs(int(sys.argv[2])))
print("ready", flush=True)
sys.stdin.readline()
try:
    for _ in range(20):
        models.save(model, sys.argv[1])
    print("saved")
except BlockingIOError as error:
    print(error)
"""


@pytest.mark.fuzz
def test_two_writers(tmp_path, count):
    """Programs that save into one folder at once wait a moment for each other, or are refused."""
    refused = 0
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", _WRITE, str(folder), str(i)],
                env={**env, "JAX_PLATFORMS": "cpu"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for i in range(2)
        ]
        for writer in writers:
            assert writer.stdout.readline() == "ready\n"
        for writer in writers:
            writer.stdin.write("go\n")
            writer.stdin.flush()
        answers = [writer.communicate()[0] for writer in writers]
        assert "saved\n" in answers, answers
        refused += sum("is being written by another program" in x for x in answers)
        wanted = [
            bits(nnx.to_pure_dict(nnx.state(models.Transformer(CONFIG, rngs=nnx.Rngs(i)))))
            for i, answer in enumerate(answers)
            if answer == "saved\n"
        ]
        assert bits(nnx.to_pure_dict(nnx.state(models.load(folder)))) in wanted
        assert not list(folder.glob(".turbojax*"))
    count(f"two writers: 3 tries of 2 x 20 saves, {refused} writers refused, nothing lost")


@pytest.mark.slow
@pytest.mark.parametrize("reads", [5, pytest.param(100, marks=pytest.mark.fuzz)])
def test_readers_see_one_checkpoint(tmp_path, count, reads):
    writer = Checkpoint()
    writer.write(tmp_path, 0)
    wanted, stop = writer.wanted(), threading.Event()

    def save():
        which = 0
        while not stop.wait(0.1):  # some times longer than a load takes, also on a busy machine
            which = 1 - which
            writer.write(tmp_path, which)

    thread = threading.Thread(target=save)
    thread.start()
    try:
        seen = [wanted.index(writer.read(tmp_path)) for _ in range(reads)]
    finally:
        stop.set()
        thread.join()
    count(f"readers: {reads} loads while somebody saves, {sum(seen)} of one, the rest of the other")


@pytest.mark.slow
def test_another_program_finds_no_mixture(tmp_path):
    """After a kill in the middle of the last step, the next load sets the folder right."""
    writer = Checkpoint()
    writer.write(tmp_path, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_writing, "_place", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            writer.write(tmp_path, 1)
    assert not (tmp_path / "config.json").exists()
    assert writer.read(tmp_path) == writer.wanted()[1]
    assert (tmp_path / "config.json").exists()
    assert not list(tmp_path.glob(".turbojax*"))
