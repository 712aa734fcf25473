"""The evidence: its simulations against float64 numpy, its rows' names, its file, its tables."""

import dataclasses
import json
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import readme, report
from benchmarks.evidence import __main__ as command
from benchmarks.evidence import attends, caches, pooling, rows, softmaxes, whole, writing
from benchmarks.evidence.catalogue import BY_WEIGHT, SHOWN, SMOLLM2, TABLES, specs_of
from benchmarks.evidence.choices import Choices
from benchmarks.evidence.measuring import measure
from benchmarks.evidence.rows import Spec, meant, spelled_out
from benchmarks.evidence.subject import QUICK, TOKENS, Sizes, name_of
from benchmarks.tables import OUT_OF_TIME
from tests.tools.docs_helpers import docs_text
from turbojax import SAS, TurboConfig, models, polar
from turbojax.evaluation import Interval, method


def test_degrees_are_least_squares_fits():
    grid = (np.arange(100_000) + 0.5) / 100_000
    for degree in (1, 3):
        want = np.polynomial.polynomial.polyfit(grid, np.exp(-grid), degree)
        np.testing.assert_allclose(attends.exponential_fit(degree), want, atol=1e-6)
    # The paper's cubic has four digits.
    np.testing.assert_allclose(attends.exponential_fit(3), SAS().coefficients, atol=2e-4)
    for wrong in ({"degree": 0}, {"degree": 6}, {"base": "2"}):
        with pytest.raises(ValueError, match=str(next(iter(wrong)))):
            attends.OfDegree(**wrong)


def test_sas_of_a_degree_against_float64():
    x = np.linspace(-9, 0, 997).astype(np.float32)
    softmax = attends.OfDegree(-5.0, degree=2)
    y = -x.astype(np.float64)
    f = y - np.floor(y)
    want = np.polynomial.polynomial.polyval(f, attends.exponential_fit(2)) * np.exp(-np.floor(y))
    want = np.where(x < -5, 0, want)
    np.testing.assert_allclose(np.asarray(softmax(jnp.asarray(x))), want, atol=2e-7)
    special = np.asarray(softmax(jnp.asarray([-jnp.inf, jnp.nan, 1e-6], jnp.float32)))
    assert special[0] == 0
    assert np.isnan(special[1])
    assert special[2] == pytest.approx(attends.exponential_fit(2)[0])
    errors = softmaxes.function_errors(softmax)
    assert errors["cut"] == pytest.approx(math.exp(-5), rel=1e-3)
    assert errors["function_error"] == pytest.approx(
        np.abs(want - np.exp(-y))[x >= -5].max(), rel=0.02
    )


@pytest.mark.fuzz
@pytest.mark.parametrize("rotates", [True, False])
def test_polar_rounding_against_float64(rotates):
    x = np.random.default_rng(0).standard_t(3, (5, 64)).astype(np.float32)
    x[4] = 0
    got = np.asarray(attends.PolarRounding(3, rotates)(jnp.asarray(x)))
    rotation = np.asarray(polar.rotation(64).matrix(), np.float64)
    wide = x[:4].astype(np.float64) @ (rotation.T if rotates else np.eye(64))
    table = polar.centroids(3, 64).astype(np.float64)
    norm = np.linalg.norm(wide, axis=-1, keepdims=True)
    chosen = table[np.abs((wide / norm)[..., None] - table).argmin(-1)]
    want = chosen * norm / np.linalg.norm(chosen, axis=-1, keepdims=True)
    want = want @ (rotation if rotates else np.eye(64))
    # The norm is stored in 11 bits.
    np.testing.assert_allclose(got[:4], want, atol=np.abs(want).max() * 2**-10)
    assert not got[4].any()
    assert np.isnan(np.asarray(attends.PolarRounding(3, rotates)(jnp.full((1, 64), jnp.nan)))).all()


@pytest.mark.slow
def test_polar_rounding_is_the_codec():
    x = jax.random.normal(jax.random.key(0), (64, 64))
    rotation = polar.rotation(64)
    want = polar.decode(*polar.encode(x, rotation, 4), rotation, 4)
    got = attends.PolarRounding(4, True)(x)
    # But for a coordinate near a threshold, which rounding may put on either side.
    assert np.mean(np.abs(np.asarray(got - want)) > 0.01) < 0.005


@pytest.mark.fuzz
def test_output_errors_against_float64():
    """As `layer_errors` has them: the cosine is the mean over queries and heads."""
    rng = np.random.default_rng(2)
    q, k, v = (rng.normal(size=(1, 1, 8, heads, 16)).astype(np.float32) for heads in (4, 2, 2))
    rounding = attends.PolarRounding(2, rotates=False)
    attend = attends.Rounded(rounding)
    tensors = tuple(jnp.asarray(x) for x in (q, k, v))
    cosine, relative, rmse = whole.output_errors(tensors, attend=attend, first=3)

    def attended(key: np.ndarray, value: np.ndarray) -> np.ndarray:
        key, value = (np.repeat(x[0, 0].astype(np.float64), 2, axis=1) for x in (key, value))
        scores = np.einsum("tnh,snh->nts", q[0, 0].astype(np.float64), key) / 4
        weights = np.exp(np.where(np.tri(8, dtype=bool), scores, -np.inf))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.einsum("nts,snh->tnh", weights, value)[3:]

    want, got = attended(k, v), attended(*(np.asarray(rounding(x)) for x in tensors[1:]))
    lengths = np.linalg.norm(want, axis=-1) * np.linalg.norm(got, axis=-1)
    assert float(cosine[0]) == pytest.approx(((want * got).sum(axis=-1) / lengths).mean(), rel=1e-4)
    off = np.abs(got - want)
    assert float(relative[0]) == pytest.approx(off.sum() / np.abs(want).sum(), rel=1e-4)
    assert float(rmse[0]) == pytest.approx(np.sqrt((off**2).mean()), rel=1e-4)


def test_marks_say_which_layers_are_dense():
    every = pooling.policies(4096, 128)
    assert every["topk/0.25"].marks(3)[0] is not None
    assert [x is None for x in every["dense_first/2"].marks(3)] == [True, True, False]
    with pytest.raises(ValueError, match="dense_layers=2 must be below the model's 2 layers"):
        every["dense_first/2"].marks(2)
    assert attends.Exact().marks(2) == (None, None)
    assert every["topk_window/0.125"].pooled.policy.near == 128


def _grouped_error(x: np.ndarray, bits: int, axis: int, group: int) -> float:
    """float64, one layer ``[n, T, K, H]``, with loops over groups."""
    rows = np.moveaxis(x.astype(np.float64), axis, -1).reshape(-1, group)
    off = 0.0
    for row in rows:
        step = (row.max() - row.min()) / (2**bits - 1)
        off += np.sum((np.rint((row - row.min()) / step) * step + row.min() - row) ** 2)
    return math.sqrt(off / np.sum(x.astype(np.float64) ** 2))


def test_channel_errors_against_float64():
    x = np.random.default_rng(1).normal(size=(2, 1, 80, 2, 32)).astype(np.float32)
    x[0, ..., 5] += 20  # a channel that is off in every token: each token's group must reach it
    found = rows.errors_by_layer(jnp.asarray(x), jnp.asarray(x[::-1]))
    for kind, axis in (("channel", 1), ("token", 3)):
        for bits in (2, 4):
            # Groups of 32, the channels of a head; 80 tokens have two whole ones.
            want = [_grouped_error(layer[:, :64], bits, axis, 32) for layer in x]
            np.testing.assert_allclose(found["key"][f"{kind}-{bits}"], want, rtol=1e-4)
            assert found["value"][f"{kind}-{bits}"] == pytest.approx(want[::-1], rel=1e-4)
    assert found["key"]["token-2"][0] > 5 * found["key"]["channel-2"][0]
    with pytest.raises(ValueError, match="must have at least 32 tokens"):
        rows.errors_by_layer(jnp.asarray(x[:, :, :16]), jnp.asarray(x[:, :, :16]))


CONFIG = models.TransformerConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=768,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    max_length=4096,
)


class Model:
    """As much of a subject as names of rows and files need."""

    sizes = Sizes()

    def __init__(self, heads: int = 4, *, pinned: bool = True) -> None:
        self.pinned = pinned
        config = dataclasses.replace(CONFIG, num_kv_heads=heads, num_heads=2 * heads)
        self.decoder = types.SimpleNamespace(config=config)

    def identity(self) -> dict:
        return {"model": {"name": "none"}, "settings": {}, "texts": {"unit": "byte"}}


@pytest.mark.parametrize(("heads", "pinned"), [(4, True), (8, True), (3, False)])
def test_every_method_has_a_name_that_is_known(heads, pinned):
    subject = Model(heads, pinned=pinned)
    specs = [spec for table in TABLES for spec in table.specs(subject)]
    names = {
        spec.key.partition("/")[2] for spec in specs if spec.key[:4] in ("cach", "int4", "laye")
    }
    for name in names:
        method(name, subject.decoder.config)
    assert len(names) > 40
    counted = [x for x in names if "low_heads" in x]
    # gap_std of half of the heads is 2/4bit; an odd number has no half.
    assert len(counted) == 4 * (heads - 1) - (heads % 2 == 0)


def test_every_table_has_rows_quick_ones_too():
    subject = Model(4)
    assert [table.letter for table in TABLES] == list("abcdefghij")
    for table in TABLES:
        assert specs_of(subject, [table.letter], quick=True), table.letter
    every = specs_of(subject, command.LETTERS, quick=False)
    quick = {spec.key for spec in specs_of(subject, command.LETTERS, quick=True)}
    assert quick < {spec.key for spec in every}
    # Rows are shared.
    assert len({spec.key for spec in every}) < len(every)
    ordered = [spec.key for spec in specs_of(subject, ["e", "b"], quick=False)]
    assert ordered[:2] == ["channels", "whole/sas"]
    assert set(BY_WEIGHT) == set(command.LETTERS)
    assert command.parse([]).tables == command.LETTERS
    assert command.parse(["--model", "smollm2"]).tables == BY_WEIGHT
    with pytest.raises(SystemExit):
        command.parse(["--tables", "a,z"])
    with pytest.raises(SystemExit):
        command.parse(["--workers", "0"])


def test_rows_are_kept_and_failures_are_tried_again(tmp_path):
    calls = []

    def spec(key: str, error: Exception | None = None) -> Spec:
        def run(subject: object) -> dict:
            calls.append(key)
            if error is not None:
                raise error
            return {"cost": 0.5}

        return Spec(key, run)

    out, told = tmp_path / "evidence.json", []
    specs = [spec("a"), spec("b", NotImplementedError("not here")), spec("a"), spec("c")]
    options = {"out": out, "on_row": lambda key, row, reason, seconds: told.append((key, reason))}
    first = measure(Model(), specs, **options)
    assert calls == ["a", "b", "c"]
    with pytest.raises(ValueError, match="workers=2 must be 1"):
        measure(Model(), specs, workers=2, **options)
    assert first["failures"] == {"b": "not here"}
    assert ("b", "not here") in told
    assert set(json.loads(out.read_text())["rows"]) == {"a", "c"}
    again = measure(Model(), [spec("a"), spec("b"), spec("d")], **options)
    assert calls[3:] == ["b", "d"]
    assert again["rows"]["a"] == first["rows"]["a"]
    assert again["failures"] == {}
    late = measure(Model(), [spec("e")], deadline=0.0, **options)
    assert late["failures"] == {"e": OUT_OF_TIME}
    assert "e" not in calls


def _cached(cost: float, size: int, windows: int = 6) -> dict:
    return {
        "bits_per_byte": 0.8 + cost,
        "exact_bits_per_byte": 0.8,
        "cost": cost,
        "cost_interval": [cost - 0.001, cost + 0.001],
        "divergence": 0.01,
        "same_greedy_choice": 0.98,
        "cost_by_window": [cost + 0.0001 * i for i in range(windows)],
        "nan_windows": 0,
        "decoded": 3072,
        "cache_bytes": size,
        "exact_cache_bytes": 1000,
    }


RESULT = {
    "device": "a GPU",
    "jax": "0",
    "date": "2026-01-02",
    "model": {
        "name": "embedded",
        "parameters": 7_900_000,
        "kv_heads": 4,
        "head_dim": 64,
        "dtype": "bfloat16",
    },
    "settings": dataclasses.asdict(Sizes()),
    "texts": {"unit": "byte", "owners": list("abcdef"), "long_owners": list("abcdef")},
    "rows": {
        "cache/4bit": _cached(0.004, 270),
        "cache/kivi4": _cached(0.003, 290),
        "cache/gear4": _cached(0.009, 340),
        "cache/e4m3": {**_cached(0, 500), "cost": None, "cost_interval": None, "nan_windows": 2},
        "cache/4bit:low_heads=2,head_priority=entropy": _cached(0.002, 210),
        "cache/2/4bit": _cached(0.003, 210),
        "layers/4bit": {"relative_l1": [0.1, 0.2], "by_newest": [0.13, None, 0.05, 0.04]},
        "long/topk/0.25": {**_cached(0.1, 1), "density": 0.25},
        "long/window/8th": {**_cached(0.2, 1), "density": 0.3},
        "int4/kv4": {**_cached(0.02, 260), "exact_bits_per_byte": 0.85, "bits_per_byte": 0.87},
        "int4/kivi4": {**_cached(0.01, 260), "exact_bits_per_byte": 0.85, "bits_per_byte": 0.86},
        "whole/polar-2-rotated": {**_cached(0.01, 1), "relative_l1": [0.1, 0.2]},
        "whole/polar-2-plain": {**_cached(0.03, 1), "relative_l1": [0.1, 0.3]},
    },
    "failures": {"cache/kv4": "no kernel | none"},
}


def test_tables_name_what_is_worse_and_what_is_missing():
    shown = {name: table("evidence.json", RESULT) for name, table in SHOWN.tables.items()}
    text = shown["evidence methods"]
    assert "| exact | 16.00 | 1.00x | 0.8000 | - | - | - | - |" in text
    assert "| **4 bits** | 4.32 | 3.70x | 0.8040 | +0.0040 [+0.0030, +0.0050] |" in text
    assert "| e4m3 | 8.00 | 2.00x | 0.8000 | NaN in 2 windows |" in text
    assert (
        "| 4 bits | KIVI 4 | -6.9% | +0.0010 [+0.0010, +0.0010] | **worse**, with fewer bytes |"
        in text
    )
    assert "| 4 bits | GEAR-L 4 | -20.6% | -0.0050 [-0.0050, -0.0050] | better |" in text
    assert "Ours is worse in 1 of 2 pairs, in all of them with fewer bytes." in text
    assert "| 4 bits | 0.1300 | - | 0.0500 | 0.0400 |" in text
    assert "| better | 1.00x |" in text  # divergences are alike
    assert "`cache/kv4` (no kernel \\| none)" in text
    assert "(not run)" in text
    assert "worse than `entropy` with 2 (+0.0010)" in shown["evidence heads"]
    pooled = shown["evidence pooled"]
    assert "| `window/8th` | 0.300 |" in pooled
    assert "| `topk/0.25` |\n" in pooled.split("`window/8th`")[1]
    assert "| exact | 1.00x | 0.8500 | - | +0.0500 | - |" in shown["evidence int4"]
    assert "| +0.0700 |" in shown["evidence int4"]
    assert "in 1 of them with no fewer bytes: KV4 than KIVI 4." in shown["evidence int4"]
    rotated = "Rotated less not rotated: 2 bits -0.0200 [-0.0200, -0.0200]."
    assert rotated in shown["evidence polar"]
    assert "| exact | 16.00 |" in shown["evidence blocks"]
    assert "| exact | 0.8000 |" in shown["evidence parts"]
    for name, table in shown.items():
        assert table.startswith("!["), name
        assert "benchmarks/results/evidence.json" in table, name


def test_a_row_of_nan_is_no_better_than_a_number():
    nan = {**_cached(0, 270), "cost": None, "cost_interval": None, "cost_by_window": [None] * 6}
    rows = {**RESULT["rows"], "cache/4bit": nan}
    text = writing.comparison(
        {**RESULT, "rows": rows}, [("4 bits", "cache/4bit", "KIVI 4", "cache/kivi4")]
    )
    assert "| 4 bits | KIVI 4 | -6.9% | NaN | **worse** |" in text
    assert "Ours is worse in 1 of 1 pairs" in text


def test_what_an_interval_says():
    def interval(low: float, high: float) -> Interval:
        return Interval((low + high) / 2, low, high)

    assert writing.word(interval(-2, -1), 0) == "better"
    assert writing.word(interval(-2, -1), 0.1) == "better, with more bytes"
    assert writing.word(interval(1, 2), 0) == "**worse**"
    assert writing.word(interval(-1, 2), 0) == "not told apart"
    assert writing.difference(RESULT, "cache/4bit", "cache/3bit") is None
    assert writing.difference(RESULT, "cache/4bit", "cache/e4m3") is not None
    assert caches.head_method(2, 4, "gap_std") == "2/4bit"


def test_prose_agrees_with_the_results():
    """The figures that docs/benchmarks/evidence.md names outside of its tables."""
    _, result = report.newest(readme.RESULTS, ("evidence",))
    rows = result["rows"]

    def cost(name):
        return rows[f"cache/{name}"]["cost"]

    def apart(one, other):
        return writing.difference(result, f"cache/{one}", f"cache/{other}")

    def share(one, other):
        sizes = [rows[f"cache/{x}"]["cache_bytes"] for x in (one, other)]
        return 100 * (sizes[0] / sizes[1] - 1)

    def divergence(name):
        return rows[f"cache/{name}"]["divergence"]

    int8 = "4bit:mode=int8"
    for other in ("kivi4", "gear4"):
        assert apart(int8, other).low < 0 < apart(int8, other).high
    longer = divergence(f"{int8},buffer_size=256") / divergence(int8)
    assert 0.70 < longer < 0.78
    text = docs_text("benchmarks/evidence.md")
    fewer = [-share(int8, other) for other in ("kivi4", "gear4")]
    more = [share("kivi3", "3bit"), share("kivi2", "2bit")]
    k8v4 = [-share("k8v4", other) for other in ("int8", "e4m3")]
    figures = [
        f"with {fewer[0]:.0f} and {fewer[1]:.0f} % fewer bytes",
        f"by {apart('4bit', 'kivi4').mean:.4f} and {apart('4bit', 'gear4').mean:.4f} bits",
        f"these products cost {cost('4bit') - cost(int8):.4f}: with int8 products, or with exact "
        f"ones, the cost is {cost(int8):.4f} and {cost('4bit:mode=float'):.4f},",
        f"SAS costs {cost(f'{int8},softmax=sas') - cost(int8):.4f} more",
        f"stays {divergence(int8) / divergence('kivi4'):.1f} times that of KIVI 4",
        f"with {share(f'{int8},buffer_size=256', int8):.0f} % more bytes",
        f"by {apart('3bit', 'kivi3').mean:.4f} and {apart('2bit', 'kivi2').mean:.4f}, "
        f"with {more[0]:.0f} and {more[1]:.0f} % more bytes",
        f"with {k8v4[0]:.0f} and {k8v4[1]:.0f} % fewer bytes",
    ]
    assert [figure for figure in figures if figure not in text] == []


@pytest.mark.quick(slow=2)
@pytest.mark.parametrize("name", list(SHOWN.plots))
def test_plots_are_drawn_of_what_there_is(name, tmp_path):
    for i, result in enumerate((RESULT, {**RESULT, "rows": {}})):
        SHOWN.plots[name](result).savefig(tmp_path / f"{i}.png", dpi=20)
    assert QUICK.layers == 2


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("4bit", {"mode": "fp8", "buffer_size": 64, "flush": "all"}),
        ("4bit:mode=int8,buffer_size=256", {"mode": "int8", "buffer_size": 256, "flush": "all"}),
        ("3bit:block=32", {"mode": "fp8", "buffer_size": 32, "flush": "all", "block_kv": 32}),
    ],
)
def test_names_of_rows_mean_what_was_measured(name, options):
    """Not what the default has become."""
    cache = method(spelled_out(name), models.SHAPES["tiny"]).cache
    assert {key: getattr(cache, key) for key in options} == options
    assert cache.num_first_tokens == 0
    assert spelled_out("kivi4:residual_length=64") == "kivi4:residual_length=64"


def test_names_of_another_model_mean_todays_defaults():
    today, first = Model(3, pinned=False), Model(3)
    config = today.decoder.config
    assert meant(today, "4bit", config).cache == TurboConfig()
    assert meant(first, "4bit", config).cache.buffer_size == 64
    chosen = Choices.of(pinned=False)
    caches_of = {name: meant(today, name, config).cache for name in chosen.causes.values()}
    # No row is another's twin, and each says in its label what it is.
    assert len(set(caches_of.values())) == len(caches_of)
    by_label = {label: caches_of[name] for label, name in chosen.causes.items()}
    default = by_label.pop("the default: a first token, buffer of 128 that gives up its oldest")
    assert (default.num_first_tokens, default.buffer_size, default.flush) == (1, 128, "oldest")
    assert by_label["buffer of 64, no first token"].num_first_tokens == 0
    assert by_label["buffer of 128 that is emptied, no first token"].buffer_size == 128
    for size, name in chosen.blocks.items():
        cache = meant(today, name, config).cache
        assert f"({cache.block_q}, {cache.block_kv})" == size
        assert cache.buffer_size == 2 * cache.block_kv
    published = meant(today, list(chosen.parts.values())[3], config).cache
    assert published == TurboConfig.paper()
    pairs = {label for pair in chosen.pairs for label in pair}
    assert pairs == {*chosen.ours, *chosen.baselines}


def test_results_of_two_models_are_on_two_pages():
    assert not set(SHOWN.tables) & set(SMOLLM2.tables)
    assert not set(SHOWN.plots) & set(SMOLLM2.plots)
    result = {**RESULT, "settings": {**RESULT["settings"], "default": "TurboConfig()"}}
    text = SMOLLM2.tables["evidence smollm2 parts"]("evidence_smollm2_2026-01-02.json", result)
    assert text.startswith("![What FlashQ, SAS and both cost](evidence_smollm2_parts.png)")
    assert "the default: 4 bits, int8 and e4m3 products" in text
    assert "e4m3 products (our default)" not in text
    text = SHOWN.tables["evidence parts"]("evidence_2026-01-02.json", RESULT)
    assert text.startswith("![What FlashQ, SAS and both cost](evidence_parts.png)")
    assert "4 bits, e4m3 products (our default)" in text


def test_sizes_and_names_of_models_with_tokens():
    assert name_of("embedded") == "embedded"
    assert name_of("/tmp/m/SmolLM2-135M-Instruct.Q4_1.gguf") == "SmolLM2-135M-Instruct.Q4_1"
    assert name_of("/tmp/m/folder/") == "folder"
    # As many logits as `ExactRun` keeps, of the twelve held-out modules at most.
    windows = TOKENS.windows_per_file * len(models.held_out_modules())
    assert windows * (TOKENS.context + 1 - TOKENS.prompt - 1) * 49152 * 4 <= 2**31
