"""`python -m turbojax`: the same as the `turbojax` command."""

from typing import NoReturn

from turbojax._extras import MissingError


def main() -> NoReturn:
    """Entry point of the `turbojax` command: one line if a package that it needs is not there."""
    try:
        from turbojax.app.main import main as run
    except MissingError as error:
        raise SystemExit(str(error)) from error
    run()


if __name__ == "__main__":
    main()
