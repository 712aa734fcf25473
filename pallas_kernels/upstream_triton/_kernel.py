# mypy: disable-error-code="no-untyped-def"
"""The Triton program of 8-bit prefill attention. Imports triton: only `attention.py` imports this.

Where things are accumulated. ``Q K^T`` of one tile is one accumulator over the head dim. ``P V``
of one key block of `BLOCK_N` tokens is one accumulator of the matrix unit, exact for int8; Hopper's
e4m3 unit keeps about 14 bits of it and truncates. `max_num_imprecise_acc` is relaxed to a whole
block for that: Triton could add up in float32 after every instruction, at the cost of speed. The
accumulator starts from zero in every block, and its sum is added to the output in float32
registers. If the output itself stayed in the matrix unit over all keys, its errors would have one
sign and grow with their number.
"""

import triton
import triton.language as tl

_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer, ties to even
_LOG2_E = tl.constexpr(1.4426950408889634)
_E4M3_MAX = tl.constexpr(448.0)
_LOG2_E4M3_MAX = tl.constexpr(8.807354922057604)
_INT8_RANGE = tl.constexpr(119.0)
_SMALLEST = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _floor_bits(y):
    """``floor(y) + 2**23`` for 0 <= y < 2**22: the integer is in the low bits."""
    return tl.inline_asm_elementwise(
        "add.rm.f32 $0, $1, 0f4B000000;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _zero_above(value, y, threshold):
    """0 where ``y > threshold``. Not `tl.where`: LLVM packs and unpacks its vector of bits."""
    return tl.inline_asm_elementwise(
        "{.reg .pred p; setp.gt.f32 p, $2, $3; selp.f32 $0, 0f00000000, $1, p;}",
        "=f,f,f,f", [value, y, threshold], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _exponential(y, POLICY: tl.constexpr, GAIN: tl.constexpr):
    """`GAIN` times SAS of ``-y``; `y` is in natural units (base e) or in powers of two.

    `POLICY` is (coefficients, threshold, is_base_2): see `attention.SparseExponential`.
    """
    COEFFICIENTS: tl.constexpr = POLICY[0]
    # Rounding may leave the row maximum slightly below zero; NaN must survive the clamp.
    y = tl.maximum(y, 0.0, propagate_nan=tl.PropagateNan.ALL)
    shifted = _floor_bits(y)
    whole = shifted - 8388608.0
    f = y - whole
    value = f * (COEFFICIENTS[3] * GAIN) + COEFFICIENTS[2] * GAIN
    value = value * f + COEFFICIENTS[1] * GAIN
    value = value * f + COEFFICIENTS[0] * GAIN
    if POLICY[2]:
        # The bits of 2**-i. A product, although adding to the exponent is shorter: it keeps NaN.
        power = 0x3F800000 - (shifted.to(tl.int32, bitcast=True) << 23)
        value = value * power.to(tl.float32, bitcast=True)
    else:
        value = value * tl.exp2(whole * -_LOG2_E)
    return _zero_above(value, y, -POLICY[1])


@triton.jit
def _soft_cap(scores, CAP: tl.constexpr):
    """``CAP * tanh(scores / CAP)``; the exponential is at most 1, so that nothing overflows."""
    t = tl.exp2(tl.abs(scores) * (-2.0 * _LOG2_E / CAP))
    capped = CAP * ((1.0 - t) / (1.0 + t))
    return tl.where(scores < 0, -capped, capped)


@triton.jit
def _scores(q, k, j, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr):
    """Code products of the queries with key block `j`: int32 or float32."""
    tile = tl.load(k + j * (BLOCK_N * BLOCK_H))
    if k.dtype.element_ty == tl.int8:
        return tl.dot(q, tile, out_dtype=tl.int32)
    return tl.dot(q, tile, max_num_imprecise_acc=BLOCK_H)


@triton.jit
def _attend(
    state, begin, end, q, pointers, rows, factor_q, length,
    BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    SOFT_CAP: tl.constexpr, POLICY: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Key blocks ``begin .. end - 1`` of Algorithm 1; `MASKED` says whether some keys are hidden.

    `state` is the output, row maxima and row sums.
    """
    k, k_scale, v, v_scale = pointers
    acc, m, l = state
    IS_INT8: tl.constexpr = v.dtype.element_ty == tl.int8
    GAIN: tl.constexpr = 1.0 if IS_INT8 else _E4M3_MAX
    # Scores are in the softmax's own unit: powers of two, or natural for base e.
    UNIT: tl.constexpr = 1.0 if POLICY is not None and not POLICY[2] else _LOG2_E
    for j in tl.range(begin, end):
        # load: the scalars first, so that their latency hides behind the products
        factor = factor_q * tl.load(k_scale + j)
        if IS_INT8:
            scale_v = tl.load(v_scale + j)
        # scores
        scores = _scores(q, k, j, BLOCK_N, BLOCK_H).to(tl.float32)
        if MASKED or SOFT_CAP is not None:
            scores = scores * factor[:, None]
            factor = tl.full(factor.shape, 1.0, tl.float32)
        if SOFT_CAP is not None:
            scores = _soft_cap(scores, SOFT_CAP) * UNIT
        if MASKED:
            keys = j * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            visible = keys < length
            if LEFT is not None:
                visible = visible & (keys >= rows[:, None] - LEFT)
            if RIGHT is not None:
                visible = visible & (keys <= rows[:, None] + RIGHT)
            scores = tl.where(visible, scores, -float("inf"))
        # softmax: a factor is not negative, so that the largest code product gives the maximum, and
        # scaling and subtracting it are one instruction. A maximum may lose NaN: p and l keep it.
        top = tl.max(scores, 1) * factor
        new_max = tl.maximum(m, top)
        shift = tl.where(new_max == -float("inf"), 0.0, new_max)
        alpha = tl.exp2((m - shift) * (_LOG2_E / UNIT))
        m = new_max
        if POLICY is not None:
            p = _exponential(shift[:, None] - scores * factor[:, None], POLICY, GAIN)
        elif IS_INT8:
            p = tl.exp2(scores * factor[:, None] - shift[:, None])
        else:
            p = tl.exp2(scores * factor[:, None] - (shift - _LOG2_E4M3_MAX)[:, None])
        l = l * alpha + tl.sum(p, 1)
        # output
        if IS_INT8:
            largest = tl.exp2(top - shift)
            if POLICY is not None:
                largest = _exponential(shift - top, POLICY, GAIN)
            p_scale = largest * (1.0 / _INT8_RANGE)
            p_scale = tl.where(p_scale < _SMALLEST, 1.0, p_scale)
            p = p * (1.0 / p_scale)[:, None] + _MAGIC
            codes = p.to(tl.int32, bitcast=True).to(tl.int8)
            # A block of which a row sees nothing must not reach it, not even as 0 * NaN.
            gain = tl.where(top == -float("inf"), 0.0, p_scale * scale_v)
            tile = tl.load(v + j * BLOCK_N)
            product = tl.dot(codes, tile, out_dtype=tl.int32).to(tl.float32) * gain[:, None]
        else:
            codes = p.to(tl.float8e4nv)
            tile = tl.load(v + j * BLOCK_N)
            product = tl.dot(codes, tile, max_num_imprecise_acc=BLOCK_N)
        acc = acc * alpha[:, None] + product
    return acc, m, l


@triton.jit
def attention_kernel(
    q, q_scale, k, k_scale, v, v_scale, query_length, key_length,
    heads, kv_heads, tokens, q_blocks, kv_blocks,
    out, lse,
    HEAD_DIM: tl.constexpr, SCALE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    SOFT_CAP: tl.constexpr, POLICY: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """`BLOCK_M` queries of one head against all key blocks they see; see `attention.attention`."""
    IS_INT8: tl.constexpr = v.dtype.element_ty == tl.int8
    UNIT: tl.constexpr = 1.0 if POLICY is not None and not POLICY[2] else _LOG2_E

    # Which tile. Under a causal mask the last ones are the longest and start first.
    tiles = tl.cdiv(tokens, BLOCK_M)
    tile = tl.program_id(0) % tiles
    if RIGHT is not None:
        tile = tiles - 1 - tile
    row = tl.program_id(0) // tiles  # of [B * N]
    batch = row // heads
    head = row % heads
    kv_row = (batch * kv_heads + head // (heads // kv_heads)).to(tl.int64)
    last_query = tl.load(query_length + batch)
    length = tl.minimum(tl.load(key_length + batch), kv_blocks * BLOCK_N)

    # Which keys: [begin, end) are visible to some row, [inner, outer) to every row.
    first = tile * BLOCK_M
    last = tl.minimum(first + BLOCK_M, tokens) - 1
    start, stop = 0, length
    full_start, full_stop = 0, length
    if LEFT is not None:
        start = tl.maximum(first - LEFT, 0)
        full_start = tl.maximum(last - LEFT, 0)
    if RIGHT is not None:
        stop = tl.minimum(stop, last + RIGHT + 1)
        full_stop = tl.minimum(full_stop, first + RIGHT + 1)
    if first >= last_query:
        stop = 0
    end = tl.cdiv(tl.maximum(stop, 0), BLOCK_N)
    begin = tl.minimum(start // BLOCK_N, end)
    inner = tl.minimum(tl.maximum(tl.cdiv(full_start, BLOCK_N), begin), end)
    outer = tl.minimum(tl.maximum(tl.maximum(full_stop, 0) // BLOCK_N, inner), end)

    rows = first + tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    channels = tl.arange(0, BLOCK_H)
    here = rows < q_blocks * BLOCK_Q
    q += row.to(tl.int64) * (q_blocks * BLOCK_Q) * BLOCK_H
    q_tile = tl.load(q + rows[:, None] * BLOCK_H + channels[None, :], mask=here[:, None], other=0.0)
    q_scale += row * q_blocks
    factor_q = tl.load(q_scale + rows // BLOCK_Q, mask=here, other=1.0)
    factor_q = factor_q * (SCALE if SOFT_CAP is not None else SCALE * UNIT)
    k += kv_row * (kv_blocks * BLOCK_N) * BLOCK_H
    v += kv_row * (kv_blocks * BLOCK_N) * BLOCK_H
    k_scale += kv_row * kv_blocks
    v_scale += kv_row * kv_blocks
    pointers = (
        k + keys[None, :] * BLOCK_H + channels[:, None],
        k_scale,
        v + keys[:, None] + channels[None, :] * (kv_blocks * BLOCK_N),
        v_scale,
    )

    state = (
        tl.zeros([BLOCK_M, BLOCK_H], tl.float32),
        tl.full([BLOCK_M], -float("inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
    )
    if LEFT is not None:
        state = _attend(
            state, begin, inner, q_tile, pointers, rows, factor_q, length,
            BLOCK_N, BLOCK_H, LEFT, RIGHT, SOFT_CAP, POLICY, True,
        )  # fmt: skip
    state = _attend(
        state, inner, outer, q_tile, pointers, rows, factor_q, length,
        BLOCK_N, BLOCK_H, LEFT, RIGHT, SOFT_CAP, POLICY, False,
    )  # fmt: skip
    state = _attend(
        state, outer, end, q_tile, pointers, rows, factor_q, length,
        BLOCK_N, BLOCK_H, LEFT, RIGHT, SOFT_CAP, POLICY, True,
    )  # fmt: skip
    acc, m, l = state

    # Rows that saw nothing, padding among them, are 0 and -inf. NaN is not 0.
    seen = (l != 0.0) & (rows < last_query)
    l = tl.where(seen, l, 1.0)
    weight = 1.0 / l
    if not IS_INT8:
        # P and its sum both carry the factor 448; V has one scale per head.
        weight = weight * tl.load(v_scale)
        l = l * (1.0 / _E4M3_MAX)
    acc = tl.where(seen[:, None], acc * weight[:, None], 0.0)
    residual = tl.where(seen, m * (1.0 / UNIT) + tl.log(l), -float("inf"))
    row_out = (batch * tokens + rows).to(tl.int64) * heads + head
    out_pointers = out + row_out[:, None] * HEAD_DIM + channels[None, :]
    inside = (rows < tokens)[:, None] & (channels < HEAD_DIM)[None, :]
    tl.store(out_pointers, acc.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + row_out, residual, mask=rows < tokens)
