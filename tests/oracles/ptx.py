"""Inline assembly of the Triton kernels, executed in numpy as the PTX manual describes it.

Only the instructions that these kernels use: one that is not known here is an error, as are a
register that is not declared, and one that is read before it is written.
"""

import re

import ml_dtypes
import numpy as np


def run(asm, constraints, pack, args, results, shared=None):
    """What ``elementwise_inline_asm`` does with arrays of one size, a multiple of `pack`.

    Args:
      asm: the text; ``$0``, ``$1`` ... are words of results, then of arguments.
      constraints: one for each word, ``=r`` of a result, ``=&r`` of one that is written before all
        arguments were read, ``r`` of an argument.
      pack: elements that one execution takes, the first in the lowest bits.
      args: flat arrays.
      results: dtypes.
      shared: numbers of a result and of an argument that the compiler puts into one register, as it
        may for a result ``=r``.

    Returns:
      A flat array for each dtype.
    """
    names = constraints.split(",")
    words = [word for x in args for word in _words(x, pack)]
    count = sum(pack * np.dtype(x).itemsize // 4 for x in results)
    assert [x for x in names if x.startswith("=")] == names[:count]
    assert set(names[:count]) <= {"=r", "=&r"}
    assert names[count:] == ["r"] * len(words)
    places = {f"${i}": f"${i}" for i in range(len(names))}
    if shared is not None and "&" not in names[shared[0]]:
        places[f"${shared[0]}"] = f"${count + shared[1]}"
    machine = _Machine(places, len(words[0]))
    machine.held = {f"${count + i}": word for i, word in enumerate(words)}
    machine.execute(asm)
    return _elements([machine.read(f"${i}") for i in range(count)], pack, results)


def _words(x, pack):
    """The words of all executions: ``uint32 [n / pack]`` for each four bytes of a pack."""
    return np.ascontiguousarray(x).view(np.uint32).reshape(x.size // pack, -1).T


def _elements(words, pack, results):
    """The inverse."""
    out = []
    for dtype in results:
        count = pack * np.dtype(dtype).itemsize // 4
        out.append(np.stack(words[:count], axis=1).reshape(-1).view(dtype))
        words = words[count:]
    return out


class _Machine:
    """Registers, each with its content in every execution; executions are lanes of warps."""

    def __init__(self, places, size):
        self.places, self.held = dict(places), {}
        self.lane = np.arange(size, dtype=np.uint32) % 32

    def execute(self, asm):
        text = asm.strip()
        if text.startswith("{"):
            assert text.endswith("}")
            text = text[1:-1]
        for statement in text.split(";"):
            if not statement.strip():
                continue
            name, rest = statement.split(maxsplit=1)
            if name == ".reg":
                kind, rest = rest.split(maxsplit=1)
                assert kind in (".b16", ".b32")
                self.places |= {x.strip(): x.strip() for x in rest.split(",")}
                continue
            to, *args = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
            args = [self.read(x) for x in args]
            if to.startswith("{"):  # halves of a word
                assert name == "mov.b32"
                for i, half in enumerate(to[1:-1].split(",")):
                    self.held[self.places[half.strip()]] = args[0] >> np.uint32(16 * i) & 0xFFFF
                continue
            self.held[self.places[to]] = _INSTRUCTIONS[name](*args).astype(np.uint32)

    def read(self, name):
        if name == "%lanemask_lt":
            return (1 << self.lane.astype(np.uint64)).astype(np.uint32) - np.uint32(1)
        if name[0].isdigit():
            return np.full_like(self.lane, int(name, 0))
        return self.held[self.places[name]]


def _prmt(a, b, selector):
    """Each nibble of the selector takes a byte of eight, or copies of its sign."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    out = np.zeros_like(both)
    for i in range(4):
        nibble = (selector >> np.uint32(4 * i) & 15).astype(np.uint64)
        byte = both >> (nibble & 7) * 8 & 255
        out |= np.where(nibble & 8, (byte >> 7) * 255, byte) << np.uint64(8 * i)
    return out


def _lop3(a, b, c, table):
    """Three bits choose one of the table."""
    out = np.zeros_like(a)
    for i in range(32):
        index = sum((x >> i & 1) << n for n, x in enumerate((c, b, a)))
        out |= (table >> index & 1) << i
    return out


def _halves(dtype, operation):
    """An operation on both 16-bit floats of a word; exact in float64, then rounded."""

    def apply(*args):
        out = 0
        for i in (0, 16):
            wide = ((x >> i).astype(np.uint16).view(dtype).astype(np.float64) for x in args)
            out = out | operation(*wide).astype(dtype).view(np.uint16).astype(np.uint32) << i
        return out

    return apply


def _from_e4m3(x):
    """Two bytes to two float16; the largest magnitude is NaN, there are no infinities."""
    out = 0
    for i in (0, 8):
        byte = (x >> i & 255).astype(np.int64)
        exponent, mantissa = byte >> 3 & 15, byte & 7
        normal = (8 + mantissa) * 2.0 ** (exponent - 10)
        size = np.where(exponent == 0, mantissa * 2.0**-9, normal)
        size = np.where(byte & 127 == 127, np.nan, size)
        half = np.copysign(size, np.where(byte & 128, -1.0, 1.0)).astype(np.float16)
        out = out | half.view(np.uint16).astype(np.uint32) << 2 * i
    return out


_INSTRUCTIONS = {
    "mov.u32": lambda x: x,
    "mov.b32": lambda x: x,
    "not.b32": lambda x: ~x,
    "and.b32": lambda x, y: x & y,
    "or.b32": lambda x, y: x | y,
    "xor.b32": lambda x, y: x ^ y,
    "shl.b32": lambda x, y: x << y,
    "shr.u32": lambda x, y: x >> y,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "fma.rn.bf16x2": _halves(ml_dtypes.bfloat16, lambda a, b, c: a * b + c),
    "sub.rn.f16x2": _halves(np.float16, lambda a, b: a - b),
    "cvt.rn.f16x2.e4m3x2": _from_e4m3,
}
