"""Evaluations on a GPU: the same bits again and in another process, and the figures of a CPU."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.tools.evaluation_helpers import CONFIG
from turbojax import evaluation, models

pytestmark = pytest.mark.gpu

METHODS = ("exact", "4bit", "turbo4", "k8v4", "kivi4", "gear4", "int4")
REPEATED = ("4bit", "turbo4")
CONTEXT, PROMPT = 447, 320
TEXTS = {
    f"{name}.txt": np.random.default_rng(i).integers(0, 256, CONTEXT + 1)
    for i, name in enumerate("abc")
}


def document():
    """All measures but for what dates them."""
    config = dataclasses.replace(CONFIG, head_dim=64)
    settings = evaluation.Settings(
        methods=REPEATED,
        context=CONTEXT,
        prompt=PROMPT,
        windows_per_file=1,
        batch_size=3,
        measures=("text", "layers"),
        layer_windows=2,
        samples=50,
    )
    found = evaluation.evaluate(models.random_decoder(config, dtype=jnp.bfloat16), TEXTS, settings)
    return {key: value for key, value in found.items() if key not in ("date", "seconds")}


@pytest.mark.slow  # three evaluations: minutes
def test_bits_repeat():
    first = document()
    jax.clear_caches()
    assert document() == first
    # Another process compiles anew, and measures nothing that it could choose a kernel by.
    root = Path(__file__).parents[2]
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    code = (
        "import json; from tests.gpu import test_gpu_evaluation as t; "
        "print(json.dumps(t.document()))"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == json.loads(json.dumps(first))


# Relative L1 of the layers' decoded outputs, of float32, on a CPU.
ON_A_CPU = {
    "exact": (0.0, 0.0, 0.0),
    "4bit": (0.06329, 0.03632, 0.02518),
    "turbo4": (0.08538, 0.04366, 0.03319),
    "k8v4": (0.0812, 0.0365, 0.02659),
    "kivi4": (0.06544, 0.03458, 0.02537),
    "gear4": (0.06474, 0.03378, 0.02474),
    "int4": (0.08073, 0.04189, 0.0305),
}


@pytest.mark.parametrize("name", METHODS)
def test_errors_are_those_of_a_cpu(name):
    """Of plain JAX's caches nearly; a kernel's products are rounded otherwise."""
    config = dataclasses.replace(CONFIG, head_dim=64)
    windows = np.stack(list(TEXTS.values()))[:2, :-1]
    with jax.default_matmul_precision("highest"):
        model = models.random_decoder(config, dtype=jnp.float32)
        method = evaluation.method(name, config)
        found = evaluation.layer_errors(model, windows, method, prompt=PROMPT).decode
    np.testing.assert_allclose(found.relative_l1, ON_A_CPU[name], rtol=0.05, atol=2e-5)
