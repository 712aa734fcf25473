"""Levels against loops in float64: importance, ranks, similarity, density; order, and maps."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from typer.testing import CliRunner

import turbojax as tj
from tests.oracles import levels as oracle
from turbojax import models
from turbojax.app.levels import measure
from turbojax.app.main import app
from turbojax.levels import SimilarityCap, Threshold, TopK, block_importance, key_similarity
from turbojax.levels.grid import Grid
from turbojax.levels.ranking import assign

F32 = 2.0**-24


def _normal(seed, shape, dtype=jnp.float32):
    # From numpy: jax would compile a generator for every shape.
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype))


def _same(x):
    return x


def _bfloat16(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


# T, S, block_q, block_kv, samples, means
SHAPES = [
    (96, 96, 32, 32, 4, 4),
    (70, 101, 16, 24, 3, 2),
    (40, 100, 8, 16, 1, 8),
    (130, 60, 64, 8, 4, 1),
    (5, 9, 128, 128, 4, 4),
]


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(
    ("number", "is_causal"), [(1, True), (0, False), (2, False), (3, True), (4, False)]
)
def test_importance_is_that_of_the_definition(number, is_causal):
    tokens, size, block_q, block_kv, samples, means = SHAPES[number]
    query, key = _normal(0, (2, tokens, 4, 16)), 2 * _normal(1, (2, size, 2, 16))
    has_lengths = number in (1, 2, 3)
    lengths = ([tokens, tokens // 3], [size // 2, size - 1]) if has_lengths else None
    got = block_importance(
        query,
        key,
        block_q=block_q,
        block_kv=block_kv,
        is_causal=is_causal,
        query_seq_lengths=None if lengths is None else jnp.array(lengths[0]),
        key_value_seq_lengths=None if lengths is None else jnp.array(lengths[1]),
        query_samples=samples,
        key_means=means,
    )
    q, k = np.asarray(query, np.float64), np.asarray(key, np.float64)
    # A score is off by the rounding of its sum, a share by at most twice that.
    largest = np.abs(q).sum(-1).max() * np.abs(k).max() / 4
    bound = 4 * (16 + block_kv // means + 8) * F32 * largest
    for b, n in np.ndindex(2, 4):
        want = oracle.importance(
            q[b, :, n],
            k[b, :, n // 2],
            block_q=block_q,
            block_kv=block_kv,
            is_causal=is_causal,
            samples=samples,
            means=means,
            query_length=tokens if lengths is None else lengths[0][b],
            key_length=size if lengths is None else lengths[1][b],
            rounded=_same,
        )
        assert np.abs(np.asarray(got[b, n]) - want).max() < bound
    sums = np.asarray(got).sum(-1)
    assert np.all((np.abs(sums - 1) < 1e-5) | (sums == 0))


def test_importance_in_bfloat16():
    query, key = _normal(2, (1, 64, 1, 32), jnp.bfloat16), _normal(3, (1, 64, 1, 32), jnp.bfloat16)
    got = block_importance(query, key, block_q=16, block_kv=16, key_means=2)
    q, k = np.asarray(query[0, :, 0], np.float64), np.asarray(key[0, :, 0], np.float64)
    want = oracle.importance(
        q,
        k,
        block_q=16,
        block_kv=16,
        is_causal=False,
        samples=4,
        means=2,
        query_length=64,
        key_length=64,
        rounded=_bfloat16,
    )
    # A mean that is rounded the other way is off by a unit of its eight bits.
    largest = np.abs(q).sum(-1).max() * np.abs(k.reshape(-1, 8, 32).mean(1)).max() / math.sqrt(32)
    assert np.abs(np.asarray(got[0, 0]) - want).max() < 2 * 2**-8 * largest
    assert got.dtype == jnp.float32


def test_importance_tells_the_truth_about_attention_where_keys_are_alike():
    """Sampled queries that stand for all, and means that stand for their keys, lose nothing."""
    query = jnp.repeat(_normal(4, (1, 8, 2, 16)), 16, axis=1)
    key = jnp.repeat(2 * _normal(5, (1, 32, 2, 16)), 4, axis=1)
    got = block_importance(query, key, block_q=16, block_kv=16)
    scores = np.einsum("tnh,snh->nts", *(np.asarray(x[0], np.float64) for x in (query, key))) / 4
    weights = np.exp(scores)
    weights /= weights.sum(-1, keepdims=True)
    want = weights.reshape(2, 8, 16, 8, 16).sum(-1).mean(2)
    assert np.abs(np.asarray(got[0]) - want).max() < 1e-5


_compiled_assign = jax.jit(assign, static_argnums=(1, 4))


def _assign(policy, importance, grid, query_length, key_length):
    lengths = (jnp.array(x, jnp.int32) for x in (query_length, key_length))
    return np.asarray(_compiled_assign(jnp.asarray(importance), policy, *lengths, grid))


# In exact decimals: 0.15 of 20 blocks are 3.
FRACTIONS = ("0.05", "0.15", "0.25", "0.5")
MASSES = ("0.4", "0.5", "0.6", "0.8")


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(
    ("blocks", "is_causal"), [((16, 16), True), ((16, 8), False), ((8, 24), False), ((64, 8), True)]
)
def test_levels_are_those_of_the_ranks(blocks, is_causal):
    tokens, size, lengths = 200, 333, ([200, 61, 0], [333, 100, 333])
    grid = Grid(tokens, size, *blocks, is_causal)
    rng = np.random.default_rng(0)
    importance = rng.dirichlet(np.full(grid.columns, 0.1), (3, 2, grid.rows)).astype(np.float32)
    importance[0, 0, :, 3:9] = importance[0, 0, :, 3:4]  # ties
    importance[0, 1, :, ::4] = np.inf
    importance[1, 0, 0] = 0
    importance[1, 1, 0, 1:] = 0
    importance[1, 1, 0, 0] = np.float32(1.0000001)
    top = _assign(TopK(), importance, grid, *lengths)
    mass = _assign(Threshold(), importance, grid, *lengths)
    assert top.dtype == mass.dtype == np.int8
    for b, n, i in np.ndindex(importance.shape[:3]):
        seen = oracle.visible_blocks(i, lengths[0][b], lengths[1][b], *blocks, is_causal)
        row = importance[b, n, i], seen, oracle.forced_blocks(i, grid.columns, *blocks, is_causal)
        assert top[b, n, i].tolist() == oracle.top_k(*row, FRACTIONS).tolist()
        bounds = [float(bound) for bound in MASSES]  # as floats: the policy's own numbers
        assert mass[b, n, i].tolist() == oracle.threshold(*row, bounds, "0.06").tolist()


def test_select_levels_ranks_by_importance():
    query, key = _normal(6, (1, 160, 4, 16)), _normal(7, (1, 160, 2, 16))
    options = {"block_q": 16, "block_kv": 16, "is_causal": True}
    options |= {"scale": 0.5, "query_samples": 2, "key_means": 8}
    importance = np.asarray(block_importance(query, key, **options))
    for policy, want in (
        (TopK(), functools.partial(oracle.top_k, fractions=FRACTIONS)),
        (Threshold(least=0), functools.partial(oracle.threshold, bounds=MASSES, least=0)),
    ):
        got = np.asarray(tj.select_levels(query, key, policy, **options))
        for n, i in np.ndindex(4, 10):
            row = want(importance[0, n, i], i + 1, oracle.forced_blocks(i, 10, 16, 16, True))
            assert got[0, n, i].tolist() == row.tolist()


def test_counts_of_the_docstring():
    grid = Grid(8, 320, 8, 8, False)
    importance = np.arange(1, 41, dtype=np.float32)[None, None, None] / 1000
    got = _assign(TopK(), importance, grid, [8], [320])[0, 0, 0]
    assert got.tolist() == [0] * 20 + [8] * 10 + [4] * 4 + [2] * 4 + [1] * 2


def test_a_fraction_of_zero_still_leaves_one_block():
    importance = np.array([0.2, 0.5, 0.3], np.float32)[None, None, None]
    got = _assign(TopK(0, 0, 0, 0), importance, Grid(8, 24, 8, 8, False), [8], [24])
    assert got[0, 0, 0].tolist() == [0, 1, 0]


def test_threshold_counts_the_mass_of_forced_blocks():
    importance = np.array([0.3, 0.15, 0.12, 0.05, 0.38], np.float32)[None, None, None]
    grid = Grid(40, 40, 8, 8, True)
    rows = np.broadcast_to(importance, (1, 1, 5, 5))
    got = _assign(Threshold((0.5, 0.7, 0.9, 0.94), least=0), rows, grid, [40], [40])
    # 0.68 are there before the first choice: level 2 until 0.7, then 4 until 0.9, then 8.
    assert got[0, 0, 4].tolist() == [1, 2, 4, 0, 1]


def test_near_blocks_are_read_token_by_token_and_count():
    """By hand: blocks of 8, and those up to 9 tokens away; the nearest of j is 8 (i - j) - 7."""
    importance = np.array([0.3, 0.15, 0.12, 0.05, 0.38], np.float32)[None, None, None]
    grid = Grid(40, 40, 8, 8, True)
    rows = np.broadcast_to(importance, (1, 1, 5, 5))
    got = _assign(TopK(0.2, 0.8, 0.8, 0.8, near=9), rows, grid, [40], [40])[0, 0]
    # Blocks 2 to 4 and 0 come first, which are the 4 of the 5 that have a level.
    assert got[4].tolist() == [1, 0, 1, 1, 1]
    assert got[1].tolist() == [1, 1, 0, 0, 0]
    got = _assign(Threshold((0.5, 0.7, 0.9, 0.94), least=0, near=9), rows, grid, [40], [40])
    # 0.85 are there before the first choice: level 4 until 0.9.
    assert got[0, 0, 4].tolist() == [1, 4, 1, 1, 1]
    # Not causal: to both sides.
    got = _assign(TopK(0, 0, 0, 0, near=1), rows, Grid(40, 40, 8, 8, False), [40], [40])[0, 0]
    assert got[2].tolist() == [0, 1, 1, 1, 0]


@pytest.mark.parametrize("make", [TopK, Threshold])
def test_near_is_a_number_of_tokens(make):
    assert make(near=0) == make()
    with pytest.raises(ValueError, match="near=-1 must be at least 0"):
        make(near=-1)
    with pytest.raises(TypeError, match="near"):
        make(near=1.5)


@pytest.mark.parametrize("lengths", [None, [100, 33, 0]])
def test_similarity_is_the_mean_cosine_of_pairs(lengths):
    key = np.array(_normal(8, (3, 100, 2, 16)) + 0.7)
    key[0, 5, 0] = 0
    got = key_similarity(
        jnp.asarray(key),
        block_kv=24,
        key_value_seq_lengths=None if lengths is None else jnp.array(lengths),
    )
    assert got.shape == (3, 3, 2, 5)
    for b in range(3):
        for k in range(2):
            length = 100 if lengths is None else lengths[b]
            want = oracle.similarity(key[b, :, k].astype(np.float64), 24, length)
            # Products of unit vectors: 16 channels, and norms off by a few units.
            assert np.abs(np.asarray(got[:, b, k]) - want).max() < 64 * F32
    assert 0.2 < float(got.mean()) < 0.9


@pytest.mark.quick(1)
@pytest.mark.parametrize("policy", [TopK(), tj.levels.LocalWindow(16, (32, 64, None))])
def test_cap_makes_levels_finer_where_keys_differ(policy):
    query = _normal(9, (2, 160, 4, 16))
    # Noise of a size that differs from block to block: each level is refused somewhere.
    noise = jnp.linspace(0.0, 2.0, 160)[None, :, None, None]
    key = 1 + noise * _normal(10, (2, 160, 2, 16))
    options = {"block_q": 16, "block_kv": 16}
    limits = (0.5, 0.75, 0.6)  # at 4 stricter than at 8: a block may skip it
    before = np.asarray(tj.select_levels(query, key, policy, **options))
    got = np.asarray(tj.select_levels(query, key, SimilarityCap(policy, limits), **options))
    alike = np.asarray(key_similarity(key, block_kv=16))
    want = np.empty_like(before)
    for b, n, i, j in np.ndindex(*before.shape):
        want[b, n, i, j] = oracle.capped(int(before[b, n, i, j]), alike[:, b, n // 2, j], limits)
    assert np.array_equal(got, want)
    changed = {(int(a), int(b)) for a, b in zip(before.ravel(), got.ravel(), strict=True)}
    assert {a for a, b in changed if a != b} == {2, 4, 8}
    assert (8, 8) in changed


def test_density_counts_work():
    levels = jnp.array([[1, 0, 8], [2, 4, 1]], jnp.int8)
    assert float(tj.level_density(levels)) == pytest.approx((1 + 0.125 + 0.5 + 0.25 + 1) / 6)
    # Above the diagonal nothing counts: three blocks are seen.
    options = {"block_q": 16, "block_kv": 16, "is_causal": True}
    assert float(tj.level_density(levels, **options)) == pytest.approx((1 + 0.5 + 0.25) / 3)
    # Queries of 32 tokens see two blocks more each.
    options["block_q"] = 32
    assert float(tj.level_density(levels, **options)) == pytest.approx((1 + 0.75 + 1) / 5)
    many = jnp.full((2, 3, 64, 64), 8, jnp.int8)
    assert float(tj.level_density(many)) == 1 / 8
    assert float(tj.level_density(jnp.ones((2, 64, 64), jnp.int32), is_causal=True)) == 1


def test_density_of_the_default_policies_is_as_documented():
    """0.05 + 0.1 / 2 + 0.1 / 4 + 0.25 / 8 for `TopK`, where no fraction is rounded."""
    query, key = _normal(11, (1, 320, 2, 16)), _normal(12, (1, 320, 2, 16))
    levels = tj.select_levels(query, key, TopK(), block_q=16, block_kv=8)
    assert float(tj.level_density(levels)) == pytest.approx(0.05 + 0.05 + 0.025 + 0.03125)


def test_density_of_what_is_no_level():
    bad = jnp.array([[1, 3]])
    with pytest.raises(ValueError, match=r"levels hold \[3\], must be among \(0, 1, 2, 4, 8\)"):
        tj.level_density(bad)
    assert np.isnan(jax.jit(tj.level_density)(bad))
    with pytest.raises(TypeError, match="integer"):
        tj.level_density(jnp.ones((2, 2)))
    with pytest.raises(ValueError, match="no axis empty"):
        tj.level_density(jnp.ones(2, jnp.int8))


GRIDS = [
    ((8, 8, 16), (4, 4, 8)),
    ((4, 12, 24), (4, 4, 8)),
    ((16, 48), (8, 16)),
    ((6, 10, 8), (2, 2, 8)),
    ((3, 5), (1, 1)),
    ((64,), (16,)),
    ((2, 4, 4, 4), (2, 2, 2, 2)),
]


@pytest.mark.parametrize(("shape", "brick"), GRIDS)
def test_every_block_is_a_brick_and_so_are_its_halves(shape, brick):
    order = tj.levels.grid_order(shape, brick)
    assert order.dtype == np.int32
    assert np.array_equal(np.sort(order), np.arange(math.prod(shape)))
    place = np.stack(np.unravel_index(order, shape), -1)
    size = math.prod(brick)
    while size >= 1:
        blocks = place.reshape(-1, size, len(shape))
        low, sides = blocks.min(1), np.ptp(blocks, axis=1) + 1
        # As many places as tokens, of one shape, and where a multiple of it begins.
        assert np.all(sides.prod(-1) == size)
        assert np.all(sides == sides[0])
        assert np.all(low % sides[0] == 0)
        if size == math.prod(brick):
            assert tuple(sides[0]) == brick
            numbers = np.ravel_multi_index(
                tuple((low // sides[0]).T), np.floor_divide(shape, brick)
            )
            assert np.array_equal(numbers, np.arange(len(low)))
        size //= 2


def test_what_levels_average_are_cubes():
    order = tj.levels.grid_order((8, 8, 16), (4, 4, 8))
    place = np.stack(np.unravel_index(order, (8, 8, 16)), -1)
    for size, sides in ((8, (2, 2, 2)), (4, (1, 2, 2)), (2, (1, 1, 2))):
        assert tuple(np.ptp(place[:size], axis=0) + 1) == sides
    place = np.stack(np.unravel_index(tj.levels.grid_order((8, 16), (8, 16)), (8, 16)), -1)
    assert tuple(np.ptp(place[:8], axis=0) + 1) == (2, 4)


def test_exact_attention_is_the_same_in_any_order():
    """And the way back is the inverse: of attention without a mask nothing else changes."""
    shape = (4, 4, 16)
    order = tj.levels.grid_order(shape, (4, 4, 8))
    query, key, value = (
        jax.random.normal(k, (1, 256, 2, 16)) for k in jax.random.split(jax.random.key(0), 3)
    )
    levels = jnp.ones((1, 1, 2, 2), jnp.int8)
    blocks = {"block_q": 128, "block_kv": 128}
    q, k, v = (x[:, order] for x in (query, key, value))
    out = tj.pooled_attention(q, k, v, levels, is_causal=False, **blocks)
    q, k, v = (np.asarray(x, np.float64)[0] for x in (query, key, value))
    scores = np.exp(np.einsum("tnh,snh->nts", q, k) / 4)
    exact = np.einsum("nts,snh->tnh", scores / scores.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(out[0, np.argsort(order)], exact, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "brick", "error", "message"),
    [
        ((8, 8), (4, 4, 8), ValueError, r"brick=\(4, 4, 8\) must have a side for each axis of"),
        ((), (), ValueError, r"brick=\(\) must have a side for each axis"),
        ((8, 12), (4, 6), ValueError, r"brick=\(4, 6\) must have sides that are powers of two"),
        ((8, 8), (4, 0), ValueError, r"brick=\(4, 0\) must have sides that are powers of two"),
        ((8, 10), (4, 4), ValueError, r"shape=\(8, 10\) must have positive multiples of brick"),
        ((0, 8), (4, 4), ValueError, r"shape=\(0, 8\) must have positive multiples of brick"),
        ((2**16, 2**15), (1, 1), ValueError, r"must have less than 2\*\*31 tokens"),
        ((8, 8.0), (4, 4), TypeError, "float"),
    ],
)
def test_refusals(shape, brick, error, message):
    with pytest.raises(error, match=message):
        tj.levels.grid_order(shape, brick)


SMALL = ["--tokens", "96", "--block", "8", "--layer", "1"]
# The other policies are in the picture.
IN_TABLE = ("topk", "strided")


def _run(*arguments: str):
    return CliRunner().invoke(app, ["levels", *arguments], env={"COLUMNS": "160"})


@pytest.mark.fuzz
def test_json_report_and_picture(tiny_folder, tmp_path):
    plot = tmp_path / "levels.png"
    names = [name for name in measure.POLICY_NAMES if name not in IN_TABLE]
    options = ["--policy", ",".join(names), "--json", "--plot", str(plot)]
    result = _run("--model", tiny_folder, *SMALL, *options)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert [row["name"] for row in report["results"]] == names
    assert report["settings"]["heads"] == [0, 1, 2, 3]
    for row in report["results"]:
        shares = {int(level): share for level, share in row["shares"].items()}
        assert sum(shares.values()) == pytest.approx(1)
        work = sum(share / level for level, share in shares.items() if level)
        assert row["density"] == pytest.approx(work, rel=1e-6)
        assert len(row["densities"]) == len(row["errors"]) == 4
        assert 0.5 < row["cosine"] < 1
        assert 0 < row["relative_l1"] < 1
    by_name = {row["name"]: row for row in report["results"]}
    # More work, less error: the same policy with higher bounds.
    assert by_name["threshold95"]["density"] > by_name["threshold"]["density"]
    assert by_name["threshold95"]["relative_l1"] < by_name["threshold"]["relative_l1"]
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_table(tiny_folder):
    result = _run("--model", tiny_folder, *SMALL, "--policy", ", ".join(IN_TABLE), "--head", "2,0")
    assert result.exit_code == 0, result.stderr
    for text in (*IN_TABLE, "ideal speed-up", "96 tokens in blocks of 8", "2 heads"):
        assert text in result.stdout


@pytest.mark.slow
def test_operands_are_those_of_the_layer(tiny_folder, tmp_path):
    """Attention with the layer's query and key, done by hand from the weights."""
    file = tmp_path / "text"
    file.write_bytes(bytes(range(1, 64)))
    model = models.load(tiny_folder, dtype=jnp.float32)
    settings = measure.MapSettings(file=file, layer=1, tokens=64, block=8)
    query, key, value = measure._layer_operands(model, settings)
    seen = []

    def attend(query, key, value, cache, options=None):
        jax.debug.callback(lambda *x: seen.append(x), query, key, value, ordered=True)
        return models.causal_attention(query, key, value)

    model(jnp.arange(64)[None], attend=attend)
    jax.effects_barrier()
    assert len(seen) == 2
    for ours, theirs in zip((query, key, value), seen[1], strict=True):
        assert np.abs(np.asarray(ours) - theirs).max() < 1e-5


@pytest.mark.quick(3, slow=0)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--file", "/no/such/file"], "No such file or directory: '/no/such/file'"),
        (["--policy", "best"], "policy 'best' must be one of topk, threshold,"),
        (["--policy", "topk,topk"], "must name each policy once"),
        (["--layer", "2"], "layer=2 must be between 0 and 1"),
        (["--head", "4"], "heads=(4,) must be between 0 and 3"),
        (["--head", "x"], "invalid literal for int"),
        (["--tokens", "129"], "tokens=129 must be at most the model's 128"),
        (["--tokens", "1"], "tokens=1 must be at least 2"),
        (["--block", "12"], "block=12 must be a positive multiple of 8"),
        (["--plot", "/no/such/folder/x.png"], "must be a file in a folder that exists"),
    ],
)
def test_errors_are_one_clear_line(tiny_folder, arguments, message):
    result = _run("--model", tiny_folder, *SMALL, "--policy", "window", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_file_that_is_too_short(tiny_folder, tmp_path):
    file = tmp_path / "short"
    file.write_bytes(b"abc")
    result = _run("--model", tiny_folder, *SMALL, "--file", str(file))
    assert result.exit_code == 2
    assert "has 3 bytes, must have at least 95" in result.stderr


def test_a_model_of_other_tokens_is_refused(tmp_path):
    config = models.TransformerConfig(300, 32, 48, 1, 4, 2, 16, 128)
    model = nnx.eval_shape(lambda: models.Transformer(config, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="vocab_size=300 must be 256"):
        measure.run(model, measure.MapSettings(file=tmp_path))
