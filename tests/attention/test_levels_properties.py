"""What holds for all levels: invariants, transforms, patterns, and calls that are refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests.oracles import levels as oracle
from turbojax.levels import LocalWindow, SimilarityCap, Strided, Threshold, TopK, block_importance

POLICIES = (
    TopK(),
    TopK(0, 0.3, 0.3, 1),
    Threshold(),
    Threshold((0.2, 0.9, 0.9, 1.0), least=0),
    SimilarityCap(TopK(0.1, 0.2, 0.5, 1.0), (0.1, 0.05, 0.02)),
    LocalWindow(16, (32, 48, 64), sinks=0),
    SimilarityCap(LocalWindow(16, (32, 48, None)), (0.1, 0.05, 0.02)),
    Strided(8, 3, level=2, others=0, sinks=0),
)
# One of each path through the code.
PATHS = (POLICIES[0], POLICIES[2], POLICIES[4], POLICIES[6])
BLOCKS = {"block_q": 16, "block_kv": 16}


def _normal(seed, shape, dtype=jnp.float32):
    # From numpy: jax would compile a generator for every shape.
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype))


@pytest.mark.quick(1)
@pytest.mark.parametrize("policy", PATHS[1:3])
def test_full_lengths_are_no_lengths(policy):
    query, key = _normal(0, (2, 70, 4, 8)), _normal(1, (2, 53, 2, 8))
    select = functools.partial(tj.select_levels, query, key, policy, **BLOCKS)
    lengths = {
        "query_seq_lengths": jnp.array([70, 70]),
        "key_value_seq_lengths": jnp.array([53, 53]),
    }
    assert np.array_equal(select(), select(**lengths))


@pytest.mark.slow
@pytest.mark.optimized
def test_transforms_give_the_same_bits():
    policy = PATHS[2]  # which goes through the first path, too
    query, key = _normal(2, (3, 80, 4, 8), jnp.bfloat16), _normal(3, (3, 80, 2, 8), jnp.bfloat16)
    select = functools.partial(tj.select_levels, policy=policy, is_causal=True, **BLOCKS)
    eager = np.asarray(select(query, key))
    assert np.array_equal(eager, select(query, key))
    assert np.array_equal(eager, jax.jit(select)(query, key))
    mapped = jax.vmap(select)(query[:, None], key[:, None])[:, 0]
    assert np.array_equal(eager, mapped)
    _, scanned = jax.lax.scan(lambda c, x: (c, select(x[0][None], x[1][None])[0]), 0, (query, key))
    assert np.array_equal(eager, scanned)


@pytest.mark.slow
def test_sequences_and_heads_do_not_matter_to_each_other():
    query, key = _normal(4, (2, 64, 4, 8)), _normal(5, (2, 64, 2, 8))
    options = {**BLOCKS, "is_causal": True}
    both = tj.select_levels(query, key, TopK(), **options)
    one = tj.select_levels(query[1:, :, 2:], key[1:, :, 1:], TopK(), **options)
    assert np.array_equal(both[1:, 2:], one)
    grouped = tj.select_levels(query, jnp.repeat(key, 2, axis=2), TopK(), **options)
    assert np.array_equal(both, grouped)


@pytest.mark.quick(1)
@pytest.mark.parametrize("policy", [TopK(), Threshold()])
def test_causal_levels_do_not_know_the_future(policy):
    query, key = _normal(6, (1, 96, 2, 8)), _normal(7, (1, 96, 2, 8))
    options = {**BLOCKS, "is_causal": True}
    before = tj.select_levels(query, key, policy, **options)
    after = tj.select_levels(query.at[:, 48:].set(3), key.at[:, 48:].set(9), policy, **options)
    assert np.array_equal(before[:, :, :3], after[:, :, :3])
    assert not np.array_equal(before, after)


def test_levels_pass_no_gradient():
    query, key = _normal(8, (1, 64, 2, 8)), _normal(9, (1, 64, 2, 8))

    def loss(query, key):
        levels = tj.select_levels(query, key, Threshold(), **BLOCKS)
        return jnp.sum(levels.astype(jnp.float32)) * jnp.sum(query)

    factor = float(np.sum(np.asarray(tj.select_levels(query, key, Threshold(), **BLOCKS))))
    d_query, d_key = jax.grad(loss, (0, 1))(query, key)
    assert np.array_equal(d_query, np.full(query.shape, factor, np.float32))
    assert not np.any(d_key)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("value", "is_causal"), [(np.nan, False), (np.inf, True), (-np.inf, True)])
def test_broken_keys_are_attended_to(value, is_causal):
    """Where it can be seen, a block with such a key is at level 1: it shows."""
    query, key = _normal(10, (1, 128, 2, 8)), _normal(11, (1, 128, 2, 8))
    key = key.at[0, 37, 1, 3].set(value)
    options = {**BLOCKS, "is_causal": is_causal}
    importance = np.asarray(block_importance(query, key, **options))
    rows = slice(3 if is_causal else 0, None)
    assert np.isposinf(importance[0, 1, rows, 2]).all()
    assert np.isfinite(importance[0, 0]).all()
    assert np.isfinite(np.delete(importance[0, 1], 2, axis=-1)).all()
    for policy in (TopK(0.2, 0.3, 0.5, 0.5), Threshold(least=0.2), SimilarityCap(TopK(0.2, 0.2))):
        if is_causal:  # two blocks are forced: the third is free from the row on that has 11
            policy = TopK(0.5, 0.5, 0.5, 0.5)
        levels = np.asarray(tj.select_levels(query, key, policy, **options))
        free = slice(4 if is_causal else 0, None)
        assert (levels[0, 1, free, 2] == 1).all()


def test_a_broken_query_concerns_its_row_alone():
    query, key = _normal(12, (1, 128, 1, 8)), _normal(13, (1, 128, 1, 8))
    whole = tj.select_levels(query, key, TopK(), **BLOCKS)
    broken = tj.select_levels(query.at[0, 35].set(jnp.nan), key, TopK(), **BLOCKS)
    assert np.array_equal(np.delete(whole, 2, axis=2), np.delete(broken, 2, axis=2))
    # All blocks are equally suspicious, and the later ones come first.
    assert broken[0, 0, 2].tolist() == [0, 0, 0, 0, 8, 8, 2, 1]


def test_equal_blocks_are_ranked_by_position():
    ones = jnp.ones((1, 128, 1, 8))
    levels = tj.select_levels(ones, ones, TopK(), **BLOCKS)
    assert (np.asarray(levels[0, 0]) == [0, 0, 0, 0, 8, 8, 2, 1]).all()


def test_local_window():
    got = LocalWindow(20, (40, 50, None), sinks=9).levels(
        96, 96, block_q=16, block_kv=8, is_causal=True
    )
    want = np.zeros((6, 12), int)
    for i, j in np.ndindex(6, 12):
        if j * 8 <= i * 16 + 15:
            distance = max(0, i * 16 - (j * 8 + 7))
            fitting = [r for r, bound in ((1, 20), (2, 40), (4, 50), (8, 1e9)) if distance <= bound]
            want[i, j] = 1 if j * 8 < 9 else fitting[0]
    assert got.shape == (1, 1, 6, 12)
    assert np.array_equal(got[0, 0], want)
    assert {1, 2, 4, 8} <= set(want.ravel())
    # Not causal: to both sides; and what is beyond the last bound is skipped.
    both = LocalWindow(0, (8, 8, 24), sinks=0).levels(80, 80, block_q=8, block_kv=8)
    assert np.array_equal(both[0, 0], both[0, 0].T)
    assert both[0, 0, 4].tolist() == [0, 8, 8, 2, 1, 2, 8, 8, 0, 0]


def test_strided():
    got = Strided(8, 3, level=2, others=8).levels(72, 72, block_q=8, block_kv=8, is_causal=True)
    assert got[0, 0, 7].tolist() == [1, 8, 8, 2, 8, 8, 1, 1, 0]
    assert got[0, 0, 8].tolist() == [1, 8, 8, 2, 8, 8, 2, 1, 1]


@pytest.mark.quick(1)
@pytest.mark.parametrize("policy", [LocalWindow(32, (48, 64, None)), Strided(32, 2)])
def test_a_pattern_is_the_same_through_select_levels(policy):
    query, key = _normal(14, (2, 70, 4, 8)), _normal(15, (2, 90, 2, 8))
    for is_causal in (False, True):
        options = {**BLOCKS, "is_causal": is_causal}
        alone = policy.levels(70, 90, **options)
        chosen = tj.select_levels(query, key, policy, **options)
        assert np.array_equal(chosen, np.broadcast_to(alone, (2, 4, 5, 6)))


def test_the_default_window_leaves_a_quarter_of_the_work_at_16k():
    levels = LocalWindow().levels(16384, 16384, is_causal=True)
    # A block's nearest key is 128 (i - j) - 127 tokens away: up to 896, that is i - j = 7, level 1.
    rows = [min(i + 1, 9) + max(i - 8, 0) / 8 for i in range(128)]
    density = tj.level_density(levels, is_causal=True)
    assert float(density) == pytest.approx(sum(rows) / (128 * 129 / 2), rel=1e-6)
    assert float(density) == pytest.approx(0.243, abs=1e-3)


def test_a_row_far_from_all_keys_sees_the_nearest():
    levels = LocalWindow(0, (0, 0, 0), sinks=0).levels(64, 24, block_q=8, block_kv=8)
    assert levels[0, 0, 7].tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopK(0.2, 0.1), r"=\(0.2, 0.1, 0.25, 0.5\) must not decrease"),
        (lambda: TopK(level8=1.5), "must be between 0 and 1"),
        (lambda: TopK(level1=float("nan")), "must be finite"),
        (lambda: Threshold((0.5, 0.6)), r"mass=\(0.5, 0.6\) must be 4 bounds"),
        (lambda: Threshold((0.0, 0.6, 0.7, 0.8)), "must be above 0"),
        (lambda: Threshold(least=-0.1), "must be between 0 and 1"),
        (lambda: SimilarityCap(TopK(), (0.1, 0.2)), "must be three"),
        (lambda: SimilarityCap(TopK(), (0.1, 0.2, 2)), "must be between -1 and 1"),
        (lambda: LocalWindow(-1), "window=-1 must be at least 0"),
        (lambda: LocalWindow(100, (50, 200, 300)), "must not decrease, from window=100 on"),
        (lambda: LocalWindow(1, (None, 50, 300)), "must not decrease"),
        (lambda: LocalWindow(1, (2, 3)), r"bounds=\(2, 3\) must be three"),
        (lambda: Strided(stride=0), "stride=0 must be at least 1"),
        (lambda: Strided(others=3), r"others=3 must be one of \(0, 1, 2, 4, 8\)"),
        (lambda: Strided().levels(64, 64, block_kv=12), "block_kv=12 must be a multiple of 8"),
        (lambda: Strided().levels(0, 64), "query_tokens=0 must be at least 1"),
        (lambda: Strided().levels(64, 2**20, block_kv=8), "must be at most 65536"),
    ],
)
def test_bad_policies_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_wrong_kinds_are_refused():
    x = _normal(16, (1, 64, 2, 8))
    with pytest.raises(TypeError, match="policy is a str, must be one of"):
        tj.select_levels(x, x, "topk")
    with pytest.raises(TypeError, match="policy is a SimilarityCap"):
        SimilarityCap(SimilarityCap(TopK()))
    with pytest.raises(TypeError, match="must be a Python number"):
        TopK(level1="0.1")
    with pytest.raises(TypeError, match=r"window=1.5 must be an integer"):
        LocalWindow(1.5)
    with pytest.raises(TypeError, match=r"key.dtype=bfloat16 must equal query.dtype=float32"):
        tj.select_levels(x, x.astype(jnp.bfloat16), TopK())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_q": 0}, "block_q=0 must be at least 1"),
        ({"block_kv": 20}, "block_kv=20 must be a multiple of 8"),
        ({"query_samples": 129}, "query_samples=129 must be at most block_q=128"),
        ({"key_means": 3}, "key_means=3 must divide block_kv=128"),
        ({"query_seq_lengths": jnp.array([65])}, "must be between 0 and 64"),
        ({"key_value_seq_lengths": jnp.array([1, 2])}, "one per sequence"),
        ({"scale": float("inf")}, "scale=inf must be finite"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    x = _normal(17, (1, 64, 2, 8))
    with pytest.raises(ValueError, match=message):
        tj.select_levels(x, x, TopK(), **options)


def test_policies_are_hashable_and_take_lists():
    assert Threshold([0.4, 0.5, 0.6, 0.8]) == Threshold()
    assert len({TopK(), TopK(), LocalWindow(64, [64, 64, None]), LocalWindow(64)}) == 2
    assert hash(SimilarityCap(Strided())) == hash(SimilarityCap(Strided()))


def test_scale_and_samples_are_used():
    query, key = _normal(18, (1, 64, 1, 8)), _normal(19, (1, 64, 1, 8))
    base = np.asarray(block_importance(query, key, **BLOCKS))
    scaled = block_importance(2 * query, key, scale=0.5 / 8**0.5, **BLOCKS)
    assert np.abs(base - np.asarray(scaled)).max() < 1e-6
    for options in ({"query_samples": 2}, {"key_means": 2}, {"scale": 1.0}):
        other = np.asarray(block_importance(query, key, **BLOCKS, **options))
        assert np.abs(base - other).max() > 1e-3


TOKENS, SIZE, BLOCK_Q, BLOCK_KV = 150, 150, 32, 16
LENGTHS = (150, 101)
# Documents one after the other, padding with id 0 at the end; and ids that come again.
IDS = np.stack(
    [np.repeat([1, 2, 3, 0], [40, 71, 22, 17]), np.repeat([4, 9, 4, 2], [30, 40, 60, 20])]
)
OFFSETS = np.array([0, 37])


def operands():
    rng = np.random.default_rng(0)
    query, key = (
        jnp.asarray(rng.normal(size=(2, size, heads, 16)), jnp.float32)
        for size, heads in ((TOKENS, 4), (SIZE, 2))
    )
    return query, key


def given(with_segments, with_offsets):
    found = {name: jnp.asarray(LENGTHS) for name in ("query_seq_lengths", "key_value_seq_lengths")}
    if with_segments:
        found |= dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), jnp.asarray(IDS))
    if with_offsets:
        found["query_offset"] = jnp.asarray(OFFSETS)
    return found


@functools.partial(jax.jit, static_argnames=("policy", "is_causal"))
def _select(query, key, arrays, policy, is_causal):
    blocks = {"block_q": BLOCK_Q, "block_kv": BLOCK_KV, "is_causal": is_causal}
    levels = tj.select_levels(query, key, policy, **blocks, **arrays)
    return levels, tj.levels.block_importance(query, key, **blocks, **arrays)


def visible_blocks(b, i, is_causal, ids, shift):
    """Blocks that a row sees, and those of them that are at level 1 in any case."""
    queries = range(i * BLOCK_Q, min((i + 1) * BLOCK_Q, LENGTHS[b]))
    visible = []
    for j in range(-(-SIZE // BLOCK_KV)):
        keys = range(j * BLOCK_KV, min((j + 1) * BLOCK_KV, LENGTHS[b]))
        if not queries or not keys or (is_causal and keys[0] > queries[-1] + shift):
            continue
        segments = [{int(ids[t]) for t in of} for of in (queries, keys)] if ids is not None else []
        if ids is None or oracle.segments_meet(*segments):
            visible.append(j)
    forced = set()
    if is_causal:
        own = {j for j in visible if (j + 1) * BLOCK_KV > i * BLOCK_Q + shift}
        forced = own | set(visible[:1])
    return visible, forced


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("with_segments", "with_offsets", "is_causal"),
    [(True, True, True), (True, False, False), (False, True, True)],
)
def test_importance_and_levels_are_those_of_loops(with_segments, with_offsets, is_causal):
    query, key = operands()
    arrays = given(with_segments, with_offsets)
    policies = {TopK(): "top_k", Threshold(): "threshold"}
    found = {policy: _select(query, key, arrays, policy, is_causal) for policy in policies}
    q64, k64 = (np.asarray(x, np.float64) for x in (query, key))
    for b, n in np.ndindex(2, 4):
        ids = IDS[b] if with_segments else None
        shift = int(OFFSETS[b]) if with_offsets else 0
        importance = np.asarray(found[TopK()][1])[b, n]
        want = oracle.importance(
            q64[b, :, n],
            k64[b, :, n // 2],
            block_q=BLOCK_Q,
            block_kv=BLOCK_KV,
            is_causal=is_causal,
            samples=4,
            means=4,
            query_length=LENGTHS[b],
            key_length=LENGTHS[b],
            rounded=lambda x: x,
            ids=None if ids is None else (ids, ids),
            shift=shift,
        )
        np.testing.assert_allclose(importance, want, atol=2e-6)
        for i in range(importance.shape[0]):
            visible, forced = visible_blocks(b, i, is_causal, ids, shift)
            rows = {
                TopK(): oracle.top_k(
                    importance[i], visible, forced, ("0.05", "0.15", "0.25", "0.5")
                ),
                Threshold(): oracle.threshold(
                    importance[i], visible, forced, ("0.4", "0.5", "0.6", "0.8"), "0.06"
                ),
            }
            for policy, row in rows.items():
                got = np.asarray(found[policy][0])[b, n, i]
                mixed = [
                    ids is not None
                    and len(set(ids[j * BLOCK_KV : min((j + 1) * BLOCK_KV, LENGTHS[b])])) > 1
                    for j in range(len(row))
                ]
                np.testing.assert_array_equal(got, np.where(mixed, np.minimum(row, 1), row))


@pytest.mark.quick(2, slow=0)
@pytest.mark.parametrize(
    "policy", [LocalWindow(16, (32, 64, None)), Strided(16, 3), SimilarityCap(TopK())]
)
def test_every_policy_keeps_to_what_is_visible(policy):
    query, key = operands()
    levels = np.asarray(_select(query, key, given(True, True), policy, True)[0])
    for b, i in np.ndindex(2, levels.shape[2]):
        visible, _ = visible_blocks(b, i, True, IDS[b], int(OFFSETS[b]))
        hidden = np.setdiff1d(np.arange(levels.shape[3]), visible)
        assert not levels[b, :, i, hidden].any()
        assert (levels[b, :, i] == 1).any(-1).all() == bool(visible)


def test_a_window_is_about_positions_and_sinks_about_what_a_row_sees_first():
    ids = jnp.repeat(jnp.arange(3), 64)[None]
    x = jnp.zeros((1, 192, 1, 8))
    policy = LocalWindow(0, (0, 0, 0), sinks=1)
    blocks = {"block_q": 16, "block_kv": 16, "is_causal": True}
    segments = {"query_segment_ids": ids, "key_value_segment_ids": ids}
    levels = np.asarray(tj.select_levels(x, x, policy, **blocks, **segments))[0, 0]
    for i in range(12):
        assert np.flatnonzero(levels[i]).tolist() == sorted({i // 4 * 4, i})
    # The second half of the queries alone.
    half = tj.select_levels(x[:, 96:], x, policy, query_offset=96, **blocks)
    np.testing.assert_array_equal(half, tj.select_levels(x, x, policy, **blocks)[:, :, 6:])


def test_documents_do_not_know_of_each_other():
    """Where their ends are those of blocks, packed ones get the levels that each has alone."""
    query, key = (x[:1, :128] for x in operands())
    ids = jnp.repeat(jnp.arange(2), 64)[None]
    options = {"block_q": BLOCK_Q, "block_kv": BLOCK_KV, "is_causal": True}
    segments = {"query_segment_ids": ids, "key_value_segment_ids": ids}
    packed = np.asarray(tj.select_levels(query, key, TopK(), **options, **segments))
    for rows, columns, part in (
        (slice(2), slice(4), slice(64)),
        (slice(2, 4), slice(4, 8), slice(64, 128)),
    ):
        alone = tj.select_levels(query[:, part], key[:, part], TopK(), **options)
        np.testing.assert_array_equal(packed[:, :, rows, columns], alone)
    assert not packed[:, :, 2:, :4].any()
