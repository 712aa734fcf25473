"""A warp in numpy: what `pallas_kernels.mosaic.lane` emits, on arrays of 32 lanes.

Stands in for that package, so that code written for one lane runs on a CPU, lane by lane the same.
"""

import contextlib
import dataclasses
import functools
import threading

import ml_dtypes
import numpy as np


class Arithmetic:
    """Of two 16-bit floats in a word."""

    @staticmethod
    def _both(op, dtype, *words):
        """What an instruction does with two numbers each, rounded."""
        kind = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype]
        pairs = [x.value[:, None].view(kind).astype(np.float64) for x in words]
        with np.errstate(all="ignore"):
            return type(words[0])(op(*pairs).astype(kind).view(np.uint32)[:, 0])

    @classmethod
    def subtract(cls, a, b, dtype="float16"):
        return cls._both(np.subtract, dtype, a, b)

    @classmethod
    def multiply(cls, a, b, dtype="float16"):
        return cls._both(np.multiply, dtype, a, b)

    @classmethod
    def clip(cls, a, most, dtype="float16"):
        def op(a, most):
            sign = np.where(np.signbit(a) != np.signbit(most), -1.0, 1.0)
            return sign * np.fmin(np.abs(a), np.abs(most))

        return cls._both(op, dtype, a, most)

    @staticmethod
    def _convert(word, kind):
        numbers = word.value[:, None].view(kind).astype(np.float16)
        pairs = np.ascontiguousarray(numbers).view(np.uint32)
        return type(word)(pairs[:, 0]), type(word)(pairs[:, 1])

    @classmethod
    def from_e4m3(cls, word):
        return cls._convert(word, ml_dtypes.float8_e4m3fn)

    @classmethod
    def from_e5m2(cls, word):
        return cls._convert(word, ml_dtypes.float8_e5m2)


def flip_masked(a, mask, bits):
    return (a & mask) ^ bits


def arrive_after_copies(barrier):
    pass


def commit_copies():
    pass


def wait_for_copies(most):
    pass


LANES = np.arange(32)
NIBBLES = np.arange(0, 16, 4, dtype=np.uint32)
ROUNDER = 12582912.0


class _State(threading.local):
    """Of the warp that runs: its number in its program; the lanes that do, within `when` fewer."""

    def __init__(self):
        self.number, self.barrier = 0, None
        self.active = [np.ones(32, bool)]


STATE = _State()


def _bits(x):
    return x.value if isinstance(x, Int) else np.full(32, x % 2**32, np.uint32)


def _word(x):
    """Bits beside those of another operand: one constant for all lanes need not be 32."""
    return x.value if isinstance(x, Int) else np.uint32(x % 2**32)


def _numbers(x):
    return x.value if isinstance(x, Float) else np.float32(x)


def _signed(x):
    return _bits(x).view(np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class Bool:
    value: np.ndarray

    def __and__(self, other):
        return Bool(self.value & other.value)

    def __or__(self, other):
        return Bool(self.value | other.value)

    def __invert__(self):
        return Bool(~self.value)

    def where(self, a, b):
        if isinstance(a, Float) or isinstance(b, Float):
            return Float(np.where(self.value, _numbers(a), _numbers(b)))
        return Int(np.where(self.value, _bits(a), _bits(b)))


def _integer_op(op):
    """Of unsigned words, which wrap around, and which shifts of 32 and more leave empty."""
    return lambda a, b: Int(op(a.value, _word(b)))


def _integer_test(op):
    return lambda a, b: Bool(op(_signed(a), _word(b).view(np.int32)))


class Int:
    """32 bits of every lane."""

    def __init__(self, value):
        value = np.asarray(value)
        if value.dtype != np.uint32:
            value = (value.astype(np.int64) % 2**32).astype(np.uint32)
        self.value = value

    __add__, __sub__, __mul__ = (_integer_op(op) for op in (np.add, np.subtract, np.multiply))
    __and__, __or__, __xor__ = (
        _integer_op(op) for op in (np.bitwise_and, np.bitwise_or, np.bitwise_xor)
    )
    __lshift__, __rshift__ = (_integer_op(op) for op in (np.left_shift, np.right_shift))
    __floordiv__, __mod__ = (_integer_op(op) for op in (np.floor_divide, np.remainder))
    __le__, __ge__, __lt__, __gt__, equals = (
        _integer_test(op) for op in (np.less_equal, np.greater_equal, np.less, np.greater, np.equal)
    )

    def maximum(self, other):
        return Int(np.maximum(_signed(self), _signed(other)))

    def minimum(self, other):
        return Int(np.minimum(_signed(self), _signed(other)))

    def to_float(self):
        return Float(_signed(self).astype(np.float32))

    def as_float(self):
        return Float(self.value.view(np.float32))


def _float_op(op):
    def run(a, b):
        with np.errstate(all="ignore"):
            return Float(op(_numbers(a), _numbers(b)))

    return run


def _float_test(op):
    return lambda a, b: Bool(op(_numbers(a), _numbers(b)))


@dataclasses.dataclass(frozen=True, eq=False)
class Float:
    """A float32 of every lane."""

    value: np.ndarray

    __add__, __sub__, __mul__, __truediv__ = (
        _float_op(op) for op in (np.add, np.subtract, np.multiply, np.divide)
    )
    __lt__, __gt__, __ge__, equals = (
        _float_test(op) for op in (np.less, np.greater, np.greater_equal, np.equal)
    )

    def __neg__(self):
        return Float(-self.value)

    def as_int(self):
        return Int(self.value.astype(np.float32).view(np.uint32))

    def maximum(self, other):
        return maximum(self, other)

    def fma(self, b, c):
        return fma(self, b, c)


def integer(x):
    return Int(np.full(32, x))


def number(x):
    return Float(np.full(32, x, np.float32))


# Of NaN and a number these give the number, as the instructions do.
maximum, minimum = _float_op(np.fmax), _float_op(np.fmin)


def fma(a, b, c):
    with np.errstate(all="ignore"):
        exact = np.multiply(_numbers(a), _numbers(b), dtype=np.float64) + _numbers(c)
        return Float(exact.astype(np.float32))


def _flushed(x):
    """Subnormal numbers as 0, of the sign they had."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def exp2(x):
    with np.errstate(all="ignore"):
        return Float(_flushed(np.exp2(_flushed(x.value))))


def tanh(x):
    """Rounded to 11 bits, as coarse as the instruction."""
    fraction, power = np.frexp(np.tanh(x.value))
    return Float(np.ldexp(np.rint(fraction * 2**11) / 2**11, power).astype(np.float32))


def reciprocal(x):
    with np.errstate(all="ignore"):
        return Float(_flushed(np.float32(1) / _flushed(x.value)))


def root(x):
    with np.errstate(all="ignore"):
        return Float(np.sqrt(x.value))


def reciprocal_root(x):
    return Float(np.float32(1) / root(x).value)


def log2(x):
    with np.errstate(all="ignore"):
        return Float(np.log2(x.value))


def log2_of_any(x):
    with np.errstate(all="ignore"):
        return Float(np.log2(x.value))


def absolute(x):
    return Float(np.abs(x.value))


def with_sign_of(sign, x):
    return Float(np.copysign(x.value, sign.value))


def add_rounder(x):
    return Float(np.floor(x.value) + np.float32(ROUNDER))


def floor(x):
    return add_rounder(x) - ROUNDER


def total(values):
    return functools.reduce(lambda a, b: a + b, values)


def tree(values, op):
    values = list(values)
    while len(values) > 1:
        pairs = [op(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


def chain(values, op):
    return functools.reduce(op, values)


def half_to_float(x):
    return Float((x.value & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float32))


def permute_bytes(a, b, selector):
    source = np.stack([_bits(a), _bits(b)], 1).view(np.uint8)
    nibble = (_bits(selector)[:, None] >> NIBBLES) & 15
    byte = source[LANES[:, None], nibble & 7]
    byte = np.where(nibble & 8, (byte >> 7) * np.uint8(255), byte)
    return Int(byte.view(np.uint32)[:, 0])


def signed_byte(x, index):
    sign = 8 + index
    return permute_bytes(x, 0, index | (sign << 4) | (sign << 8) | (sign << 12))


def _bytes(word):
    """Signed bytes ``[32, 4]``."""
    return word.value[:, None].view(np.int8).astype(np.int64)


def pack_bytes(x):
    return total([(v & 255) << (8 * i) for i, v in enumerate(x)])


def pack_e4m3(x):
    largest = np.float32(448)
    numbers = np.stack([np.clip(v.value, -largest, largest) for v in x], 1)
    return Int(numbers.astype(ml_dtypes.float8_e4m3fn).view(np.uint32)[:, 0])


def pack_e5m2(x):
    numbers = np.stack([v.value for v in x], 1)
    return Int(numbers.astype(ml_dtypes.float8_e5m2).view(np.uint32)[:, 0])


def dot4(a, b, c):
    return Int((_bytes(a) * _bytes(b)).sum(1) + _signed(c))


def maxima_of_halves(a, b, op=np.maximum):
    halves = [x.value[:, None].view(np.int16) for x in (a, b)]
    return Int(op(*halves).view(np.uint32)[:, 0])


minima_of_halves = functools.partial(maxima_of_halves, op=np.minimum)


def largest_of_warp(x):
    return integer(int(x.value.max()))


def divide(a, b):
    return a / b


rounded_quotient = divide


def ballot(condition):
    return integer(int((condition.value.astype(np.int64) << LANES).sum()))


def held(x):
    return integer(x)


def uniform(x):
    return from_lane(x, integer(0))


def elected():
    return Bool(LANES == 0)


def thread():
    return Int(32 * STATE.number + LANES)


def warp_barrier():
    pass


def block_barrier():
    STATE.barrier()


publish_stores = publish_global_stores = warpgroup_barrier = warp_barrier


def release(word):
    word.add(integer(1))


def acquire(word):
    """What is waited for is there, or will never be."""
    assert all(word.word().value), "nobody has released this word"


def wait(barrier, parity):
    """What is waited for is there."""


def named_barrier(number, threads):
    """Of one warp that waits for none; a test of several puts its own here."""


def copy_words(source, target, condition):
    there = Pointer(source.memory, np.where(condition.value, source.offset, 0))
    target.store_words([condition.where(word, 0) for word in there.words(4)])


@contextlib.contextmanager
def when(condition):
    """Of the lanes where `condition` holds the stores count; there must be nothing else inside."""
    STATE.active.append(condition.value & STATE.active[-1])
    yield
    STATE.active.pop()


def loop(start, stop, step, state, body):
    """Of bounds that all lanes share."""
    assert len(set(start.value)) == len(set(stop.value)) == 1
    for i in range(_signed(start)[0], _signed(stop)[0], step):
        state = body(integer(i), state)
    return state


def either(condition, kinds, a, b):
    """Of a condition that all lanes share."""
    assert len(set(condition.value)) == 1
    results = a() if condition.value[0] else b()
    assert [type(x).__name__ for x in results] == [kind.__name__ for kind in kinds]
    return results


def from_lane(x, lane):
    return type(x)(x.value[lane.value % 32])


def partner(x, distance):
    return type(x)(x.value[LANES ^ distance])


def reduce_lanes(x, op, distances):
    for distance in distances:
        x = op(x, type(x)(x.value[LANES ^ distance]))
    return x


def among_four(x, op):
    return reduce_lanes(x, op, (1, 2))


def _product(a, b, c, unpack, depth, unpack_right=None):
    """A product of tiles whose words hold `depth` numbers each; lane ``4 g + t``."""
    g, t = LANES // 4, LANES % 4
    left, right = np.zeros((16, 8 * depth)), np.zeros((8 * depth, 8))
    out = np.zeros((16, 8))
    row, column = g[:, None], (depth * t)[:, None] + np.arange(depth)
    for i, word in enumerate(a):
        left[row + 8 * (i % 2), 4 * depth * (i // 2) + column] = unpack(word)
    for i, word in enumerate(b):
        right[4 * depth * i + column, row] = (unpack_right or unpack)(word)
    for i, start in enumerate(c):
        out[g + 8 * (i // 2), 2 * t + i % 2] = start
    with np.errstate(all="ignore"):
        out = out + left @ right
    return [out[g + 8 * (i // 2), 2 * t + i % 2] for i in range(4)]


def matmul(a, b, c, right="s8"):
    """Of int8: ``[16, 32] x [32, 8]``."""
    of_right = {"s8": _bytes, "u8": lambda word: word.value[:, None].view(np.uint8)}[right]
    return [Int(x) for x in _product(a, b, [_signed(x) for x in c], _bytes, 4, of_right)]


@dataclasses.dataclass(frozen=True, eq=False)
class Pointer:
    """Bytes of memory, at an offset of every lane; arrays begin aligned to any load or store."""

    memory: np.ndarray
    offset: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(32, np.int64))

    @classmethod
    def choose(cls, condition, a, b):
        """To loads: both pointers' memory, one after the other."""
        size = a.memory.size + -a.memory.size % 16
        memory = np.zeros(size + b.memory.size, np.uint8)
        memory[: a.memory.size], memory[size:] = a.memory, b.memory
        return cls(memory, np.where(condition.value, a.offset, size + b.offset))

    def at(self, *offsets):
        return Pointer(self.memory, self.offset + sum(_signed(x).astype(np.int64) for x in offsets))

    def times(self, index, size):
        size = _signed(size).astype(np.int64)
        return Pointer(self.memory, self.offset + _signed(index).astype(np.int64) * size)

    def _must_be_aligned(self, size, what):
        assert not np.any(self.offset[STATE.active[-1]] % size), f"{what}: {size=} is not aligned"

    def words(self, count):
        self._must_be_aligned(4 * min(count, 4), "load")
        # Lanes that do not run may be anywhere, also between two words.
        words = self.memory[: self.memory.size // 4 * 4].view(np.uint32)
        return [Int(x) for x in words[self.offset // 4 + np.arange(count)[:, None]]]

    def words_once(self, count, condition):
        """As the kernel's, where there is a condition; elsewhere NaN."""
        there = Pointer(self.memory, np.where(condition.value, self.offset, 0))
        return [condition.where(word, 0xFFFFFFFF) for word in there.words(count)]

    def words_of_others(self):
        return self.words(4)

    def word(self):
        return self.words(1)[0]

    def half(self):
        self._must_be_aligned(2, "load")
        return self.byte() | Pointer(self.memory, self.offset + 1).byte() << 8

    def byte(self):
        return Int(self.memory[self.offset])

    def float(self):
        return self.word().as_float()

    def store_words(self, words):
        self._must_be_aligned(4 * len(words), "store")
        active = STATE.active[-1]
        to = self.offset[active] // 4
        memory = self.memory[: self.memory.size // 4 * 4].view(np.uint32)
        for i, word in enumerate(words):
            memory[to + i] = word.value.view(np.uint32)[active]

    def store(self, x):
        self.store_words([x])

    def store_low(self, x, bits):
        size = bits // 8
        self._must_be_aligned(size, "store")
        index = self.offset[:, None] + np.arange(size)
        data = x.value.view(np.uint32)[:, None].view(np.uint8)[:, :size]
        self.memory[index[STATE.active[-1]]] = data[STATE.active[-1]]

    def store_as(self, x, dtype):
        if dtype == "float32":
            self.store_words([x])
        else:
            self.store_low(half.pack(x, number(0.0), dtype), 16)

    def add(self, x):
        self._must_be_aligned(4, "addition")
        active = STATE.active[-1]
        np.add.at(self.memory.view(np.uint32), self.offset[active] // 4, x.value[active])


class half(Arithmetic):
    """Stands in for `lane.half`."""

    @staticmethod
    def pack(low, high, dtype="float16"):
        kind = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype]
        with np.errstate(all="ignore"):
            pair = np.stack([low.value, high.value], 1).astype(kind)
        return Int(pair.view(np.uint32)[:, 0])

    @staticmethod
    def constant(x, dtype="float16"):
        kind = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype]
        bits = np.asarray(x, kind)
        assert bits == x
        return integer(int(bits.view(np.uint16)) * 0x10001)

    @staticmethod
    def twice(word, which):
        return ((word >> (16 * which)) & 0xFFFF) * 0x10001

    @staticmethod
    def fma(a, b, c):
        a, b, c = (x.value[:, None].view(np.float16).astype(np.float64) for x in (a, b, c))
        with np.errstate(all="ignore"):
            return Int((a * b + c).astype(np.float16).view(np.uint32)[:, 0])

    @staticmethod
    def unpack(word, dtype="float16"):
        if dtype == "bfloat16":
            return (word << 16).as_float(), (word & 0xFFFF0000).as_float()
        return half_to_float(word), half_to_float(word >> 16)

    @staticmethod
    def matmul(a, b, c, dtype="float16"):
        """Of 16-bit floats: ``[16, 16] x [16, 8]``."""

        def unpack(word):
            kind = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype]
            return word.value[:, None].view(kind).astype(np.float64)

        return [
            Float(x.astype(np.float32)) for x in _product(a, b, [x.value for x in c], unpack, 2)
        ]
