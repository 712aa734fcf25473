"""The kernels that write a cache, interpreted: the bits of plain JAX, and lowering for a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from pallas_kernels.triton import _quantize, rank
from tests.caches.cache_helpers import assert_same_bits
from tests.grids import pairwise
from tests.kernels.kernel_helpers import lower_for_cuda
from turbojax._device import interpret_kernels
from turbojax.caches.progressive import append_reference
from turbojax.caches.progressive import append_triton as triton
from turbojax.caches.progressive.update import store_prompt
from turbojax.quantizers import pack, quantize_int8, quantize_with_scale, round_scale

BATCH, HEADS = 4, 4
# Configuration, head dim, dtype: every width, heads that are no power of two, blocks in a buffer.
CASES = {
    "4 bits": (tj.TurboConfig(block_kv=16, buffer_size=16), 16, jnp.float32),
    "mixed": (
        tj.TurboConfig(
            num_low_bit_key_heads=2, num_low_bit_value_heads=1, block_kv=16, buffer_size=32
        ),
        96,
        jnp.bfloat16,
    ),
    "4/3 and 2": (
        tj.TurboConfig(
            num_low_bit_key_heads=1, low_bits=3, value_bits=2, block_kv=16, buffer_size=16
        ),
        24,
        jnp.float32,
    ),
}
MIXED = CASES["mixed"]


def compiled(implementation, function=tj.append):
    """A jitted function of a cache, compiled for one implementation."""
    run = jax.jit(functools.partial(function, implementation=implementation))
    if implementation == "xla":
        return run

    def interpreted(*arguments, **options):
        with interpret_kernels():
            return run(*arguments, **options)

    return interpreted


append_xla, append_triton = compiled("xla"), compiled("triton")
prompt_xla, prompt_triton = compiled("xla", store_prompt), compiled("triton", store_prompt)


def new(case, max_length=150, **scales):
    config, channels, dtype = case
    return tj.init_cache(BATCH, max_length, HEADS, channels, config=config, dtype=dtype, **scales)


def tokens(case, count, seed=0, spread=1.0):
    _, channels, dtype = case
    rng = np.random.default_rng(seed)
    loud = np.where(rng.random((BATCH, 1, HEADS, channels)) < 0.15, 4.0, 1.0)
    scale = spread * loud * np.array([0.4, 3.0, 0.8, 1.6])[:, None]
    shape = (BATCH, count, HEADS, channels)
    return tuple(jnp.asarray(rng.normal(size=shape) * scale, dtype) for _ in range(2))


def litter(side, rng):
    """The side of an empty cache with anything in its blocks."""
    names = ("codes", "channel_scale", "channel_zero", "block_scale")
    blocks = {name: getattr(side, name) for name in names}
    anything = jax.tree.map(lambda x: jnp.asarray(rng.integers(1, 99, x.shape), x.dtype), blocks)
    return dataclasses.replace(side, **anything)


def int32(*values):
    return jnp.array(values, jnp.int32)


def assert_appends_the_same(cache, key, value, lengths=None):
    """Token by token, both ways; `lengths[t][b]` says whether `b` gets one at step `t`."""
    expected = cache
    for t in range(key.shape[1]):
        new_tokens = key[:, t : t + 1], value[:, t : t + 1]
        given = {} if lengths is None else {"lengths": int32(*lengths[t])}
        expected = append_xla(expected, *new_tokens, **given)
        cache = append_triton(cache, *new_tokens, **given)
        if t % 5 == 0 or t + 1 == key.shape[1]:
            assert_same_bits(cache, expected)
    return cache


# Bits --------------------------------------------------------------------------------------------


@pytest.mark.fuzz
def test_a_prompt_and_then_tokens():
    """Ragged, through full buffers; blocks that are not stored keep what stood there."""
    # Its operands are the cache's codes.
    config = dataclasses.replace(MIXED[0], mode="int8", first_tokens=0)
    case, dtype = (config, *MIXED[1:]), MIXED[2]
    key, value = tokens(case, 70, seed=1)
    lengths = int32(70, 62, 5, 0)
    rng = np.random.default_rng(2)
    empty = new(case)
    old = dataclasses.replace(empty, key=litter(empty.key, rng), value=litter(empty.value, rng))
    expected = prompt_xla(old, key, value, lengths)
    with interpret_kernels():
        cache, operands = triton.store_prompt_with_operands(
            old, key, value, lengths, with_operands=True
        )
    assert_same_bits(cache, expected)

    valid = jnp.arange(70)[None] < lengths[:, None]
    for x, codes, scale in ((key, *operands[:2]), (value, *operands[2:])):
        x = jnp.where(valid[..., None, None], x, jnp.zeros((), dtype))
        x = jnp.pad(x, ((0, 0), (0, -70 % config.block_kv), (0, 0), (0, 0))).swapaxes(1, 2)
        blocks = x.reshape(*x.shape[:2], -1, config.block_kv, x.shape[3])
        want, want_scale = quantize_int8(blocks, axis=(3, 4))
        want = want.reshape(x.shape)
        np.testing.assert_array_equal(codes, want if x.shape == codes.shape else want.mT)
        np.testing.assert_array_equal(scale, want_scale)

    # Buffers fill, each at its own step; one sequence skips tokens, one begins later.
    more = tokens(case, 36, seed=3, spread=1.3)
    given = [(1, 1, t % 3 > 0, t > 3) for t in range(36)]
    cache = assert_appends_the_same(cache, *more, given)
    assert cache.num_blocks[1] > 62 // config.block_kv


@pytest.mark.slow
@pytest.mark.parametrize("name", ["4/3 and 2"])
def test_an_empty_cache_fixes_its_scales_by_the_first_tokens(name):
    """Which are zero at first; heads are ranked on the first full buffer."""
    case = CASES[name]
    key, value = tokens(case, 36, seed=4)
    key = key.at[:2, :5].set(0).at[2, :, 1].set(0)
    assert_appends_the_same(new(case), key, value.at[0, :20].set(0))


@pytest.mark.fuzz
def test_given_scales():
    case = CASES["4 bits"]
    cache = new(case, key_scale=0.011, value_scale=jnp.array([0.01, 0.5, 1e-37, 3e36]))
    key, value = tokens(case, 50, seed=5)
    cache = prompt_triton(cache, key, value, int32(3, 18, 0, 50))
    assert_appends_the_same(cache, *tokens(case, 18, seed=6))


def test_values_that_are_not_finite():
    """In a block, in the rest of a prompt, in padding; and in tokens that come later."""
    case, bad = CASES["4 bits"], jnp.nan
    key, value = tokens(case, 40, seed=7)
    key = key.at[0, 3, 0, 5].set(bad).at[1, 38, 1, 0].set(-jnp.inf).at[2, 30:].set(bad)
    value = value.at[0, 17, 2, 15].set(-jnp.inf)
    arguments = new(case), key, value, int32(40, 40, 30, 0)
    cache = prompt_triton(*arguments)
    assert_same_bits(cache, prompt_xla(*arguments))
    assert np.isnan(cache.key.block_scale[0, 0, 0])
    assert np.isfinite(cache.key.block_scale[2, :, 0]).all()

    key, value = tokens(case, 12, seed=8)
    key = key.at[1, 2, 3, 1].set(bad).at[3, 0, 0].set(bad)
    cache = assert_appends_the_same(cache, key, value.at[2, 11, 0, 0].set(-jnp.inf))
    assert np.isnan(cache.key.buffer_scale[1, 3])


@pytest.mark.slow
def test_numbers_at_the_ends_of_the_range():
    """Zeros, subnormal numbers, the largest numbers: in blocks, as first tokens, and clamped."""
    case = CASES["4 bits"]
    key, value = tokens(case, 33, seed=9)
    factor = jnp.array([0.0, 1e-40, 1e-36, 2e37])[None, None, :, None]
    arguments = new(case), key * factor, value * factor[:, :, ::-1], int32(33, 33, 32, 16)
    cache = prompt_triton(*arguments)
    assert_same_bits(cache, prompt_xla(*arguments))
    factor = jnp.array([1e-44, 3e38, 1e-20, 1e37])[None, None, :, None]
    small = tuple(jnp.clip(x, -1, 1) for x in tokens(case, 3, seed=10))
    assert_appends_the_same(cache, *(x * factor for x in small))
    assert_appends_the_same(new(case), *(x * factor for x in small))


@pytest.mark.fuzz
@pytest.mark.parametrize("bits", [[4, 3]], ids=str)
def test_every_range_of_a_channel(bits):
    """Stage 2 for each smallest and largest stage-1 code, exactly as plain JAX has it."""
    low, high = (x.ravel() for x in np.meshgrid(np.arange(-119, 120), np.arange(-119, 120)))
    low, high = low[low <= high], high[low <= high]
    # The first channel of a block holds 119, so that values are codes.
    groups = -(-low.size // 127)
    rng = np.random.default_rng(11)
    x = np.full((groups, 16, 128), 119)
    for c in range(127):
        i = np.arange(c, groups * 127, 127) % low.size
        x[:, :, c + 1] = rng.integers(low[i, None], high[i, None] + 1, (groups, 16))
        x[:, 0, c + 1], x[:, 1, c + 1] = low[i], high[i]
    x = jnp.asarray(x.reshape(1, -1, 1, 128), jnp.bfloat16)
    config = tj.TurboConfig(key_bits=bits[0], value_bits=bits[1], block_kv=16, buffer_size=16)
    cache = tj.init_cache(1, x.shape[1], 1, 128, config=config)
    arguments = cache, x, x, int32(x.shape[1])
    got = prompt_triton(*arguments)
    assert_same_bits(got, prompt_xla(*arguments))
    np.testing.assert_array_equal(got.key.block_scale, round_scale(jnp.float32(1)))


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", range(3))
def test_stage_1_rounds_ties_to_even(seed):
    """Values at, and next to, the middle between two codes."""
    rng = np.random.default_rng(seed)
    scale = round_scale(jnp.float32(np.exp(rng.uniform(-60, 60))))
    middle = np.float32(np.arange(-125, 125) + 0.5) * np.float32(scale)
    x = np.stack([np.nextafter(middle, -np.inf), middle, np.nextafter(middle, np.inf)])
    x = jnp.concatenate([jnp.asarray(x).ravel(), jnp.asarray(rng.normal(size=2048) * 50) * scale])
    x = x.astype(jnp.float32)
    codes = jax.jit(functools.partial(_quantize.clamped_stage1_codes, interpret=True))(x, scale)
    np.testing.assert_array_equal(codes.astype(jnp.int8), quantize_with_scale(x, scale[None]))


@pytest.mark.parametrize(("bits", "runs"), [(4, 2), (4, 4), (4, 8), (3, 8), (2, 4), (2, 8)])
def test_packing_by_runs(bits, runs):
    codes = np.random.default_rng(bits).integers(0, 2**bits, (5, 48)).astype(np.uint8)
    parts = [jnp.asarray(part, jnp.int32) for part in np.split(codes, runs, axis=1)]
    packed = jnp.concatenate(_quantize.pack_runs(parts, bits), axis=1)
    np.testing.assert_array_equal(packed, pack(jnp.asarray(codes), bits))


# Bookkeeping and transforms ----------------------------------------------------------------------


@pytest.mark.slow
def test_overflow_under_jit():
    case = CASES["4 bits"]
    key, value = tokens(case, 40, seed=12)
    arguments = new(case, max_length=34), key, value, int32(40, 33, 3, 0)
    cache = prompt_triton(*arguments)
    assert_same_bits(cache, prompt_xla(*arguments))
    assert cache.overflowed.tolist() == [True, False, False, False]
    again = cache, key, value, int32(0, 2, 0, 20)  # only empty sequences take a prompt
    assert_same_bits(prompt_triton(*again), prompt_xla(*again))
    cache = assert_appends_the_same(cache, *tokens(case, 3, seed=13))
    assert cache.lengths.tolist() == [34, 34, 6, 3]
    assert cache.overflowed.tolist() == [True, True, False, False]


@pytest.mark.slow
def test_operands_hold_what_the_cache_has_no_room_for():
    case = CASES["4 bits"]
    key, value = tokens(case, 40, seed=14)
    lengths = int32(40, 0, 17, 40)
    outcomes = []
    for room in (20, 100):
        with interpret_kernels():
            run = jax.jit(triton.store_prompt_with_operands)
            outcomes.append(run(new(case, max_length=room), key, value, lengths)[1])
    assert_same_bits(*outcomes)


def test_one_sequence_one_head():
    config = tj.TurboConfig(block_kv=16, buffer_size=16)
    cache = tj.init_cache(1, 20, 1, 8, config=config, dtype=jnp.float32)
    x = jnp.asarray(np.random.default_rng(15).normal(size=(1, 17, 1, 8)), jnp.float32)
    arguments = cache, x, 2 * x, int32(17)
    assert_same_bits(prompt_triton(*arguments), prompt_xla(*arguments))


@pytest.mark.fuzz
def test_layers_by_vmap_and_scan_with_donated_memory():
    """Mixed widths, whose heads are ranked on the way."""
    layers = 2
    key, value = (jnp.stack([x, 2 * x]) for x in tokens(MIXED, 36, seed=16))
    empty = jax.tree.map(lambda x: jnp.stack([x] * layers), new(MIXED))

    @functools.partial(jax.jit, static_argnames="implementation", donate_argnums=0)
    def run(cache, key, value, implementation):
        one = jax.vmap(functools.partial(tj.append, implementation=implementation))
        store = jax.vmap(functools.partial(store_prompt, implementation=implementation))
        lengths = jnp.broadcast_to(int32(3, 17, 0, 1)[None], (layers, BATCH))
        cache = store(cache, key[:, :, :18], value[:, :, :18], lengths)

        def step(cache, xs):
            return one(cache, xs[0][:, :, None], xs[1][:, :, None]), None

        steps = tuple(jnp.moveaxis(x, 2, 0) for x in (key, value))
        return jax.lax.scan(step, cache, steps)[0]

    expected = run(jax.tree.map(jnp.copy, empty), key, value, "xla")
    with interpret_kernels():
        cache = run(empty, key, value, "triton")
    assert_same_bits(cache, expected)
    assert empty.key.buffer.is_deleted()


# Ranking -----------------------------------------------------------------------------------------


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize("group", [None, 2])
@pytest.mark.parametrize("method", ["gap_std", "min_max", "variation"])
def test_heads_are_ranked_by_the_first_full_buffer(method, group):
    """By a token that makes the difference; with an open scale, a value that is not finite."""
    config = dataclasses.replace(
        MIXED[0], num_low_bit_key_heads=1, head_priority=method, heads_per_group=group
    )
    case = config, *MIXED[1:]
    key, value = tokens(case, 32, seed=17)
    key = key.at[0, :31, 1].set(0).at[1, :31].multiply(0.01).at[1, 31, 2].set(jnp.nan)
    lengths = int32(31, 31, 5, 31)
    cache = prompt_xla(new(case), key[:, :31], value[:, :31], lengths)
    slots = jnp.tile(int32(3, 2, 1, 0), (BATCH, 1))
    accepted = int32(1, 1, 1, 0)
    flushed = append_reference.flushes_of_append(cache, accepted)
    sides, want = [], []
    for side, x in ((cache.key, key[:, 31:]), (cache.value, value[:, 31:])):
        held = dataclasses.replace(side, head_slots=slots)
        stream, scale, _ = append_reference.buffer_stream(cache, held, x, accepted)
        ranked = append_reference.rank_first_buffer(cache, held, stream, scale, flushed)
        want.append(np.asarray(ranked))
        sides.append(rank.Side(x[:, 0], side.buffer, side.buffer_scale, slots))
    is_first = append_reference.is_first_flush(cache, flushed).astype(jnp.int32)
    assert is_first.tolist() == [1, 1, 0, 0]
    how = {"method": method, "group": group, "interpret": True}
    got = jax.jit(functools.partial(rank.rank, **how))(is_first, sides)
    np.testing.assert_array_equal(got, want)
    assert all((x[2:] == slots[2:]).all() for x in got)
    assert got[0][1, 2] == 0  # what is not finite
    assert len({tuple(map(int, row)) for x in got for row in x}) > 2


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "triton"])
def test_no_step_waits_for_the_host(implementation):
    """As a condition of XLA's would."""
    shapes = jax.eval_shape(lambda: (new(MIXED), tokens(MIXED, 1)[0]))
    append = functools.partial(tj.append, implementation=implementation)
    text = lower_for_cuda(lambda cache, x: append(cache, x, x), *shapes)
    assert "turbojax_rank" in text
    assert "stablehlo.case" not in text
    assert "stablehlo.if" not in text


# The choice --------------------------------------------------------------------------------------


def test_without_a_gpu_triton_says_so():
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    case = CASES["4 bits"]
    key, value = tokens(case, 1)
    message = "append cannot run here: triton: needs an NVIDIA GPU of compute capability 8.0 or"
    with pytest.raises(NotImplementedError, match=message):
        tj.append(new(case), key, value, implementation="triton")
    with pytest.raises(NotImplementedError, match="store_prompt cannot run here: triton: needs an"):
        store_prompt(new(case), key, value, int32(1, 1, 1, 1), implementation="triton")
    tj.append(new(case), key, value)  # None chooses plain JAX


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("options", "channels", "count", "words"),
    [
        ({"block_kv": 48, "buffer_size": 48}, 16, 1, "block_kv=48 must be a power of two from 16"),
        ({}, 264, 1, "head_dim=264 must be at most 256"),
        ({}, 16, 2, r"key.shape\[1\]=2 must be 1: it appends token by token"),
    ],
)
def test_refusals(options, channels, count, words):
    case = tj.TurboConfig(**options), channels, jnp.float32
    cache, (key, value) = new(case), tokens(case, count)
    with interpret_kernels():
        with pytest.raises(NotImplementedError, match=f"append cannot run here: triton: {words}"):
            tj.append(cache, key, value, implementation="triton")
        assert triton.append_unsupported(cache=cache, key=key)
        assert (triton.store_prompt_unsupported(cache=cache, key=key) is None) == (count == 2)
    tj.append(cache, key, value)


def test_arrays_whose_offsets_overflow_are_refused():
    cache = jax.eval_shape(lambda: tj.init_cache(64, 8 * 1024, 64, 128))
    key = jax.ShapeDtypeStruct((64, 1, 64, 128), jnp.bfloat16)
    with interpret_kernels():
        assert triton.append_unsupported(cache=cache, key=key) is None  # exactly 2**31 bytes
        cache = jax.eval_shape(lambda: tj.init_cache(64, 8 * 1024 + 64, 64, 128))
        refusal = triton.append_unsupported(cache=cache, key=key)
    assert refusal == (
        f"an array of {2**31 + 2**24} bytes, between {2**31} and {2**32}, cannot be indexed"
    )


# Lowering ----------------------------------------------------------------------------------------


KERNELS = {
    "compress with operands": (
        300,
        triton.store_prompt_with_operands,
    ),
    "compress": (300, triton.store_prompt),
    "append": (1, triton.append),
}


@pytest.mark.quick(1, slow=0)
@pytest.mark.parametrize(
    ("kernel", "widths", "channels"),
    pairwise(
        kernel=list(KERNELS),
        widths=[(4, 1), (4, 0), (3, 0), (2, 0)],
        channels=[128, 8, 96, 256],
    )[::4],
)
def test_kernels_lower_for_a_gpu(kernel, widths, channels):
    bits, low = widths
    config = tj.TurboConfig(
        key_bits=bits,
        value_bits=bits,
        num_low_bit_key_heads=low,
        num_low_bit_value_heads=low,
        first_tokens=0 if "operands" in kernel else 1,
    )
    cache = jax.eval_shape(lambda: tj.init_cache(2, 1024, 4, channels, config=config))
    count, function = KERNELS[kernel]
    tokens = jax.ShapeDtypeStruct((2, count, 4, channels), jnp.bfloat16)
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    text = lower_for_cuda(function, cache, tokens, tokens, lengths)
    assert f"turbojax_{kernel.split()[0]}" in text
