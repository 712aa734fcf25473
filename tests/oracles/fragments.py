"""A lane's part of a warpgroup's arrays, in numpy: beside `oracles.warp`."""

import ml_dtypes
import numpy as np

from tests.oracles import warp


class fragments:
    """Stands in for `lane.fragments`: the first warp's 16 rows, columns in the order of tokens.

    A row's number is one of each of its four lanes: ``[16, 4]``.
    """

    G, T = warp.LANES // 4, warp.LANES % 4

    @classmethod
    def _token(cls, c):
        """Which token a lane's column `c` is, as keys are permuted (`hopper.attention`)."""
        return 16 * (c // 4) + 4 * cls.T + c % 4

    @staticmethod
    def _number(x):
        return (
            warp.Int(x) if np.issubdtype(x.dtype, np.integer) else warp.Float(x.astype(np.float32))
        )

    @classmethod
    def row_and_place(cls):
        return warp.Int(cls.G), warp.Int(cls.T)

    @classmethod
    def by_row(cls, a):
        return [
            [cls._number(a[cls.G + 8 * half, cls._token(c)]) for c in range(a.shape[1] // 4)]
            for half in (0, 1)
        ]

    @classmethod
    def of_rows(cls, rows):
        out = np.zeros((16, 4 * len(rows[0])), np.float32)
        for half, columns in enumerate(rows):
            for c, x in enumerate(columns):
                out[cls.G + 8 * half, cls._token(c)] = x.value
        return out

    @classmethod
    def scalars(cls, a):
        a = np.asarray(a)
        if a.ndim == 0:
            return [cls._number(np.full(32, a))]
        if a.ndim == 1:  # of columns
            return [cls._number(a[cls._token(c)]) for c in range(len(a) // 4)]
        return [cls._number(a[cls.G + 8 * half, cls.T]) for half in (0, 1)]

    @classmethod
    def row_array(cls, pair):
        out = np.zeros((16, 4), np.float32)
        for half, x in enumerate(pair):
            out[cls.G + 8 * half, cls.T] = x.value
        return out

    @classmethod
    def operand(cls, words, is_int):
        """The codes' numbers, in the order of tokens."""
        kind = np.int8 if is_int else ml_dtypes.float8_e4m3fn
        out = np.zeros((16, 16 * len(words[0])))
        for half, row in enumerate(words):
            for i, word in enumerate(row):
                for b in range(4):
                    codes = word.value[:, None].view(kind)[:, b].astype(np.float64)
                    out[cls.G + 8 * half, cls._token(4 * i + b)] = codes
        return out


class accumulator(fragments):
    """Columns as a product leaves them; of words of halves the numbers."""

    carrier = staticmethod(lambda x: x)

    @classmethod
    def _token(cls, c):
        return 8 * (c // 2) + 2 * cls.T + c % 2

    @classmethod
    def half_words(cls, rows, dtype):
        return cls.of_rows(rows)
