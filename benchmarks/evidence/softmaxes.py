"""Tables of SAS: alone, with FlashQ, and by its threshold and degree."""

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import tables
from benchmarks.evidence import writing
from benchmarks.evidence.attends import OfDegree, Turbo
from benchmarks.evidence.caches import QUICK
from benchmarks.evidence.choices import Choices, of_result
from benchmarks.evidence.rows import Spec, cached, within
from benchmarks.evidence.subject import Subject
from benchmarks.evidence.writing import EvidenceTable, Section, measured
from benchmarks.plots import wide_figure
from benchmarks.tables import Result, Row
from turbojax.numerics.config import TurboConfig
from turbojax.numerics.sas import SAS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Large blocks: the definition walks over them one by one.
_FLOAT = TurboConfig(mode="float", block_q=512, block_kv=512, buffer_size=512)


def attention_with(softmax: SAS) -> Turbo:
    """Unrounded products, and this in place of the exponential; the definition, in float32."""
    return Turbo(dataclasses.replace(_FLOAT, softmax=softmax), "xla")


# (b) FlashQ alone, SAS alone, both ----------------------------------------------------------------

_SAS_ALONE = "sas"


def _parts_specs(subject: Subject) -> list[Spec]:
    parts = Choices.of(pinned=subject.pinned).parts
    names = [name for name in parts.values() if name is not None]
    alone = within(_SAS_ALONE, attention_with(SAS()), quick=True)
    return [alone, *(cached(name, quick=name in QUICK) for name in names)]


def _parts_entries(result: Result) -> dict[str, str]:
    parts = of_result(result).parts.items()
    return {k: f"whole/{_SAS_ALONE}" if name is None else f"cache/{name}" for k, name in parts}


def parts_section(result: Result) -> Section:
    entries = _parts_entries(result)
    lines = writing.exact_lines(result, "exact")
    lines += [
        [label, *writing.text_cells(result, row)]
        for label, row in measured(result, entries).items()
    ]
    about = "SAS alone is within whole windows, since there is nothing to cache but exact tokens."
    return Section(
        [tables.table(["method", *writing.text_header(result)], lines)],
        about,
        list(entries.values()),
    )


def parts_plot(result: Result) -> "Figure":
    return writing.costs(result, _parts_entries(result), "FlashQ and SAS")


# (f) Threshold and degree of SAS ------------------------------------------------------------------

_THRESHOLDS = (-2.0, -3.0, -4.0, -5.0, -6.0, -8.0, -10.0)
_DEGREES = (1, 2, 3, 4)
_DEFAULT = SAS().threshold


def _sas_name(threshold: float, degree: int) -> str:
    return f"sas{threshold:g}-degree{degree}"


_BY_THRESHOLD = {x: f"whole/{_sas_name(x, 3)}" for x in _THRESHOLDS}
_BY_DEGREE = {x: f"whole/{_sas_name(_DEFAULT, x)}" for x in _DEGREES}


def function_errors(softmax: SAS) -> Row:
    """Largest errors of an exponential on 200,001 points of [-20, 0], against float64."""
    x = np.linspace(-20, 0, 200001).astype(np.float32)
    got, want = np.asarray(jax.jit(softmax)(jnp.asarray(x))), np.exp(x.astype(np.float64))
    above = x >= softmax.threshold
    return {
        "function_error": float(np.abs(got - want)[above].max()),
        "cut": float(np.abs(got - want)[~above].max()),
    }


def _sas_spec(threshold: float, degree: int) -> Spec:
    softmax = OfDegree(threshold, degree=degree)
    quick = (threshold, degree) in ((-2.0, 3), (_DEFAULT, 1))
    plain = within(_sas_name(threshold, degree), attention_with(softmax), quick=quick)

    def measure(subject: Subject) -> Row:
        return {**plain.measure(subject), **function_errors(softmax)}

    return dataclasses.replace(plain, measure=measure)


def _sas_specs(subject: Subject) -> list[Spec]:
    by_degree = [_sas_spec(_DEFAULT, degree) for degree in _DEGREES]
    return [*by_degree, *(_sas_spec(threshold, 3) for threshold in _THRESHOLDS)]


def sas_section(result: Result) -> Section:
    entries = {(f"{x:g}", "3"): key for x, key in _BY_THRESHOLD.items()}
    entries |= {(f"{_DEFAULT:g}", str(x)): key for x, key in _BY_DEGREE.items()}
    lines = []
    for (threshold, degree), key in entries.items():
        row = writing.found(result, key)
        if row is None:
            continue
        errors = [f"{row['function_error']:.2g}", f"{row['cut']:.2g}"]
        lines.append(writing.whole_line(result, threshold, row, degree, *errors))
    header = ["threshold", "degree", "largest error above it", "largest value cut"]
    about = (
        "Nothing else is rounded, within whole windows; polynomials are least-squares fits on "
        "[0, 1), of degree 3 the paper's."
    )
    return Section(
        [tables.table([*header, *writing.whole_header(result)], lines)],
        about,
        list(entries.values()),
    )


def sas_plot(result: Result) -> "Figure":
    figure = wide_figure(10)
    left, right = figure.subplots(1, 2)
    for axes, keys, name in (
        (left, _BY_THRESHOLD, "threshold of SAS, degree 3"),
        (right, _BY_DEGREE, f"degree of its polynomial, threshold {_DEFAULT:g}"),
    ):
        rows = [(x, row) for x, key in keys.items() if (row := writing.found(result, key))]
        writing.curves(axes, {name: rows})
        axes.set(xlabel=name, ylabel=writing.cost_label(result))
    return figure


PARTS = EvidenceTable(
    "b", "parts", "What FlashQ, SAS and both cost", _parts_specs, parts_section, parts_plot
)
SAS_TABLE = EvidenceTable(
    "f", "sas", "What threshold and degree of SAS cost", _sas_specs, sas_section, sas_plot
)
