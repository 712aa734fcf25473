"""The kernels for Hopper that write a cache, emulated: the bits of plain JAX; lowering."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import turbojax as tj
from pallas_kernels.mosaic import block as blocks
from pallas_kernels.mosaic import eight_bits, stage2
from pallas_kernels.mosaic.hopper import append, compress, quantize
from tests.caches.cache_helpers import assert_same_bits
from tests.kernels.kernel_helpers import lower_for_cuda
from tests.kernels.test_triton_cache import int32, litter
from tests.oracles import lanes as oracle
from tests.oracles import warp
from turbojax._device import interpret_kernels
from turbojax.attention.turbo import operands
from turbojax.caches import cache_by_name
from turbojax.caches.progressive import append_mosaic, append_reference, append_triton
from turbojax.caches.progressive.kind import PROGRESSIVE
from turbojax.caches.progressive.update import store_prompt

BATCH, HEADS = 3, 2
CASES = {
    "4 bits": (tj.TurboConfig(block_kv=64, buffer_size=64), 128, jnp.bfloat16),
    "mixed": (
        tj.TurboConfig(
            num_low_bit_key_heads=1, num_low_bit_value_heads=1, block_kv=16, buffer_size=32
        ),
        96,
        jnp.float16,
    ),
    "4/3 and 2": (
        tj.TurboConfig(
            num_low_bit_key_heads=1, low_bits=3, value_bits=2, block_kv=16, buffer_size=16
        ),
        24,
        jnp.float32,
    ),
    # Packed rows of 36 and 24 bytes, of 30 and 6, and of 48 and 24: planes of fewer words.
    "3 bits": (tj.TurboConfig(key_bits=3, value_bits=3), 96, jnp.bfloat16),
    "3 bits, blocks of 16": (
        tj.TurboConfig(key_bits=3, value_bits=3, block_kv=16, buffer_size=16),
        80,
        jnp.bfloat16,
    ),
    "3 bits, head dim 128": (tj.TurboConfig(key_bits=3, value_bits=3), 128, jnp.bfloat16),
}
MODULES = (append, blocks, compress, eight_bits, quantize, stage2)


@pytest.fixture
def emulated(monkeypatch):
    """Arrays of 32 lanes in place of numbers."""
    oracle.patch(monkeypatch, *MODULES)
    monkeypatch.setattr(blocks, "Int", warp.Int)
    monkeypatch.setattr(quantize, "Int", warp.Int)
    jax.clear_caches()
    yield
    jax.clear_caches()


def new(case, max_length=150, heads=HEADS, **scales):
    config, channels, dtype = case
    return tj.init_cache(BATCH, max_length, heads, channels, config=config, dtype=dtype, **scales)


def tokens(case, count, seed=0, heads=HEADS):
    _, channels, dtype = case
    rng = np.random.default_rng(seed)
    loud = np.where(rng.random((BATCH, 1, heads, channels)) < 0.15, 4.0, 1.0)
    loud = loud * np.geomspace(0.4, 3.0, heads)[:, None]
    # Of some channels all values are positive: 0, which is nowhere, must not count among them.
    shift = np.where(np.arange(channels) % 5 == 2, 20.0, 0.0)
    shape = (BATCH, count, heads, channels)
    return tuple(jnp.asarray(rng.normal(size=shape) * loud + shift, dtype) for _ in range(2))


store_xla = jax.jit(functools.partial(store_prompt, implementation="xla"))
append_xla = jax.jit(functools.partial(tj.append, implementation="xla"))


def with_slots_of_all_devices(cache):
    """As on the last device of several: with one width no kernel may read them."""

    def changed(side):
        more = 100 if len(side.codes) == 1 else 0
        return dataclasses.replace(side, head_slots=side.head_slots + more)

    return dataclasses.replace(cache, key=changed(cache.key), value=changed(cache.value))


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("name", "size", "lengths"),
    [
        # Blocks for which a warp has too many lanes.
        ("3 bits, blocks of 16", 40, (40, 16, 3)),
        pytest.param("4 bits", 150, (150, 130, 0), marks=pytest.mark.fuzz),
        pytest.param("mixed", 40, (40, 33, 15), marks=pytest.mark.fuzz),
        pytest.param("4/3 and 2", 40, (40, 16, 3), marks=pytest.mark.fuzz),
        pytest.param("3 bits", 70, (70, 64, 3), marks=pytest.mark.fuzz),
        pytest.param("3 bits, head dim 128", 70, (70, 64, 3), marks=pytest.mark.fuzz),
    ],
)
def test_a_prompt(name, size, lengths):
    """Ragged; blocks that are not stored keep what stood there. Attention's codes are its own."""
    case = CASES[name]
    rng, empty = np.random.default_rng(2), with_slots_of_all_devices(new(case))
    old = dataclasses.replace(empty, key=litter(empty.key, rng), value=litter(empty.value, rng))
    key, value = tokens(case, size, seed=1)
    key = key.at[1, 3, 1, 5].set(jnp.nan)
    expected = store_xla(old, key, value, int32(*lengths))
    got, codes = append_mosaic.store_prompt_with_operands(
        old, key, value, int32(*lengths), permuted=True
    )
    assert_same_bits(got, expected)
    if case[0].num_first_tokens:
        assert codes is None
        return
    want = operands.quantize_keys_and_values(key, value, int32(*lengths), case[0], permuted=True)
    for a, b in zip(codes, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.usefixtures("emulated")
@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("kernels", [append_mosaic, append_triton])
@pytest.mark.parametrize("size", [1, 3])
def test_prompts_of_first_tokens_alone(size, kernels):
    """No block can come of them: there is nothing to launch."""
    case = (tj.TurboConfig(block_kv=16, first_tokens=3), 8, jnp.float32)
    given, lengths = tokens(case, size, seed=1), int32(size, 1, 0)
    stored = kernels.store_prompt(new(case), *given, lengths)
    assert_same_bits(stored, store_xla(new(case), *given, lengths))
    assert stored.buffer_lengths.tolist() == [size, 1, 0]


@pytest.mark.fuzz
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("name", CASES)
def test_tokens(name):
    """Two buffers fill; one sequence gets no token in a step, one begins, with zeros at first."""
    case = CASES[name]
    size = case[0].buffer_size
    key, value = tokens(case, size, seed=1)
    cache = expected = store_xla(new(case), key, value, int32(size - 1, size - 2, 0))
    key, value = tokens(case, 3, seed=3)
    key = key.at[2, 0].set(0).at[1, 2, 0, 3].set(jnp.inf)
    for t in range(3):
        given = key[:, t : t + 1], value[:, t : t + 1], int32(t < 2, 1, t != 1)
        expected = append_xla(expected, *given[:2], lengths=given[2])
        cache = append_mosaic.append(cache, *given)
    assert_same_bits(cache, expected)


@pytest.mark.usefixtures("emulated")
@pytest.mark.fuzz
@pytest.mark.parametrize("heads", [1, 3, 5, 7])
def test_odd_numbers_of_heads(heads):
    """``"2/4bit"``, whose keys and values have unlike numbers of each width; one token alone."""
    config = dataclasses.replace(cache_by_name("2/4bit", heads), block_kv=16, buffer_size=16)
    case, lengths = (config, 8, jnp.float32), int32(31, 15, 0)
    cache = new(case, 64, heads)
    given = tokens(case, 31, seed=1, heads=heads)
    expected = store_xla(cache, *given, lengths)
    cache = append_mosaic.store_prompt(cache, *given, lengths)
    assert_same_bits(cache, expected)
    given = tokens(case, 1, seed=2, heads=heads)
    cache = append_mosaic.append(cache, *given, int32(1, 1, 1))
    assert_same_bits(cache, append_xla(expected, *given))
    assert expected.num_blocks.tolist() == [1, 0, 0]
    assert cache.num_blocks.tolist() == [2, 1, 0]


@pytest.mark.fuzz
@pytest.mark.usefixtures("emulated")
def test_parts_of_caches():
    """Blocks 1 to 3 of a device; buffers become block 4, 1 and 0: another device's, its own."""
    case = CASES["4/3 and 2"]
    first = jnp.int32(1)
    part = dataclasses.replace(new(case, 48), max_length=160)
    key, value = tokens(case, 79, seed=1)
    lengths = int32(79, 31, 15)
    cache = append_mosaic.store_part_of_prompt(part, key, value, lengths, first)
    expected = jax.jit(append_reference.store_prompt)(part, key, value, lengths, first)
    assert_same_bits(cache, expected)
    append = jax.jit(append_reference.append)
    for seed in range(2):
        given = *tokens(case, 1, seed=seed), int32(1, 1, 1)
        expected = append(expected, *given, first)
        cache = append_mosaic.append(cache, *given, first)
        assert_same_bits(cache, expected)
    assert expected.num_blocks.tolist() == [5, 2, 1]
    whole = append_xla(store_xla(new(case, 160), key, value, lengths), *tokens(case, 1, seed=0))
    np.testing.assert_array_equal(expected.key.block_scale[0], whole.key.block_scale[0, :, 1:4])
    np.testing.assert_array_equal(expected.key.codes[0][1, :, 0], whole.key.codes[0][1, :, 1])
    assert not expected.key.block_scale[2].any()


def rolling():
    """Three blocks of 16 for a window of 31, and a buffer of two."""
    config, *rest = CASES["4/3 and 2"]
    case = (dataclasses.replace(config, buffer_size=32), *rest)
    empty = new(case, local_window_size=(30, 0))
    assert empty.blocks_of_room == 3
    return case, empty


@pytest.mark.fuzz
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    "store",
    [
        append_mosaic.store_prompt,
        pytest.param(append_mosaic.store_prompt_with_operands, marks=pytest.mark.fuzz),
    ],
)
def test_prompts_in_rolling_buffers(store):
    """The last blocks of a prompt."""
    case, empty = rolling()
    given = (empty, *tokens(case, 63, seed=1), int32(63, 63, 24))
    stored = store(*given)
    stored = stored[0] if isinstance(stored, tuple) else stored
    assert_same_bits(stored, store_xla(*given))


@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
def test_tokens_in_rolling_buffers():
    """A buffer of two blocks gives up the first one, which takes a fourth one's place.

    One that is empty fixes its scale.
    """
    case, empty = rolling()
    cache = expected = store_xla(empty, *tokens(case, 78, seed=1), int32(78, 78, 0))
    for seed in range(2, 5):
        given = tokens(case, 1, seed=seed)
        expected = append_xla(expected, *given)
        cache = append_mosaic.append(cache, *given, int32(1, 1, 1))
        assert_same_bits(cache, expected)
    assert expected.num_blocks.tolist() == [4, 4, 0]


@pytest.mark.quick(1)
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("append", [append_mosaic.append, append_triton.append])
def test_a_buffer_that_gives_up_all_of_its_blocks(append):
    """Two at once, of which the second begins a rolling buffer anew; nothing stays behind."""
    config = tj.TurboConfig(block_q=16, block_kv=16, buffer_size=32, flush="all")
    case = (config, 16, jnp.float32)
    empty = with_slots_of_all_devices(new(case, local_window_size=(60, 0)))
    room = empty.blocks_of_room
    key, value = tokens(case, 16 * (room - 1), seed=1)
    cache = store_xla(empty, key, value, int32(16 * (room - 1), 0, 5))
    cache = append_xla(cache, key[:, :31], value[:, :31], lengths=int32(31, 31, 0))
    key, value = tokens(case, 1, seed=2)
    with interpret_kernels():
        got = append(cache, key, value, int32(1, 1, 1))
    assert_same_bits(got, append_xla(cache, key, value))
    assert got.num_blocks.tolist() == [room + 1, 2, 0]


CONFIGS = (
    tj.TurboConfig(),
    tj.TurboConfig(block_kv=16, buffer_size=48, first_tokens=3),
    tj.TurboConfig(block_q=16, block_kv=16, buffer_size=32, flush="all"),
)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("config", CONFIGS, ids=["default", "first tokens", "all blocks"])
def test_counts_are_those_of_plain_jax(config):
    """Around a full buffer and a full cache; with and without a token, and asked for too many."""
    held, buffered, asked = [], [], []
    for row in (0, 1, config.buffer_size // 2, config.buffer_size - 2, config.buffer_size - 1):
        for full in (0, 1, 5):
            for wanted in (0, 1, 2, -1):
                held.append(full * config.block_kv + row)
                buffered.append(row)
                asked.append(wanted)
    lengths = jnp.int32(held)
    rolling = {"local_window_size": (2 * config.block_kv, 0)}
    for most, window in ((1 + max(held), {}), (max(held), {}), (1 + max(held), rolling)):
        cache = tj.init_cache(len(held), most, 2, 64, config=config, **window)
        assert bool(window) == (max(held) // config.block_kv > cache.blocks_of_room)
        before = dataclasses.replace(
            cache,
            lengths=lengths,
            buffer_lengths=jnp.int32(buffered),
            overflowed=jnp.arange(len(held)) % 3 == 0,
        )
        plan, after = append_mosaic.counted(before, jnp.int32(asked))
        accepted = append_reference.accepted_tokens(before, 1, jnp.int32(asked))
        sides = before.key, before.value
        want = append_reference.with_appended(before, *sides, jnp.int32(asked), accepted)
        start = before.num_blocks % before.blocks_of_room
        for a, b in zip(plan, (accepted, before.buffer_lengths, start), strict=True):
            np.testing.assert_array_equal(a, b)
        for a, b in zip(after, (want.lengths, want.buffer_lengths, want.overflowed), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("emulated")
def test_one_sequence_counts_in_a_kernel(monkeypatch):
    """Through a buffer that fills, a token that nobody gives and one that has no room."""
    config = tj.TurboConfig(block_q=16, block_kv=16, buffer_size=16)
    case, counted = (config, 16, jnp.float32), []
    monkeypatch.setattr(append, "count", lambda *x: counted.append(x) or COUNT(*x))
    empty = tj.init_cache(1, 17, HEADS, 16, config=config, dtype=jnp.float32)
    key, value = (x[:1] for x in tokens(case, 18, seed=1))
    want = got = append_xla(empty, key[:, :15], value[:, :15])
    for t, new in enumerate((1, 0, 1, 1), 14):
        given = key[:, t : t + 1], value[:, t : t + 1], int32(new)
        want = append_xla(want, *given[:2], lengths=given[2])
        got = append_mosaic.append(got, *given)
        assert_same_bits(got, want)
    assert counted
    assert got.overflowed.tolist() == [True]
    assert got.num_blocks.tolist() == [1]


COUNT = append.count


def test_one_sequence_takes_two_kernels(hopper):
    cache = jax.eval_shape(lambda: tj.init_cache(1, 1024, HEADS, 128))
    x = jax.ShapeDtypeStruct((1, 1, HEADS, 128), jnp.bfloat16)
    text = lower_for_cuda(tj.append, cache, x, x)
    assert text.count("mosaic_gpu_v2") == 2
    assert not re.search(r"stablehlo\.(add|select|or|minimum|iota)\b", text)


@pytest.mark.fuzz
@pytest.mark.usefixtures("emulated")
def test_scales_of_tokens():
    """Given ones that clamp, tiny and huge ones; values that are not finite; the first blocks."""
    case = CASES["4/3 and 2"]
    size = case[0].buffer_size
    cache = new(case, key_scale=0.011, value_scale=jnp.array([1e-37, 3e36]))
    key, value = tokens(case, size, seed=5)
    cache = expected = append_xla(cache, key[:, : size - 2], value[:, : size - 2])
    key = key.at[1, size - 2, 0, 2].set(-jnp.inf)
    for t in (size - 2, size - 1):
        given = key[:, t : t + 1], value[:, t : t + 1]
        expected = append_xla(expected, *given)
        cache = append_mosaic.append(cache, *given, int32(1, 1, 1))
    assert_same_bits(cache, expected)


@pytest.mark.fuzz
@pytest.mark.parametrize("bits", [(4, 4), (3, 2)])
@pytest.mark.parametrize("mode", ["int8", "int8_fp8", "fp8"])
@pytest.mark.parametrize(("dim", "block"), [(128, 64), (256, 128), (80, 16)])
def test_it_lowers(hopper, mode, bits, dim, block):
    """One launch for both sides, and one for values in e4m3; in place."""
    options = {"key_bits": bits[0], "value_bits": bits[1], "num_low_bit_key_heads": 1}
    config = tj.TurboConfig(mode=mode, block_kv=block, first_tokens=0, **options)
    cache = jax.eval_shape(lambda: tj.init_cache(2, 512, 2, dim, config=config))
    x = jax.ShapeDtypeStruct((2, 300, 2, dim), jnp.bfloat16)
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    text = lower_for_cuda(append_mosaic.store_prompt_with_operands, cache, x, x, lengths)
    assert text.count("mosaic_gpu_v2") == (1 if mode == "int8" else 2)
    assert text.count("output_operand_alias<") >= 8
    new = x.update(shape=(2, 1, 2, dim))
    text = lower_for_cuda(tj.append, cache, new, new)
    assert text.count("mosaic_gpu_v2") == 1
    assert text.count("output_operand_alias<") == 13
    assert "triton" not in text


@pytest.mark.parametrize(("count", "is_a_kernel"), [(1, True), (3, False)])
def test_beside_attention_that_is_named(hopper, count, is_a_kernel):
    """A layer that asks for it by name may append several tokens, which is plain JAX."""
    case = CASES["4 bits"]
    cache = jax.eval_shape(lambda: new(case))
    x = jax.ShapeDtypeStruct((BATCH, count, HEADS, 128), jnp.bfloat16)
    writer = PROGRESSIVE.writer("mosaic_gpu", count)
    run = functools.partial(PROGRESSIVE.append, implementation=writer)
    assert ("turbojax_append_hopper" in str(jax.make_jaxpr(run)(cache, x, x))) == is_a_kernel
