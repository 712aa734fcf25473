"""Attention over a ring of devices against one device; what it sends; how even the work is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import turbojax as tj
from tests.contracts.ring_helpers import (
    BATCH,
    BLOCK,
    CHANNELS,
    HEADS,
    KV_HEADS,
    OF_TOKENS,
    TOKENS,
    assert_close,
    both,
    collectives,
    config_of,
    mesh_of,
    operands,
    over,
)
from turbojax.attention import cudnn
from turbojax.attention.options import Visibility
from turbojax.parallel import (
    from_zigzag,
    permutation,
    positions,
    ring_attention,
    ring_pooled_attention,
    to_zigzag,
)
from turbojax.parallel.local import Turbo
from turbojax.parallel.ring import best_order, plan
from turbojax.parallel.zigzag import chunks

pytestmark = pytest.mark.mesh

WINDOWS = (None, (0, 0), (5, 0), (20, 0), (5, 3), (70, 70))


@pytest.mark.parametrize("order", ["natural", "zigzag"])
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_every_visible_pair_meets_once(devices, order):
    size = 8
    held = chunks(order, devices)
    count = devices * len(held[0])
    place = jnp.arange(count * size)[None]
    for window in WINDOWS:
        for is_causal in (True, False):
            visibility = Visibility(is_causal, window)
            pairs = [(c, c, "diagonal") for c in range(count)]
            for step in plan(order, devices, size, visibility):
                for call in step.calls:
                    for d in range(devices):
                        if call.is_real[d]:
                            visiting = held[(d - step.shift) % devices]
                            pair = held[d][call.queries[d]], visiting[call.keys[d]]
                            pairs.append((*pair, call.kind))
            assert len({pair[:2] for pair in pairs}) == len(pairs)
            seen = visibility.mask(place, place, jnp.full(1, count * size))[0]
            seen = np.asarray(seen).reshape(count, size, count, size).swapaxes(1, 2)
            met = np.zeros((count, count), bool)
            for q, k, kind in pairs:
                met[q, k] = True
                assert kind != "full" or seen[q, k].all()
            assert (met | ~seen.any((2, 3))).all()


def _work(devices, visibility, tokens):
    """Pairs of a query and a visible key, of each device."""
    order = best_order(visibility, tokens)
    held = np.asarray(chunks(order, devices))
    size = tokens // held.size
    places = (held[..., None] * size + np.arange(size)).reshape(devices, -1)
    left = tokens if visibility.window is None else visibility.window[0]
    return np.sum(np.minimum(places, left) + 1, axis=1)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_devices_have_the_same_to_do(devices):
    work = _work(devices, Visibility(True), 1024)
    np.testing.assert_allclose(work, work.sum() / devices, rtol=0.05)
    for window in (50, 300, 500, 600, 900):
        work = _work(devices, Visibility(True, (window - 1, 0)), 1024)
        assert work.max() <= work.mean() / (1 - window / 2048)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_calls_are_of_no_more_than_what_is_seen(devices, monkeypatch):
    calls = []

    def attend(self, operands, packed, pair):
        query, key, _ = operands
        share = 0.5 if pair.kind == "diagonal" else 1.0
        calls.append(share * query.shape[0] * query.shape[1] * key.shape[1])
        return query.astype(jnp.float32), query[..., 0].astype(jnp.float32)

    monkeypatch.setattr(Turbo, "attend", attend)
    call = functools.partial(
        ring_attention, axis_name="sequence", attention=config_of("int8"), is_causal=True
    )
    tokens = 16 * BLOCK
    shapes = [
        jax.ShapeDtypeStruct((BATCH, tokens, n, CHANNELS), jnp.float32)
        for n in (HEADS, KV_HEADS, KV_HEADS)
    ]
    jax.eval_shape(over(devices, call, (OF_TOKENS,) * 3), *shapes)
    assert sum(calls) == BATCH * tokens * tokens / 2 / devices


def _dots(jaxpr):
    """Multiplications of a jaxpr's matrix products; loops must have a known length."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += equation.outvars[0].aval.size * int(np.prod([shape[i] for i in contracted]))
        repeats = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        assert equation.primitive.name != "while"
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            total += repeats * _dots(inner) if hasattr(inner, "eqns") else 0
    return total


def test_matrix_products_are_shared_out():
    q, k, v, *_ = operands()
    blocks = {"block_q": BLOCK, "block_kv": BLOCK, "is_causal": False}
    levels = jnp.ones((1, 1, TOKENS // BLOCK, TOKENS // BLOCK), jnp.int8)

    def gradients(f):
        return jax.grad(lambda *x: jnp.sum(f(*x, levels)), argnums=(0, 1, 2))

    one = functools.partial(tj.pooled_attention, **blocks)
    whole = _dots(jax.make_jaxpr(gradients(one))(q, k, v).jaxpr)
    call = functools.partial(ring_pooled_attention, axis_name="sequence", **blocks)
    for devices in (2, 4, 8):
        many = over(devices, call, (*(OF_TOKENS,) * 3, P(None, None, "sequence")))
        shared = _dots(jax.make_jaxpr(gradients(many))(q, k, v).jaxpr)
        assert whole / devices <= shared <= 1.05 * whole / devices


def test_zigzag_order_and_back():
    x = jnp.arange(BATCH * TOKENS * 3).reshape(BATCH, TOKENS, 3)
    for devices in (2, 8):

        def call(x):
            moved = to_zigzag(x, "sequence")
            return moved, from_zigzag(moved, "sequence"), positions(x.shape[1], "sequence")

        specs = (OF_TOKENS, OF_TOKENS, P("sequence"))
        program = jax.jit(over(devices, call, (OF_TOKENS,), specs)).lower(x).compile()
        moved, back, places = program(x)
        order = permutation(TOKENS, devices)
        np.testing.assert_array_equal(moved, x[:, order])
        np.testing.assert_array_equal(back, x)
        np.testing.assert_array_equal(places, order)
        assert collectives(program) == {"collective-permute"}


def _turbo(devices, attention, order="natural", mesh=None, specs=None, **static):
    """`both`'s functions, of arrays, sinks and segments."""
    config = config_of("float") if attention == "exact" else attention
    perm = permutation(TOKENS, devices) if order == "zigzag" else slice(None)
    back = slice(None) if order == "natural" else jnp.argsort(perm)

    def one(q, k, v, sinks, ids, lengths):
        given = {"query_segment_ids": ids, "key_value_segment_ids": ids}
        given |= {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
        return tj.turbo_attention(q, k, v, config=config, sinks=sinks, **given, **static)

    def local(q, k, v, sinks, ids, lengths):
        given = {"query_segment_ids": ids, "key_value_segment_ids": ids}
        given |= {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
        given |= {"axis_name": "sequence", "order": order, "attention": attention}
        return ring_attention(q, k, v, sinks=sinks, **given, **static)

    def many(q, k, v, sinks, ids, lengths):
        tokens = OF_TOKENS if specs is None else specs[0]
        of_ids = None if ids is None else P(*tokens[:2])
        of_lengths = None if lengths is None else P(tokens[0])
        given = tokens, tokens, tokens, P() if specs is None else specs[1], of_ids, of_lengths
        call = over(devices, local, given, tokens, mesh)
        ids = None if ids is None else ids[:, perm]
        return call(q[:, perm], k[:, perm], v[:, perm], sinks, ids, lengths)[:, back]

    return one, many


@pytest.mark.slow
def test_turbo_with_segments_and_sinks():
    q, k, v, sinks, ids, _ = operands()
    one, many = _turbo(4, config_of("int8"), is_causal=True)
    wanted, got, program = both(one, many, q, k, v, sinks, ids, None, mesh=mesh_of(4))
    assert_close(got, wanted, 4)
    # The sinks are the same on all devices: their gradient is summed, and so it would be anywhere.
    assert collectives(program) == {"collective-permute", "all-reduce"}


def test_exact_with_lengths_in_zigzag_order():
    q, k, v, _, _, _ = operands()
    lengths = jnp.array([TOKENS - 13, 21], jnp.int32)
    # Of two devices way and way back would be the same.
    one, many = _turbo(4, "exact", "zigzag", is_causal=True)
    no_sinks = jnp.full(HEADS, -jnp.inf)
    wanted, got, _ = both(one, many, q, k, v, no_sinks, None, lengths)
    assert_close(got, wanted, 4)


@pytest.mark.fuzz
def test_pooled_sends_nothing_but_keys():
    q, k, v, sinks, _, _ = operands()
    blocks = {"block_q": BLOCK, "block_kv": BLOCK, "is_causal": True}
    shape = (1, HEADS, TOKENS // BLOCK, TOKENS // BLOCK)
    levels = jax.random.choice(jax.random.key(1), jnp.array([0, 1, 2, 4, 8], jnp.int8), shape)
    call = functools.partial(ring_pooled_attention, axis_name="sequence", **blocks)
    ring = over(4, call, (*(OF_TOKENS,) * 3, P(None, None, "sequence")))
    wanted, got, program = both(
        lambda q, k, v, _: tj.pooled_attention(q, k, v, levels, **blocks),
        lambda q, k, v, _: ring(q, k, v, levels),
        *(q, k, v, sinks),
        mesh=mesh_of(4),
    )
    assert_close(got[:4], wanted[:4], 4)
    assert collectives(program) == {"collective-permute"}


def test_steps_out_of_a_window_are_left_out():
    steps = plan("natural", 8, 64, Visibility(True, (64, 0)))
    assert [step.shift for step in steps] == [0, 1]
    steps = plan("natural", 8, 64, Visibility(False, (64, 64)))
    assert [step.shift for step in steps] == [0, 1, 7]


def test_codes_travel_and_leave_before_they_are_attended_to(monkeypatch):
    bf16 = [
        jax.ShapeDtypeStruct((1, 512, n, 64), jnp.bfloat16) for n in (HEADS, KV_HEADS, KV_HEADS)
    ]
    call = functools.partial(ring_attention, axis_name="sequence", order="zigzag", is_causal=True)
    gpu = jax.sharding.AbstractDevice(
        device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="cuda"
    )
    kinds = {"axis_types": (jax.sharding.AxisType.Auto,), "abstract_device": gpu}
    mesh = jax.sharding.AbstractMesh((2,), ("sequence",), **kinds)
    monkeypatch.setattr("turbojax._device.gpu_compute_capability", lambda: 9.0)
    with jax.sharding.use_abstract_mesh(mesh):
        ring = jax.jit(over(2, call, (OF_TOKENS,) * 3, mesh=mesh))
        text = ring.trace(*bf16).lower(lowering_platforms=("cuda",)).as_text()
    sent = [line for line in text.splitlines() if "stablehlo.collective_permute" in line]
    sizes = [line.split("-> tensor<")[1].split(">")[0] for line in sent]
    assert [x.rsplit("x", 1)[1] for x in sizes if not x.endswith("xf32")] == ["i8", "f8E4M3FN"]
    assert not [x for x in sizes if x.endswith("bf16")]
    # The first step's two calls, of which the later one stands after the sending.
    calls = [i for i, line in enumerate(text.splitlines()) if "call @attention" in line]
    last_sent = max(i for i, line in enumerate(text.splitlines()) if line in sent)
    assert last_sent < calls[1]


def test_what_does_not_fit_is_named():
    q, k, v, *_ = operands()

    def run(devices, tokens=TOKENS, q=q, **options):
        call = functools.partial(ring_attention, axis_name="sequence", **options)
        arrays = q[:, :tokens], k[:, :tokens], v[:, :tokens]
        return jax.eval_shape(over(devices, call, (OF_TOKENS,) * 3), *arrays)

    with pytest.raises(ValueError, match="8 tokens on each of 8 devices must be a multiple of 16"):
        run(8, attention=config_of("int8"), is_causal=True)
    with pytest.raises(ValueError, match="one chunk of whole blocks, block_q=8"):
        run(4, 48, attention=config_of("int8"))
    with pytest.raises(TypeError, match="attention='approximate' must be"):
        run(2, attention="approximate")
    with pytest.raises(ValueError, match="order='random'"):
        run(2, attention="exact", order="random")
    with pytest.raises(ValueError, match="implementation='fast'"):
        run(2, attention="exact", implementation="fast")
    with pytest.raises(NotImplementedError, match="cudnn: needs an NVIDIA GPU"):
        run(2, attention="exact", implementation="cudnn")


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("mode", ["float", "int8", "int8_fp8", "fp8"])
def test_modes_and_windows(mode):
    q, k, v, sinks, _, _ = operands()
    options = {"is_causal": True, "local_window_size": (20, 0), "logits_soft_cap": 10.0}
    options["alibi_slopes"] = jnp.linspace(0.1, 0.5, HEADS)
    one, many = _turbo(4, config_of(mode), "zigzag", **options)
    wanted, got, _ = both(one, many, q, k, v, sinks, None, None)
    if mode in ("float", "int8"):
        return assert_close(got, wanted, 4)
    # Scales of e4m3 values are those of a chunk, not of the sequence: other numbers are rounded.
    exact = both(_turbo(4, config_of("float"), **options)[0], one, q, k, v, sinks, None, None)[0]
    for x, y, z in zip(got, wanted, exact, strict=True):
        assert jnp.max(jnp.abs(x - z)) <= 2 * jnp.max(jnp.abs(y - z))


@pytest.mark.quick(slow=1)
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_numbers_of_devices(devices):
    q, k, v, sinks, ids, _ = operands()
    order = "natural" if devices < 8 else "zigzag"
    config = config_of("int8") if devices < 8 else "exact"
    one, many = _turbo(devices, config, order, is_causal=devices != 2)
    wanted, got, _ = both(one, many, q, k, v, sinks, ids, None)
    assert_close(got, wanted, devices)


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("order", "options"),
    [
        ("zigzag", {"is_causal": True, "local_window_size": (20, 0)}),
        ("natural", {"is_causal": False, "local_window_size": (9, 13), "logits_soft_cap": 5.0}),
    ],
)
def test_all_at_once_over_axes_of_two_names(order, options):
    """Windows, segments, ragged lengths, sinks and slopes; values of other head dimensions."""
    q, k, v, sinks, ids, d = operands()
    v, d = (jnp.concatenate([x, x[..., :3]], axis=3) for x in (v, d))
    slopes, names = jnp.linspace(0.05, 0.4, HEADS), ("outer", "inner")
    lengths = jnp.array([TOKENS - 5, 21], jnp.int32), jnp.array([TOKENS - 14, 21], jnp.int32)
    perm = permutation(TOKENS, 4) if order == "zigzag" else jnp.arange(TOKENS)
    tokens = P(None, names)

    def arguments(sinks, slopes, ids, lengths):
        given = {"query_segment_ids": ids, "key_value_segment_ids": ids, "sinks": sinks}
        given |= {"query_seq_lengths": lengths[0], "key_value_seq_lengths": lengths[1]}
        return {"alibi_slopes": slopes, **given, **options}

    def one(q, k, v, sinks, slopes):
        given = arguments(sinks, slopes, ids, lengths)
        return tj.turbo_attention(q, k, v, config=config_of("float"), **given)

    def local(q, k, v, *more):
        return ring_attention(
            q, k, v, axis_name=names, attention="exact", order=order, **arguments(*more)
        )

    def many(q, k, v, sinks, slopes):
        specs = (*(tokens,) * 3, P(), P(), tokens, P())
        call = over(4, local, specs, tokens, mesh_of(4, names, (2, 2)))
        moved = (x[:, perm] for x in (q, k, v))
        return call(*moved, sinks, slopes, ids[:, perm], lengths)[:, jnp.argsort(perm)]

    def results(f):
        out, pull = jax.vjp(f, q, k, v, sinks, slopes)
        return out, *pull(d)

    assert_close(
        jax.jit(results, static_argnums=0)(many), jax.jit(results, static_argnums=0)(one), 4
    )


def _attention_that_keeps_its_residual(query, key, value, **options):
    """What cuDNN does, as far as a caller sees it."""
    assert options.pop("implementation") == "cudnn"

    def attend(*arrays):
        return tj.turbo_attention(
            *arrays, config=config_of("float"), return_residual=True, **options
        )

    @jax.custom_vjp
    def call(*arrays):
        return attend(*arrays)[0]

    def forward(*arrays):
        out, residual = attend(*arrays)
        return out, (*arrays, jnp.swapaxes(residual, 1, 2), out)

    call.defvjp(forward, lambda kept, d_out: kept[:3])
    return call(query, key, value)


@pytest.mark.slow
def test_exact_parts_of_cudnn(monkeypatch):
    q, k, v, *_ = operands()
    lengths = jnp.array([TOKENS - 13, 21], jnp.int32)
    monkeypatch.setattr(cudnn, "dot_product_attention", _attention_that_keeps_its_residual)
    monkeypatch.setattr(cudnn, "unsupported", lambda *_, **__: None)
    cudnn.no_part.cache_clear()
    cudnn.attend_part.clear_cache()
    given = {"is_causal": True, "query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
    given["return_residual"] = True
    wanted = tj.turbo_attention(q, k, v, config=config_of("float"), **given)
    call = functools.partial(
        ring_attention, axis_name="sequence", attention="exact", implementation="cudnn", **given
    )
    got = jax.jit(over(4, call, (OF_TOKENS,) * 3, (OF_TOKENS,) * 2))(q, k, v)
    cudnn.no_part.cache_clear()
    cudnn.attend_part.clear_cache()
    seen = wanted[1] > -jnp.inf
    np.testing.assert_array_equal(got[1] > -jnp.inf, seen)
    assert_close(
        [got[0], jnp.where(seen, got[1], 0)], [wanted[0], jnp.where(seen, wanted[1], 0)], 4
    )


@pytest.mark.slow
def test_heads_and_sequences_at_once():
    q, k, v, sinks, _, _ = operands()
    mesh = mesh_of(8, ("data", "model", "sequence"), (2, 2, 2))
    specs = P("data", "sequence", "model"), P("model")
    one, many = _turbo(2, config_of("int8"), mesh=mesh, specs=specs, is_causal=True)
    wanted, got, _ = both(one, many, q, k, v, sinks, None, None)
    assert_close(got, wanted, 2)


@pytest.mark.slow
def test_nan_reaches_who_sees_its_block():
    q, k, v, *_ = operands()
    k = k.at[0, 37, 0, 0].set(jnp.nan)
    call = {"is_causal": True, "return_residual": True}
    wanted = tj.turbo_attention(q, k, v, config=config_of("int8"), **call)
    ring = functools.partial(
        ring_attention, axis_name="sequence", attention=config_of("int8"), **call
    )
    got = jax.jit(over(4, ring, (OF_TOKENS,) * 3, (OF_TOKENS,) * 2))(q, k, v)
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.isnan(x), np.isnan(y))


@pytest.mark.slow
def test_there_is_no_second_derivative():
    q, k, v, *_ = operands()
    call = functools.partial(ring_attention, axis_name="sequence", attention=config_of("int8"))
    ring = over(2, call, (OF_TOKENS,) * 3)

    def first(q):
        return jnp.sum(jax.grad(lambda q: jnp.sum(ring(q, k, v)))(q))

    with pytest.raises(NotImplementedError, match="only first derivatives"):
        jax.eval_shape(jax.grad(first), q)
