"""Settings of the test suite: strict JAX, reproducible hypothesis, and what `gpu` means.

Warnings are errors; the exceptions are named, with the reason, in pyproject.toml.
"""

import gc
import os
from pathlib import Path

# Read by XLA when it starts: several test processes share one GPU, if there is one.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# What is tested is compiled by the jax at hand, never read from disk.
jax.config.update("jax_enable_compilation_cache", False)

# A first example compiles, so times vary by orders of magnitude: no deadlines.
_HEALTH = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile(
    "local", deadline=None, print_blob=True, suppress_health_check=_HEALTH
)
hypothesis.settings.register_profile(
    "ci",
    deadline=None,
    print_blob=True,
    suppress_health_check=_HEALTH,
    derandomize=True,
    database=None,
)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


# Every program that XLA compiles for a CPU holds a few memory maps, of which Linux allows a process
# 65,530: beyond, the compiler crashes. Half of that leaves room for a large test.
_MOST_MAPS = 30_000


def pytest_runtest_teardown() -> None:
    """Drops compiled programs where they become too many."""
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MOST_MAPS:
        jax.clear_caches()
        gc.collect()


def _gpus() -> list[jax.Device]:
    return [device for device in jax.devices() if device.platform == "gpu"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the GPU tests, saying why, where there is no GPU."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _gpus():
        reason = f"needs a GPU; jax {jax.__version__} sees {jax.devices()}"
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


class _GpuTestsRan:
    """Fails a run that asked for GPU tests and ran none: skipped is not green.

    Lives in the process that reports, which under xdist receives every worker's reports.
    """

    def __init__(self) -> None:
        self.count = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and not report.skipped and "gpu" in report.keywords:
            self.count += 1

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.count == 0 and session.exitstatus in (
            pytest.ExitCode.OK,
            pytest.ExitCode.NO_TESTS_COLLECTED,
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.count == 0:
            terminalreporter.write_line(
                f"FAILED: GPU tests were asked for and none ran; jax sees {jax.devices()}", red=True
            )


def pytest_configure(config: pytest.Config) -> None:
    """Installs the check above where GPU tests are asked for (`-m gpu`)."""
    wanted = config.option.markexpr.replace("(", " ").replace(")", " ").split()
    asked = "gpu" in wanted and wanted[max(wanted.index("gpu") - 1, 0)] != "not"
    if asked and not hasattr(config, "workerinput") and not config.option.collectonly:
        config.pluginmanager.register(_GpuTestsRan(), "turbojax-gpu-tests-ran")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> str:
    """The folder of a random byte-level model."""
    from flax import nnx

    from turbojax import models

    config = models.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_length=128,
    )
    folder = tmp_path_factory.mktemp("tiny")
    models.save(models.Llama(config, rngs=nnx.Rngs(0)), folder, dtype=jax.numpy.bfloat16)
    return str(folder)


@pytest.fixture(params=["xla", "triton"])
def implementation(request: pytest.FixtureRequest) -> str:
    """What of an op runs on a CPU: plain JAX, and its Triton kernel, if it is interpreted."""
    return request.param
