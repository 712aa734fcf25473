"""Decoding where tokens are split over devices: what is stored where, one collective, same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.meshes.mesh_cache_helpers import (
    AXIS,
    BATCH,
    CHANNELS,
    HEADS,
    KINDS,
    Case,
    collectives,
    mesh_of,
)
from turbojax import paged, paged_attention, parallel
from turbojax.attention.merging import merge_attention

pytestmark = pytest.mark.mesh

EPS = np.finfo(np.float32).eps
# Sums of up to 512 products and weights in another order, each off by half a rounding, of numbers
# of magnitude 1; the errors add up like a random walk.
BOUND = 4 * np.sqrt(512) * EPS


def filled(name: str, devices: int = 4) -> Case:
    """A prompt that ends in the third device's slots, and one that is short; then more tokens."""
    rng = np.random.default_rng(7)
    case = Case.empty(name, devices)
    programs = [
        case.store(rng, 300, [300, 90], prompt=True),
        case.store(rng, 70, [70, 40], prompt=False),  # across devices: 300 to 370, 90 to 130
        case.store(rng, 1, [1, 1], prompt=False),
    ]
    assert not any(collectives(program) for program in programs)
    return case


def check(case: Case, found) -> None:
    tokens = found.out.shape[2]
    for device in range(1, case.devices):
        np.testing.assert_array_equal(found.out[device], found.out[0])
        np.testing.assert_array_equal(found.residual[device], found.residual[0])
    np.testing.assert_allclose(found.out[0], found.wanted, rtol=0, atol=BOUND)
    size = BATCH * tokens * 2 * HEADS * (CHANNELS + 1)
    ((shape, name),) = collectives(found.program)
    assert name == "all-gather"
    assert f"f32[{case.devices},{size}]" in shape or f"f32[{case.devices * size}]" in shape


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("name", [x for x in KINDS if x != "k8v4"])
def test_one_token(name):
    case = filled(name)
    np.testing.assert_array_equal(case.part.lengths, case.whole.lengths)
    assert not case.part.overflowed.any()
    if name in ("exact", "kv4", "latent"):
        for mine, one in zip(jax.tree.leaves(case.part), jax.tree.leaves(case.whole), strict=True):
            np.testing.assert_array_equal(mine, one)
    query = case.query(np.random.default_rng(8), 1)
    sinks = None if name == "latent" else jnp.arange(2.0 * HEADS)
    check(case, case.decode(query, None, sinks))


@pytest.mark.quick(slow=2)
@pytest.mark.parametrize(("tokens", "window"), [(4, None), (64, None), (1, 40), (64, 150)])
@pytest.mark.parametrize("name", [x for x in KINDS if x != "4bit"])
def test_several_tokens_and_windows(name, tokens, window):
    case = filled(name)
    check(case, case.decode(case.query(np.random.default_rng(8), tokens), window, None))


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(("tokens", "window"), [(4, None), (4, 150)])
def test_several_tokens_of_codes(tokens, window):
    case = filled("kv4")
    check(case, case.decode(case.query(np.random.default_rng(8), tokens), window, None))


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("devices", "max_length", "buffer_size", "stored", "is_prompt"),
    [
        (2, 100, 16, [98, 20], True),
        pytest.param(4, 128, 48, [47, 20], False, marks=pytest.mark.fuzz),
    ],
    ids=["of the last device", "of the first"],
)
def test_a_buffer_beyond_the_slots(devices, max_length, buffer_size, stored, is_prompt):
    """Its device has more tokens than slots, and queries are among those."""
    rng = np.random.default_rng(4)
    case = Case.empty("2/4bit", devices, max_length, buffer_size=buffer_size)
    case.store(rng, max(stored), stored, is_prompt)
    check(case, case.decode(case.query(rng, 4), None, None))


@pytest.mark.parametrize(
    ("tokens", "window", "words"),
    [(1, 40, r"window=\(39, 0\) must be None"), (16, None, "16 query tokens must be at most 15")],
)
def test_first_tokens_are_seen_by_all(tokens, window, words):
    """They count as tokens of the buffer: what that would change is refused."""
    case = Case.empty("4bit", 2)
    with pytest.raises(NotImplementedError, match=f"{words}.*first_tokens=0"):
        case.decode(case.query(np.random.default_rng(8), tokens), window, None)


def test_a_device_more_or_less_changes_only_rounding():
    query, outs = None, []
    for devices in (1, 2, 4):
        case = filled("exact", devices)
        query = case.query(np.random.default_rng(8), 1)
        outs.append(case.decode(query, None, None).out[0])
    for out in outs[1:]:
        np.testing.assert_allclose(out, outs[0], rtol=0, atol=BOUND)


def test_empty_sequences_and_padding():
    case = Case.empty("kv4", 2)
    case.store(np.random.default_rng(0), 5, [5, 0], prompt=False)
    query = case.query(np.random.default_rng(1), 2)

    def several(cache, query, real):
        return parallel.decode(query, cache, AXIS, query_seq_lengths=real, return_residual=True)

    out, residual = case.split(several, P())(case.part, query, jnp.array([1, 2], jnp.int32))
    assert np.all(np.isfinite(residual[0, 0]))
    for b, t in ((0, 1), (1, 0), (1, 1)):  # padding, and what sees nothing
        assert not np.any(out[b, t])
        assert np.all(np.isneginf(residual[b, t]))


def test_what_does_not_fit_is_left_out_on_all_devices():
    case = Case.empty("exact", 2)
    case.store(np.random.default_rng(0), 510, [510, 3], prompt=True)
    case.store(np.random.default_rng(1), 4, [4, 4], prompt=False)
    assert np.asarray(case.part.lengths).tolist() == [512, 7]
    assert np.asarray(case.part.overflowed).tolist() == [True, False]


def test_pages_of_every_device():
    """Each has a pool of its own; tables count from its first page."""
    rng, mesh = np.random.default_rng(3), mesh_of(2)
    axes = parallel.Axes(sequence=AXIS, mesh=mesh)
    sizes = (16, HEADS, CHANNELS)
    make = {"kv_dtype": "auto", "dtype": jnp.float32}
    whole = paged.init_cache(8, *sizes, **make)
    pool = paged.init_cache(8, *sizes, **make, axes=axes)
    tables = jnp.array([[0, 1, 2, 3], [4, 5, 6, 7]], jnp.int32)
    own = jnp.array([[3, 1, 2, 0], [0, 2, 3, 1]], jnp.int32)  # two of each device
    key, value, query = (
        jnp.asarray(rng.normal(size=(2, 40, n, CHANNELS)), jnp.float32)
        for n in (HEADS, HEADS, 2 * HEADS)
    )
    lengths = jnp.array([40, 20], jnp.int32)
    specs = parallel.partition_specs(pool, axes)

    def several(pool, tables, key, value, query):
        zero = jnp.zeros(2, jnp.int32)
        pool = parallel.append_to_pages(pool, key, value, tables, zero, AXIS, new_lengths=lengths)
        return parallel.paged_attention(query, pool, tables, lengths, AXIS), pool

    out, pool = jax.jit(
        jax.shard_map(
            several,
            mesh=mesh,
            in_specs=(specs, P(None, AXIS), P(), P(), P()),
            out_specs=(P(), specs),
            check_vma=True,
        )
    )(pool, own, key, value, query[:, -1:])
    whole = paged.append(whole, key, value, tables, jnp.zeros(2, jnp.int32), new_lengths=lengths)
    wanted = paged_attention(query[:, -1:], whole, tables, lengths)
    np.testing.assert_allclose(out, wanted, rtol=0, atol=BOUND)
    assert int(pool.dropped_tokens) == 0


def test_parts_are_merged_as_merge_attention_does():
    rng = np.random.default_rng(5)
    outs = jnp.asarray(rng.normal(size=(2, 1, 1, 4, 8)), jnp.float32)
    residuals = jnp.asarray(rng.normal(size=(2, 1, 1, 4)), jnp.float32).at[0, 0, 0, 0].set(-jnp.inf)

    def several(outs, residuals):
        from turbojax.parallel.decode import merged

        return merged(outs[0], residuals[0], AXIS)

    found = jax.jit(
        jax.shard_map(several, mesh=mesh_of(2), in_specs=P(AXIS), out_specs=P(), check_vma=True)
    )(outs, residuals)
    for mine, wanted in zip(found, jax.jit(merge_attention)(outs, residuals), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=4 * EPS, atol=4 * EPS)


def test_a_window_alone_cannot_be_split():
    axes = parallel.Axes(sequence=AXIS, mesh=mesh_of(2))
    from turbojax.caches.kinds import init_layer_cache

    with pytest.raises(ValueError, match="keeps a window of 9 tokens"):
        init_layer_cache(1, 64, 2, 16, kind="exact", local_window_size=9, axes=axes)
    with pytest.raises(ValueError, match="a multiple of 2"):
        init_layer_cache(1, 48, 2, 16, kind=KINDS["2/4bit"], axes=axes)
