"""The polar codec in float64: rotation, Lloyd-Max tables, codes, norms and bytes."""

import functools
import itertools
import struct

import numpy as np

MAX_1960 = {
    2: (0.4528, 1.510),
    3: (0.2451, 0.7560, 1.344, 2.152),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733),
}
"""The positive output levels of Max's table I, to the digits printed there."""


def hadamard(order):
    """By entries: parities of common bits, and Paley's matrices from Euler's criterion."""
    odd = order // (order & -order)
    small = {1: 1, 3: 12, 5: 20, 7: 28}[odd]
    index = np.arange(order // small)
    common = index[:, None] & index[None, :]
    large = np.vectorize(lambda i: 1 - 2 * (int(i).bit_count() % 2))(common)
    # Entry (a, b) of the Kronecker product, factor by factor.
    a, b = np.divmod(np.arange(order), order // small)
    return paley(small)[a[:, None], a[None, :]] * large[b[:, None], b[None, :]]


def paley(order):
    if order == 1:
        return np.ones((1, 1), int)
    q = 13 if order == 28 else order - 1

    def legendre(i):
        power = pow(int(i) % q, (q - 1) // 2, q)
        return -1 if power == q - 1 else power

    core = np.array([[legendre(i - j) for j in range(q)] for i in range(q)])
    first = order != 28
    full = np.block(
        [[np.zeros((1, 1)), np.ones((1, q))], [(-1 if first else 1) * np.ones((q, 1)), core]]
    ).astype(int)
    if first:
        return full + np.eye(order, dtype=int)
    out = np.zeros((order, order), int)
    for i in range(q + 1):
        for j in range(q + 1):
            block = [[1, -1], [-1, -1]] if i == j else full[i, j] * np.array([[1, 1], [1, -1]])
            out[2 * i : 2 * i + 2, 2 * j : 2 * j + 2] = block
    return out


def signs(head_dim, seed):
    words = np.random.PCG64(seed).random_raw(head_dim)
    return np.array([-1.0 if int(word) >= 2**63 else 1.0 for word in words])


def rotation_matrix(head_dim, seed):
    return hadamard(head_dim) * signs(head_dim, seed)[None, :] / np.sqrt(head_dim)


@functools.cache
def legendre_nodes():
    return np.polynomial.legendre.leggauss(200)


def normal_cell(low, high, power):
    """The integral of ``t**power`` times the normal density, by Gauss and Legendre."""
    low, high = max(low, -12.0), min(high, 12.0)
    nodes, weights = legendre_nodes()
    t = 0.5 * (high - low) * nodes + 0.5 * (high + low)
    density = np.exp(-0.5 * t**2) / np.sqrt(2 * np.pi)
    return 0.5 * (high - low) * (weights * t**power * density).sum()


@functools.cache
def lloyd_max(bits):
    """By Newton's method, from Max's printed levels: the gaps of both conditions vanish."""
    levels = np.array(MAX_1960[bits])

    def gaps(levels):
        edges = [0.0, *(0.5 * (levels[1:] + levels[:-1])), np.inf]
        cells = list(itertools.pairwise(edges))
        means = np.array([normal_cell(*c, 1) / normal_cell(*c, 0) for c in cells])
        return levels - means

    for _ in range(6):
        step = 1e-6
        slope = np.stack(
            [
                (gaps(levels + step * unit) - gaps(levels - step * unit)) / (2 * step)
                for unit in np.eye(len(levels))
            ],
            axis=1,
        )
        levels = levels - np.linalg.solve(slope, gaps(levels))
    return np.concatenate([-levels[::-1], levels])


def encode(x, seed, bits=4):
    """Codes, exact norms before their rounding, and the distance of each coordinate to a threshold.

    Coordinates and distances in units of ``|x| / sqrt(d)``.
    """
    x = np.asarray(x).astype(np.float64)
    head_dim = x.shape[-1]
    length = np.sqrt((x**2).sum(-1))
    with np.errstate(invalid="ignore", divide="ignore"):
        y = x @ rotation_matrix(head_dim, seed).T * np.sqrt(head_dim) / length[..., None]
    table = lloyd_max(bits)
    edges = 0.5 * (table[1:] + table[:-1])
    codes = np.searchsorted(edges, y, side="right")
    distance = np.abs(y[..., None] - edges).min(-1)
    return codes, norms_of(length, codes, bits), distance


def norms_of(length, codes, bits=4):
    """``|x| / |c|`` for the codes chosen."""
    chosen = lloyd_max(bits)[codes] / np.sqrt(codes.shape[-1])
    return length / np.sqrt((chosen**2).sum(-1))


def decode(codes, norms, seed, bits=4):
    head_dim = codes.shape[-1]
    rotated = lloyd_max(bits)[codes] / np.sqrt(head_dim) * np.asarray(norms, np.float64)[..., None]
    return rotated @ rotation_matrix(head_dim, seed)


def interchange(codes, norm):
    """The bytes of one vector."""
    pairs = zip(codes[0::2], codes[1::2], strict=True)
    return bytes(int(a) | int(b) << 4 for a, b in pairs) + struct.pack("<e", float(norm))


def sphere_cells(edges, head_dim):
    """Probabilities of cells of ``sqrt(d) u_i``, `u` uniform on the unit sphere."""
    root = np.sqrt(head_dim)
    # u_i = sin(a) has density proportional to cos(a)**(d - 2) in `a`.
    nodes, weights = legendre_nodes()
    angles = np.arcsin(np.clip(np.array([-root, *edges, root]) / root, -1, 1))
    masses = []
    for low, high in itertools.pairwise(angles):
        a = 0.5 * (high - low) * nodes + 0.5 * (high + low)
        masses.append(0.5 * (high - low) * (weights * np.cos(a) ** (head_dim - 2)).sum())
    return np.array(masses) / np.sum(masses)
