"""The command `turbojax doctor`."""

import json

import typer

from turbojax.app import options


def doctor(as_json: options.AsJson = False) -> None:
    """Say which devices and implementations can be used here, and why the others cannot."""
    from turbojax.app.doctor import examination

    report = examination.examine()
    typer.echo(json.dumps(report.to_json(), indent=2) if as_json else report.to_text())
