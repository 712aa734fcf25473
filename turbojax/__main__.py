"""`python -m turbojax`: the same as the `turbojax` command."""

from typing import NoReturn

from turbojax._extras import MissingError


def main() -> NoReturn:
    """Entry point of the `turbojax` command; prints one line if a package is missing."""
    try:
        from turbojax.app.main import main as run
    except MissingError as error:
        raise SystemExit(str(error)) from error
    run()


if __name__ == "__main__":
    main()
