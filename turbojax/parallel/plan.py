"""What a ring does: which chunks meet on which device in which step. Static, plain Python.

In step `i` the keys of device ``d - i`` are on device `d`. Of the pairs of a chunk of queries and
one of keys that meet there, causality and windows leave some; a step has as many calls as the
device that has most of them, and a step without any is left out: keys go on to the next one at
once.
"""

import dataclasses
from typing import Literal

from turbojax.attention.options import Visibility
from turbojax.parallel.zigzag import Order, chunks

Kind = Literal["full", "diagonal", "masked"]
"""``"full"``: every query sees every key, on all devices; ``"diagonal"``: a chunk meets itself;
``"masked"``: positions decide."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of attention, made by all devices at once.

    For each device: which of its own chunks attends (`queries`), to which of the visiting chunks
    (`keys`), and whether there is such a pair; otherwise it attends to nothing. `kind` says which
    keys are seen.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    is_real: tuple[bool, ...]
    kind: Kind


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of the ring, in which the keys of device ``d - shift`` are on device `d`.

    In the first step each chunk has attended to its own keys before the `calls`, which are in
    order.
    """

    shift: int
    calls: tuple[Call, ...]


def best_order(visibility: Visibility, size: int) -> Order:
    """The order in which all devices have equal work; the natural one if it makes no difference.

    Without a causal mask the work is equal anyway. In a causal window of `w` of `S` tokens each
    query past the first `w` sees `w` keys. Up to half the tokens, zig-zag order would also give
    some device two such chunks: in both orders the most work that a device has is then
    ``1 / (1 - w / (2 S))`` times the mean, 1.05 for a tenth of the tokens and 1.33 for half of
    them. `size` is the tokens of all devices.
    """
    if not visibility.is_causal:
        return "natural"
    window = size if visibility.window is None else visibility.window[0] + 1
    return "natural" if 2 * window <= size else "zigzag"


def plan(order: Order, devices: int, size: int, visibility: Visibility) -> tuple[Step, ...]:
    """The steps of a ring, the first with shift 0; `size` is the tokens of a chunk."""
    held = chunks(order, devices)
    steps = []
    for shift in range(devices):
        calls = _calls(held, shift, size, visibility)
        if calls or shift == 0:
            steps.append(Step(shift, calls))
    return tuple(steps)


def _calls(
    held: tuple[tuple[int, ...], ...], shift: int, size: int, visibility: Visibility
) -> tuple[Call, ...]:
    devices = len(held)
    by_device = []
    for device in range(devices):
        own, visiting = held[device], held[(device - shift) % devices]
        by_device.append(
            [
                (q, k, _is_full(own[q], visiting[k], size, visibility))
                for q in reversed(range(len(own)))  # the late chunk sees most: it is first
                for k in range(len(visiting))
                if own[q] != visiting[k] and _sees(own[q], visiting[k], size, visibility)
            ]
        )
    calls = []
    for number in range(max(len(pairs) for pairs in by_device)):
        chosen = [pairs[number] if number < len(pairs) else None for pairs in by_device]
        real = [pair for pair in chosen if pair is not None]
        filled = [real[0] if pair is None else pair for pair in chosen]
        calls.append(
            Call(
                queries=tuple(q for q, _, _ in filled),
                keys=tuple(k for _, k, _ in filled),
                is_real=tuple(pair is not None for pair in chosen),
                kind="full" if all(is_full for _, _, is_full in real) else "masked",
            )
        )
    return tuple(calls)


def _distances(query: int, key: int, size: int) -> tuple[int, int]:
    """The least and the greatest difference of a query's and a key's position, of two chunks."""
    apart = (query - key) * size
    return apart - (size - 1), apart + (size - 1)


def _sees(query: int, key: int, size: int, visibility: Visibility) -> bool:
    """Whether any query of a chunk sees any key of another."""
    least, most = _distances(query, key, size)
    if visibility.is_causal and most < 0:
        return False
    if visibility.window is None:
        return True
    left, right = visibility.window
    return least <= left and -most <= right


def _is_full(query: int, key: int, size: int, visibility: Visibility) -> bool:
    """Whether every query of a chunk sees every key of another."""
    least, most = _distances(query, key, size)
    if visibility.is_causal and least < 0:
        return False
    if visibility.window is None:
        return True
    left, right = visibility.window
    return most <= left and -least <= right
