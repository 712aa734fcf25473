"""Adapters that put turbojax into other people's models: one file per package, which it imports."""
