"""Loading and saving hold the model once, and beside it about one tensor."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.models import tiny
from turbojax.models.checkpoint.huggingface import expected_shapes

CONFIG = tiny.config(
    vocab_size=512,
    hidden_size=512,
    intermediate_size=1536,
    num_layers=14,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    max_length=128,
)
LARGEST = 512 * 1536 * 4

# Peak resident memory is the kernel's figure for this process, in KiB. Everything is done twice:
# the first time jax, too, allocates what it needs for itself, compiled programs above all.
MEASURE = """
import gc, json, sys
import jax
from flax import nnx
from turbojax.models.checkpoint import huggingface as checkpoint

def memory(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(1024 * int(x.split()[1]) for x in lines if x.startswith(field + ":"))

def peak(call):
    call()
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts again at what is used now
    before = memory("VmRSS")
    result = call()
    return result, memory("VmHWM") - before

def live(done, total):
    found.append(sum(x.nbytes for x in jax.live_arrays()))

folder, out, dtype, loader = sys.argv[1:]
dtype = None if dtype == "stored" else dtype
load, found = getattr(checkpoint, loader), []
model, loading = peak(lambda: load(folder, dtype=dtype, progress=live))
leaves = jax.tree.leaves(model if loader == "load_decoder" else nnx.state(model))
assert all(bool((x == 1).all()) for x in leaves)
figures = {"model": sum(x.nbytes for x in leaves), "loading": loading, "live": max(found)}
if loader == "load":
    _, figures["saving"] = peak(lambda: checkpoint.save(model, out, max_shard_bytes=1 << 26))
print(json.dumps(figures))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model of 178 MB: ones, in one file."""
    path = tmp_path_factory.mktemp("large")
    tensors = {name: np.ones(x, np.float32) for name, x in expected_shapes(CONFIG).items()}
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG.to_hf()))
    return path


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize(
    ("loader", "dtype"), [("load", "stored"), ("load", "bfloat16"), ("load_decoder", "stored")]
)
def test_one_copy(folder, tmp_path, loader, dtype):
    arguments = [str(folder), str(tmp_path / "out"), dtype, loader]
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments],
        capture_output=True,
        text=True,
        # Freed memory goes back at once, so that it does not hide what is allocated later.
        env=os.environ | {"JAX_PLATFORMS": "cpu", "MALLOC_MMAP_THRESHOLD_": "262144"},
        cwd=Path(__file__).parents[2],
    )
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout.splitlines()[-1])
    size = figures["model"]
    assert size == CONFIG.num_parameters * (2 if dtype == "bfloat16" else 4)
    # The tensor as it is stored, cast, and on its way to the device, which is memory, too.
    allowed = 3 * LARGEST + 4e6
    assert size <= figures["live"] <= size + LARGEST, figures
    assert 0.9 * size <= figures["loading"] <= size + allowed, figures
    assert allowed < 0.2 * size
    if loader == "load":
        assert figures["saving"] <= allowed, figures
