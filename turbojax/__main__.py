"""`python -m turbojax`: the same as the `turbojax` command."""

from turbojax.app.main import main

if __name__ == "__main__":
    main()
