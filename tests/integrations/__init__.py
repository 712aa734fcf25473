"""turbojax inside other people's packages: `make test-integrations`."""
