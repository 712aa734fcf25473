"""What a measurement was made with: device, driver, versions, date. Imports no jax."""

import subprocess
from typing import Any


def describe() -> dict[str, Any]:
    """Device, driver where there is one, versions and date."""
    import jax

    from turbojax._environment import environment

    found = {**environment(), "platform": jax.devices()[0].client.platform_version}
    version = driver()
    return found if version is None else {**found, "driver": version}


def driver() -> str | None:
    """The version of NVIDIA's driver; None if there is none."""
    return next(iter(_ask("driver_version")), None)


def gpus() -> list[str]:
    return _ask("name")


def _ask(what: str) -> list[str]:
    """A line of nvidia-smi for each GPU; nothing without it."""
    query = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return output.stdout.splitlines()
