"""What `oracles.warp` is made of that needs nothing of it."""

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
