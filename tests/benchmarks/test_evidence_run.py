"""A run of the evidence on a model of two layers: what its rows hold, and that tables show it."""

import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.evidence import attends, measuring, rows, whole
from benchmarks.evidence import subject as subjects
from benchmarks.evidence.catalogue import SHOWN, TABLES, prepared
from benchmarks.evidence.softmaxes import attention_with
from turbojax import SAS, models

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def subject() -> subjects.Subject:
    return subjects.load("embedded", "float32", subjects.QUICK)


def test_a_subject_is_cut_to_what_it_can_have(subject):
    sizes = subject.sizes
    assert subject.decoder.config.num_layers == sizes.layers == 2
    assert subject.tokens.shape == (2, sizes.context + 1)
    assert len(set(subject.owners)) == 2
    assert subject.long_tokens.shape == (2, sizes.long_context + 1)
    assert subject.layer_tokens.shape == (1, sizes.context)
    assert subject.calibration.shape == (2, sizes.calibration_length)
    text = subjects.held_out()[subject.owners[0]]
    assert bytes(subject.tokens[0, 1:].tolist()) == text[: sizes.context]
    longer = subjects.Sizes(context=10**6, prompt=10**6 // 2, long_context=10**6, files=1)
    found = subjects.load("embedded", "float32", longer)
    assert found.sizes.context == found.decoder.config.max_length == found.sizes.long_context
    assert found.sizes.prompt == found.sizes.context // 2


def test_whole_windows_score_as_the_library_does(subject):
    first = subject.first
    found = whole.score_whole(
        subject.decoder, subject.tokens, attends.Exact(), first=first, batch=2
    ).scores
    want = models.token_bits(subject.decoder, subject.tokens, batch_size=2)[:, first:]
    np.testing.assert_allclose(found.bits, want, atol=1e-4)
    np.testing.assert_array_equal(found.bits, found.exact_bits)
    np.testing.assert_array_equal(found.choices, found.exact_choices)
    assert np.abs(found.divergence).max() < 1e-6


@pytest.mark.fuzz
def test_rows_of_every_sort(subject, tmp_path):
    """One of each; `kv4` in one pass is the library's own."""
    near = next(spec for spec in TABLES[8].specs(subject) if spec.key == "long/topk_window/0.125")
    specs = [
        rows.cached("kv4"),
        rows.layers("int8"),
        rows.within("sas", attention_with(SAS())),
        rows.channel_errors(),
        near,
    ]
    told: list[tuple] = []
    out = tmp_path / "evidence_2000-01-01.json"
    result = measuring.measure(subject, specs, out=out, on_row=lambda *row: told.append(row))
    assert result["failures"] == {}
    found = json.loads(out.read_text())["rows"]
    assert [row[0] for row in told] == list(found) == [spec.key for spec in specs]

    cached = found["cache/kv4"]
    bits = models.token_bits(subject.decoder, subject.tokens, cache="kv4")[:, subject.first :]
    # Prompts attend with other numerics than what the cache holds.
    assert cached["bits_per_byte"] == pytest.approx(float(bits.mean()), abs=0.1)
    assert cached["cost"] == pytest.approx(np.mean(cached["cost_by_window"]), abs=1e-6)
    assert cached["exact_cache_bytes"] > 2 * cached["cache_bytes"]

    layers = found["layers/int8"]
    assert len(layers["cosine"]) == len(layers["prefill"]["cosine"]) == 2
    assert min(layers["cosine"]) > 0.999
    just, few, more, most = layers["by_newest"]  # 31 tokens are decoded after 128
    assert just is most is None
    assert 0 < few < 0.1 > more > 0
    sas = found["whole/sas"]
    assert "cache_bytes" not in sas
    # 4e-4 of the exponential, and a tail below exp(-6).
    assert max(sas["relative_l1"]) < 0.05
    assert 0 < sas["divergence"] < 0.01
    pooled = found["long/topk_window/0.125"]
    assert 0.125 < pooled["density"] < 1
    assert len(pooled["density_by_layer"]) == 2
    keys = found["channels"]["relative_l2"]["key"]
    assert keys["channel-2"][0] > keys["channel-4"][0]

    # The same call finds everything done.
    again = measuring.measure(subject, specs, out=out, on_row=lambda *row: told.append(row))
    assert len(told) == len(specs)
    assert again["rows"] == found
    for name, table in SHOWN.tables.items():
        assert "evidence_2000-01-01.json" in table(out.name, again), name
    shown = SHOWN.tables["evidence parts"](out.name, again)
    assert f"| {sas['bits_per_byte']:.4f} |" in shown


@pytest.mark.fuzz
def test_rows_of_a_process_are_those_of_this_one(subject, tmp_path):
    prepare = functools.partial(prepared, "embedded", "float32", ("e",), quick=True)
    _, specs = prepare()
    told = []
    options = {"out": tmp_path / "evidence.json", "on_row": lambda *row: told.append(row)}
    found = measuring.measure(subject, specs, workers=2, prepare=prepare, **options)
    assert found["failures"] == {}
    assert {row[0] for row in told} == set(found["rows"]) == {spec.key for spec in specs}
    alone = measuring.measure(subject, specs, out=None, on_row=lambda *row: None)["rows"]
    for rows_of in (found["rows"], alone):
        for row in rows_of.values():
            del row["seconds"]
    assert found["rows"] == alone


def test_a_file_of_another_model_is_refused(subject, tmp_path):
    out = tmp_path / "evidence.json"
    spec = rows.Spec("a", lambda subject: {"cost": 0.0})
    measuring.measure(subject, [spec], out=out, on_row=lambda *row: None)
    other = subjects.Subject.__new__(subjects.Subject)
    other.__dict__ |= subject.__dict__
    other.decoder = models.Decoder(
        **{**vars(subject.decoder), "norm": jnp.ones_like(subject.decoder.norm)}
    )
    with pytest.raises(ValueError, match="checksum"):
        measuring.measure(other, [spec], out=out, on_row=lambda *row: None)
