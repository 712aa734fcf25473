"""Settings of the test suite: strict JAX, reproducible hypothesis, and what `gpu` means.

Warnings are errors; the exceptions are named, with the reason, in pyproject.toml.
"""

import gc
import itertools
import os
import shutil
import zlib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

# Settings that XLA and JAX read when they start.
#
# Nearly all of the suite's time is compilation, so on a CPU programs are compiled with few
# optimizations, four times faster. Where equal bits between two programs are promised, that would
# prove little: such tests are marked `optimized`, and `make` runs them apart, as users compile
# (TURBOJAX_OPTIMIZE=1).
_QUICK_CPU = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1"
)
if version("jaxlib").startswith("0.10."):  # newer ones do not know the flag, and end
    _QUICK_CPU += " --xla_cpu_use_fusion_emitters=false"
# On a GPU they are references that run once: no search for the fastest product of matrices, which
# would need memory that several processes share, and cuBLAS's products, which are not compiled.
_QUICK_GPU = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
_ON_GPU = os.environ.get("JAX_PLATFORMS") != "cpu" and Path("/dev/nvidiactl").exists()
if os.environ.get("TURBOJAX_OPTIMIZE") != "1":
    _quick = _QUICK_GPU if _ON_GPU else _QUICK_CPU
    if _quick not in os.environ.get("XLA_FLAGS", ""):  # a worker inherits them
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_quick}".strip()
_DEVICES = os.environ.get("TURBOJAX_DEVICES")
if _DEVICES:
    _flag = f"--xla_force_host_platform_device_count={int(_DEVICES)}"
    if _flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}".strip()
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Commands in processes of their own would keep compiled programs in the user's folder.
_PROGRAMS = Path(__file__).resolve().parents[1] / ".cache" / "programs"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_PROGRAMS)

import hypothesis
import jax
import pytest

from tests.grids import one_of_each, tiers

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# The Python lines that each operation came from, in every compiled program: 6 % of the time.
jax.config.update("jax_traceback_in_locations_limit", 0)
# Compiled programs are shared by the test processes, and by the next run; `make clean` removes
# them. The key holds the program, the flags and the versions of jax and XLA.
_MOST_BYTES = 2**30
jax.config.update("jax_compilation_cache_dir", str(_PROGRAMS))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

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


_COUNTED = "counted"

# Every program that XLA compiles for a CPU holds a few memory maps, of which Linux allows a process
# 65,530: beyond, the compiler crashes. Half of that leaves room for several large tests. To count
# them takes some 20 ms.
_MOST_MAPS = 30_000
_TESTS_BETWEEN_COUNTS = 8
_ended = itertools.count(1)


def pytest_runtest_teardown() -> None:
    """Drops compiled programs where they become too many."""
    maps = Path("/proc/self/maps")
    if next(_ended) % _TESTS_BETWEEN_COUNTS or not maps.exists():
        return
    if maps.read_bytes().count(b"\n") > _MOST_MAPS:
        jax.clear_caches()
        gc.collect()


def pytest_collection_finish() -> None:
    """Modules and collected tests live to the end: the garbage collector need not visit them.

    Nor need it look for circles after every 700 objects, as tracing makes them: 7 % of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


def asks_for_gpu(marks: str) -> bool:
    """Whether an expression of markers, as of `-m`, begins with `gpu` or `gpus`."""
    return marks.split()[:1] in (["gpu"], ["gpus"])


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out, of a run of GPU tests alone, files without one: twenty workers import each."""
    if not asks_for_gpu(config.option.markexpr) or not collection_path.name.startswith("test_"):
        return None
    return "mark.gpu" not in collection_path.read_text(encoding="utf-8") or None


def _gpus() -> list[jax.Device]:
    return [device for device in jax.devices() if device.platform == "gpu"]


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves few cases of `quick` tests to `make test`; skips GPU tests where there is no GPU."""
    _leave_few_cases(items)
    meshed = [item for item in items if item.get_closest_marker("mesh")]
    if meshed and jax.device_count() < 8:
        if _DEVICES:
            raise pytest.UsageError(f"TURBOJAX_DEVICES={_DEVICES}: jax sees {jax.devices()}")
        for item in meshed:
            item.add_marker(pytest.mark.skip(reason="needs 8 devices: TURBOJAX_DEVICES=8"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _gpus():
        reason = f"needs a GPU; jax {jax.__version__} sees {jax.devices()}"
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _leave_few_cases(items: list[pytest.Item]) -> None:
    """Marks as slow, or as fuzz, all but a few cases of a test with `quick`; see `grids.tiers`.

    Besides those, `make test-slow` gets a case of each implementation that has none.
    """
    cases: dict[str, tuple[list[pytest.Item], list[pytest.Item]]] = {}
    for item in items:
        if item.get_closest_marker("quick") and not item.get_closest_marker("fuzz"):
            group = cases.setdefault(item.nodeid.partition("[")[0], ([], []))
            group[bool(item.get_closest_marker("slow"))].append(item)
    for name, (some, slow_ones) in cases.items():
        group = [*some, *slow_ones]
        mark = group[0].get_closest_marker("quick")
        offset = zlib.crc32(name.rpartition("/")[2].encode())
        quick, slow = tiers(
            len(some), *mark.args, **mark.kwargs, offset=offset, more=len(slow_ones)
        )
        slow |= one_of_each(quick | slow, [_implementation(item) for item in group])
        for i, item in enumerate(group):
            if i not in quick:
                item.add_marker(pytest.mark.slow if i in slow else pytest.mark.fuzz)


def _implementation(item: pytest.Item) -> object:
    """The implementation that a case is about; None where it has no such parameter."""
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("implementation")


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


@pytest.fixture
def count(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Takes a line that says how much a test tried; it is shown when all tests are done."""
    return lambda line: record_property(_COUNTED, line)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Shows what `count` was given, by any process."""
    lines = [
        line
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call"
        for name, line in report.user_properties
        if name == _COUNTED
    ]
    if lines:
        terminalreporter.section("counts")
        for line in lines:
            terminalreporter.write_line(str(line))


def _remove_many_programs() -> None:
    """Bounds what the programs of earlier runs take on the disk."""
    used = sum(path.stat().st_size for path in _PROGRAMS.glob("*"))
    if used > _MOST_BYTES:
        shutil.rmtree(_PROGRAMS)


def pytest_configure(config: pytest.Config) -> None:
    """Installs the check above where GPU tests are asked for (`-m gpu`); keeps the disk tidy."""
    if not hasattr(config, "workerinput"):
        _remove_many_programs()
    asked = asks_for_gpu(config.option.markexpr)
    if asked and not hasattr(config, "workerinput") and not config.option.collectonly:
        config.pluginmanager.register(_GpuTestsRan(), "turbojax-gpu-tests-ran")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> str:
    """The folder of a random byte-level model."""
    from flax import nnx

    from turbojax import models

    config = models.TransformerConfig(
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
    models.save(models.Transformer(config, rngs=nnx.Rngs(0)), folder, dtype=jax.numpy.bfloat16)
    return str(folder)


@pytest.fixture(params=["xla", "triton"])
def implementation(request: pytest.FixtureRequest) -> str:
    """What of an op runs on a CPU: plain JAX, and its Triton kernel, if it is interpreted."""
    return request.param


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are chosen as on a Hopper GPU; there is none."""
    from turbojax import _device

    monkeypatch.setattr(_device, "gpu_compute_capability", lambda: 9.0)
