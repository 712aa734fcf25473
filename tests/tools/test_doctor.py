"""`turbojax doctor`: what it finds, and that nothing that is broken makes it fail."""

import json

import jax
import pytest
from typer.testing import CliRunner

from turbojax import _device, _registry
from turbojax.app import doctor
from turbojax.app.main import app
from turbojax.caches.paged.pool import KV_DTYPES


@pytest.fixture(scope="module")
def report() -> doctor.Report:
    return doctor.examine()


@pytest.mark.slow
def test_every_op_is_examined(report):
    names = [op.op for op in report.ops]
    assert len(set(names)) == len(names)
    ops = {name.partition(",")[0] for name in names}
    assert {"turbo_attention", "decode", "append", "store_prompt", "pooled_attention"} <= ops
    assert {"fp8_tokens", "int4_matmul", "grouped_matmul", "fireq.decode"} <= ops
    assert {"paged_attention", "paged.append"} <= ops
    for op in report.ops:
        for name, refusal in op.refusals.items():
            # A refusal in words, and no accident.
            assert refusal is None or not refusal.startswith(("fails", "not examined")), name
        assert op.refusals["xla"] is None
        assert op.chosen is not None


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="about a machine without a GPU")
def test_without_a_gpu_kernels_are_refused_in_words(report):
    refusals = [
        refusal
        for op in report.ops
        for name, refusal in op.refusals.items()
        if name in ("triton", "cudnn")
    ]
    assert refusals
    assert all("needs an NVIDIA GPU" in refusal for refusal in refusals)
    assert all(op.chosen == "xla" for op in report.ops)
    mosaic = [op.refusals["mosaic_gpu"] for op in report.ops if "mosaic_gpu" in op.refusals]
    assert sum("of compute capability 9.0, for which alone" in refusal for refusal in mosaic) >= 2


@pytest.mark.slow
def test_versions_and_devices(report):
    assert report.versions["jax"] == jax.__version__
    assert report.versions["flax"] is not None
    assert any(jax.devices()[0].device_kind in device for device in report.devices)


@pytest.mark.slow
def test_text_and_json_hold_the_same(report):
    text = report.to_text()
    for op in report.ops:
        assert op.op in text
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 0
    assert shown.stdout.strip() == text
    parsed = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert parsed == json.loads(json.dumps(report.to_json()))
    assert parsed["ops"]["append"]["implementations"]["xla"] == "available"


def test_broken_and_unknown_things_are_reported(monkeypatch):
    def broken(**_):
        raise OSError("libkernel.so is missing\nand more")

    unknown = _registry.Registry("new_op", (_registry.Implementation("xla", broken),))
    (report,) = doctor._examine(unknown)
    assert "knows no call" in report.refusals["xla"]
    calls = {"int8": lambda _: broken(), "float": lambda _: None, "fp8": lambda _: broken()}
    monkeypatch.setitem(doctor._representative_calls(), "new_op", calls)
    fails, runs = doctor._examine(unknown)
    assert fails.op == "new_op, mode int8, fp8"
    assert fails.refusals == {"xla": "fails: OSError: libkernel.so is missing"}
    assert (fails.chosen, runs.chosen) == (None, "xla")


@pytest.mark.fuzz
def test_what_was_not_measured_is_marked(monkeypatch):
    """On Blackwell Mosaic's decode runs, and its prefill does not."""
    monkeypatch.setattr(_device, "gpu_compute_capability", lambda: 10.0)
    lines = doctor.examine().to_json()["ops"]
    mark = "available, not measured on compute capability 10.0"
    for op in ("append", "fireq.decode", "paged.append", "store_prompt", "fp8_tokens"):
        assert lines[op]["implementations"]["mosaic_gpu"] == mark, op
        assert lines[op]["chosen"] == "triton", op
    decode = next(lines[op] for op in lines if op.startswith("decode, mode int8"))
    assert decode["implementations"]["mosaic_gpu"] == mark
    for op in ("pooled_attention", "int4_matmul", "grouped_matmul"):
        assert (
            "needs an NVIDIA GPU of compute capability 9.0,"
            in lines[op]["implementations"]["mosaic_gpu"]
        )


def test_refusals_that_differ_in_the_variant_alone_are_one(monkeypatch):
    def refuse(variant):
        raise NotImplementedError(f"mode={variant!r} must be 'fp8'")

    registry = _registry.Registry("new_op", (_registry.Implementation("xla", refuse),))
    calls = {
        "int8": lambda _: refuse("int8"),
        "fp8": lambda _: None,
        "float": lambda _: refuse("float"),
    }
    monkeypatch.setitem(doctor._representative_calls(), "new_op", calls)
    refused, runs = doctor._examine(registry)
    assert (refused.op, refused.refusals) == (
        "new_op, mode int8, float",
        {"xla": "mode must be 'fp8'"},
    )
    assert (runs.op, runs.chosen) == ("new_op, mode fp8", "xla")


def test_formats_of_pages_are_few_groups(report):
    """All formats are named, those of turbo4's kind next to each other and not one by one."""
    paged = [op.op for op in report.ops if op.op.startswith("paged_attention, kv_dtype ")]
    named = [
        name for op in paged for name in op.removeprefix("paged_attention, kv_dtype ").split(", ")
    ]
    assert sorted(named) == sorted(KV_DTYPES)
    assert len(paged) <= 5


@pytest.mark.slow
def test_a_backend_that_does_not_start(monkeypatch, tmp_path):
    def no_backend(*_, **__):
        raise RuntimeError("Unable to initialize backend 'cuda'")

    driver = tmp_path / "version"
    driver.write_text("NVRM")
    monkeypatch.setattr(doctor, "_NVIDIA_DRIVER", driver)
    monkeypatch.setattr(jax, "devices", no_backend)
    monkeypatch.setattr(jax, "default_backend", no_backend)
    monkeypatch.setattr(doctor.cudnn, "unsupported", no_backend)
    report = doctor.examine()
    assert report.devices == ("none: RuntimeError: Unable to initialize backend 'cuda'",)
    assert "pip install 'jax[cuda13]>=" in report.advice[0]
    assert "fails: RuntimeError" in report.ops[-1].refusals["cudnn"]
