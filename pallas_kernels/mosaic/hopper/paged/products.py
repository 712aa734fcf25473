"""How to multiply with what pages hold: the products of each kind."""

import functools
from collections.abc import Callable

from pallas_kernels.mosaic.hopper.paged import codes, floats, scaled, turbo4
from pallas_kernels.mosaic.hopper.paged.fp8 import Fp8
from pallas_kernels.mosaic.hopper.paged.inputs import Place, Settings
from pallas_kernels.mosaic.hopper.paged.plain import Plain
from pallas_kernels.mosaic.lane import Int

Products = turbo4.Turbo4 | floats.Floats | scaled.Scaled | codes.Mixed


def products_of(head_dim: int, s: Settings) -> Products:
    if s.stored is not None:
        return codes.Mixed.of(head_dim, s)
    if s.kind in scaled.KINDS:
        return scaled.KINDS[s.kind].of(head_dim, s)
    if s.has_norms:
        return turbo4.Turbo4.of(head_dim, s)
    return (Plain if s.is_plain else Fp8)(head_dim, s)


def channel_of(s: Settings) -> Callable[[int, Place, int], Int]:
    """Which channels a lane's outputs are: ``channel(number, here, H)``."""
    if s.stored is not None:
        return functools.partial(codes.channel, bits=s.stored[1].bits)
    if s.kind in scaled.KINDS:
        return scaled.channel
    return turbo4.channel if s.has_norms else floats.channel
