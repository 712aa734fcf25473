"""`implementation="mosaic_gpu"` of `grouped_matmul` without a GPU: work, launches, lowering.

What it computes is checked on a GPU, in `test_gpu_int4.py`.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic.hopper.matmul import epilogue, grouped
from tests.kernels.kernel_helpers import lower_for_cuda
from tests.matmul.int4_helpers import abstract_weight
from tests.oracles import warp
from turbojax import _device
from turbojax.matmul.grouped import mosaic_gpu
from turbojax.matmul.grouped.api import GROUPED_MATMUL
from turbojax.matmul.grouped.tiles import cut
from turbojax.quantizers import Fp8Tokens

KINDS = ("e4m3", "bf16", "f16")


def specification(rows, experts, outputs, inputs, scales="e4m3", *, dtype=jnp.bfloat16, **weight):
    """Tokens, a stack of weights, sizes and biases that are shapes alone."""
    of = jax.ShapeDtypeStruct
    weight = abstract_weight(outputs, inputs, scales, experts=(experts,), **weight)
    codes, scale = of((rows, inputs), jnp.float8_e4m3fn), of((rows,), jnp.bfloat16)
    tokens = Fp8Tokens(codes, scale, np.dtype(dtype))
    return tokens, weight, of((experts,), jnp.int32), weight.output_scale


def test_choice_and_refusals(monkeypatch):
    def select(name=None, **options):
        tokens, weight, sizes, bias = specification(5, 3, 64, 128, **options)
        given = {"tokens": tokens, "weight": weight, "group_sizes": sizes, "bias": bias}
        return GROUPED_MATMUL.select(name, activation=None, **given).name

    monkeypatch.setattr(_device, "gpu_compute_capability", lambda: 9.0)
    assert select() == "mosaic_gpu"
    assert select(dtype=jnp.float32) == "triton"
    assert select(group_size=64) == "xla"
    with pytest.raises(NotImplementedError, match="mosaic_gpu: dtype=float32 must be bfloat16 or"):
        select("mosaic_gpu", dtype=jnp.float32)
    monkeypatch.setattr(_device, "gpu_compute_capability", lambda: 8.0)
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU of compute capability 9.0"):
        select("mosaic_gpu")


@pytest.mark.parametrize("is_precise", [False, True])
@pytest.mark.parametrize("scales", KINDS)
def test_launches(scales, is_precise):
    """Of every number of tokens: memory suffices, and sums are as promised."""
    for experts in (1, 8, 128):
        for rows in (1, 7, 64, 100, 512, 4096, 12000, 32000, 2**17):
            _, weight, *_ = specification(rows, experts, 1536, 2048, scales)
            launch = mosaic_gpu.default_launch(rows, weight, is_precise=is_precise)
            mean = rows / experts
            is_coarse = mean > 64 and rows > 128 and scales == "e4m3" and not is_precise
            assert launch.is_two_level == (not is_coarse)
            assert launch.tokens >= min(rows, mean, 128)
            is_many = 6 * min(rows, experts) > 66
            if launch.is_two_level:
                assert launch.consumers == (4 if launch.tokens <= 64 and is_many else 2)
            else:
                # Experts' tokens in one or two tiles of 144, if those are many, or in 256 each.
                is_narrow = experts == 128 and (mean <= 128 or 228 <= mean <= 256)
                assert (launch.tokens, launch.consumers) == ((144, 3) if is_narrow else (256, 2))
            assert 3 <= launch.stages <= 12


@pytest.mark.parametrize(
    ("rows", "outputs", "want"), [(1024, 28672, 3), (1024, 4096, 2), (768, 4096, 2)]
)
def test_tiles_of_two_or_three_warpgroups(rows, outputs, want):
    """Three, unless two take as many rounds of programs: of Mixtral's experts for down."""
    _, weight, *_ = specification(rows, 8, outputs, 2048, "e4m3")
    assert mosaic_gpu.default_launch(rows, weight).consumers == want


@pytest.mark.parametrize(
    "widths", [(8,), (16,), (16, 24, 32, 40, 48, 64), (96, 128, 144), (96, 144, 256)]
)
def test_tokens_are_copied_once(widths, monkeypatch):
    """Whatever their number: in one copy, of all of them, and of not many more."""
    copies = []

    class Indexed:
        """Gives what it is indexed with."""

        def __getitem__(self, place):
            return place

    reference = types.SimpleNamespace(at=Indexed())
    pl_ = types.SimpleNamespace(
        when=lambda found: lambda f: f() if found else None, ds=grouped.pl.ds
    )
    monkeypatch.setattr(grouped, "pl", pl_)
    monkeypatch.setattr(
        grouped.plgpu, "copy_gmem_to_smem", lambda source, target, _: copies.append(source)
    )
    s = settings_of(*widths)
    for size in range(1, widths[-1] + 1):
        copies.clear()
        work = grouped.Work(0, 7, size, 0)
        grouped._copy_tokens(work, 3, reference, reference, None, s)
        [(rows, columns)] = copies
        assert (rows.start, columns.start, columns.size) == (7, 3 * 128, 128)
        quarter = -(-widths[-1] // 32) * 8
        assert (
            size <= rows.size <= min(next(n for n in widths if n >= size), max(quarter, 2 * size))
        )


@pytest.fixture
def on_lanes(monkeypatch):
    """Lets the kernel's code of one lane run on the 32 of a warp."""
    places = types.SimpleNamespace(
        special=lambda name: {"laneid": warp.Int(warp.LANES), "tid.x": warp.thread()}[name],
        integer=warp.integer,
        when=warp.when,
        from_lane=warp.from_lane,
        ballot=warp.ballot,
    )
    monkeypatch.setattr(grouped, "lane", places)


def plan_of(sizes, rows, tile):
    """A plan as a warp makes it."""
    held = np.full(grouped.Plan.size(len(sizes)), -99, np.int32)
    pointers = [
        warp.Pointer(x.reshape(-1).view(np.uint8)) for x in (np.asarray(sizes, np.int32), held)
    ]
    grouped.make_plan(*pointers, len(sizes), rows, tile)
    return grouped.Plan(held, len(sizes))


@pytest.mark.quick(1, slow=0)
@pytest.mark.usefixtures("on_lanes")
@pytest.mark.parametrize("experts", [1, 2, 31, 32, 33, 128, 300])
def test_the_plan_is_the_definitions(experts):
    rng = np.random.default_rng(experts)
    for tile in (8, 64):
        sizes = rng.integers(0, 40, experts) * rng.integers(0, 2, experts)
        rows = int(sizes.sum()) + int(rng.integers(2))
        found, want = plan_of(sizes, rows, tile), cut(jnp.asarray(sizes, jnp.int32), rows, tile)
        assert [found.bound(i) for i in range(3)] == [int(want.total), sizes.sum(), 0]
        tokens = [found.token(e) for e in range(experts + 1)]
        np.testing.assert_array_equal(tokens, [0, *np.cumsum(sizes)])
        for number in range(int(want.total)):
            expert = int(found.expert(jnp.int32(number)))
            assert expert == want.expert[number]
            assert found.tile(expert) == want.start[number]
            assert found.tile(expert + 1) - found.tile(expert) == want.of_expert[number]


@pytest.mark.usefixtures("on_lanes")
@pytest.mark.parametrize("sizes", [[3, -1, 4], [3, 10, 14], [2**31 - 1] * 3, [-(2**31)] * 3])
def test_the_plan_of_sizes_that_are_not_valid(sizes):
    found = plan_of(sizes, 20, 8)
    assert [found.bound(i) for i in range(3)] == [0, 0, grouped.NAN]
    assert np.isnan(np.array([grouped.NAN], np.uint32).view(jnp.bfloat16).astype(float)).all()


def settings_of(*widths, consumers=2):
    epilogue_ = grouped.Epilogue(None, False, False, "bfloat16", 128)
    return grouped.Settings(epilogue_, widths, 2, consumers, True)


@pytest.mark.usefixtures("on_lanes")
@pytest.mark.parametrize(("consumers", "tile"), [(2, 8), (4, 16), (2, 64)])
def test_every_tile_has_its_work(consumers, tile):
    """By numbers: every row of every expert with every tile of outputs once, weights together."""
    rows, across = 200, 3
    sizes = np.array([3, 0, 17, 8, 0, 25, 65])
    found = plan_of(sizes, rows, tile)
    found.held = jnp.asarray(found.held)
    tiles = int(found.bound(0))
    assert tiles == sum(-(-size // tile) for size in sizes)
    s = settings_of(tile, consumers=consumers)
    seen, weights = [], []
    for number in range(tiles * across):
        work = grouped._work(jnp.int32(number), found, across, s)
        expert, token, count, out = (int(x) for x in work)
        of_expert = -(-sizes[expert] // tile)
        assert 1 <= count <= tile
        assert count <= -(-sizes[expert] // (8 * of_expert)) * 8, "parts are equal but for eight"
        seen += [(expert, out, token + i) for i in range(count)]
        if (expert, out) not in weights[-1:]:
            weights.append((expert, out))
    owners = np.repeat(np.arange(len(sizes)), sizes)
    wanted = {(int(e), out, row) for row, e in enumerate(owners) for out in range(across)}
    assert len(seen) == len(wanted)
    assert set(seen) == wanted
    assert len(weights) == len(set(weights)) == np.count_nonzero(sizes) * across


@pytest.mark.usefixtures("on_lanes")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("tokens", "count"), [(8, 8), (8, 5), (16, 0), (24, 19), (32, 19), (64, 64)]
)
def test_writes_the_tokens_of_an_expert_alone(tokens, count, gated):
    """What `finish` leaves, swizzled, reaches its rows and columns; other rows are left alone."""
    width, columns, rows, first, column = 32 if gated else 64, 192, 90, 11, 96
    swizzle = 64 if gated else 128
    e = grouped.Epilogue("swiglu" if gated else None, False, False, "bfloat16", swizzle)
    values = np.arange(tokens * width, dtype=np.uint16).reshape(tokens, width)
    memory = np.zeros((1 << (tokens - 1).bit_length(), width), np.uint16)
    for token in range(tokens):
        for part in range(0, width, 8):
            place = epilogue.place(warp.integer(token), warp.integer(2 * part), e).value[0] // 2
            memory.reshape(-1)[place : place + 8] = values[token, part : part + 8]
    out = np.full((rows, columns), 7777, np.uint16)
    pointers = [warp.Pointer(x.reshape(-1).view(np.uint8)) for x in (memory, out)]
    numbers = [warp.integer(x) for x in (first, count, column)]
    for number in range(4):
        warp.STATE.number = number
        grouped._write(*pointers, columns, (0, tokens), *numbers, e)
    warp.STATE.number = 0
    want = np.full((rows, columns), 7777, np.uint16)
    want[first : first + count, column : column + width] = values[:count]
    np.testing.assert_array_equal(out, want)


@pytest.mark.usefixtures("on_lanes")
@pytest.mark.parametrize("first", [0, 3, 85])
@pytest.mark.parametrize("tokens", [8, 64, 256])
def test_scales_are_copied_from_any_token_on(tokens, first):
    """Bulk copies begin at multiples of 16 bytes; this may begin anywhere and stays inside."""
    scales = np.arange(1000, 1090, dtype=np.uint16)
    found = np.zeros(tokens, np.uint16)
    pointers = [warp.Pointer(x.view(np.uint8)) for x in (scales, found)]
    for number in range(4):
        warp.STATE.number = number
        grouped._copy_scales(*pointers, warp.integer(first), len(scales), tokens)
    warp.STATE.number = 0
    np.testing.assert_array_equal(found, scales[np.minimum(first + np.arange(tokens), 89)])


# Tokens, experts, outputs, inputs; scales; activation; a word for each of bias, float16, highest.
LOWERED = [
    (37, 3, 144, 256, "bf16", "swiglu", "bias"),
    (1, 1, 64, 128, "e4m3", None, ""),
    (7, 5, 200, 300, "e4m3", "silu", "bias float16"),
    (512, 128, 1536, 2048, "e4m3", "swiglu", ""),
    (4096, 128, 2048, 768, "f16", None, ""),
    (1000, 8, 256, 640, "e4m3", "gelu", "bias highest"),
    (4000, 8, 256, 640, "e4m3", "swiglu", "bias"),
    (9000, 128, 1536, 2048, "e4m3", "swiglu", ""),
]


@pytest.mark.parametrize(
    "case", [LOWERED[0], *(pytest.param(c, marks=pytest.mark.fuzz) for c in LOWERED[1:])]
)
def test_lowers_for_cuda(case):
    """What lowers also fits into shared memory: the lowering counts it."""
    *shape, scales, activation, words = case
    options = {"scales": scales, "gated": activation == "swiglu"}
    if "float16" in words:
        options["dtype"] = jnp.float16
    tokens, weight, sizes, bias = specification(*shape, **options)
    static = {"activation": activation, "is_precise": "highest" in words}
    call = functools.partial(mosaic_gpu.matmul, **static)
    text = lower_for_cuda(call, tokens, weight, sizes, bias if "bias" in words else None)
    assert "turbojax_grouped_matmul_hopper" in text


@pytest.mark.slow
def test_lowers_under_vmap():
    tokens, weight, sizes, _ = specification(20, 3, 200, 300)
    many = jax.ShapeDtypeStruct((4, *sizes.shape), sizes.dtype)
    call = functools.partial(mosaic_gpu.matmul, activation=None, is_precise=False)
    mapped = jax.vmap(call, in_axes=(None, None, 0, None))
    text = lower_for_cuda(mapped, tokens, weight, many, None)
    assert "turbojax_grouped_matmul_hopper" in text
