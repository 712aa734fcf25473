"""What a measurement was made with."""

import datetime
import platform

import jax

import turbojax


def environment() -> dict[str, str]:
    """Device, versions and date: a measurement is worth nothing without them."""
    return {
        "device": jax.devices()[0].device_kind,
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "turbojax": turbojax.__version__,
    }
