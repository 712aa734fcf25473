"""Levels of packed sequences and of parts of longer ones, against loops over blocks and tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from tests.oracles import levels as oracle
from turbojax.levels import LocalWindow, SimilarityCap, Strided, Threshold, TopK

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
