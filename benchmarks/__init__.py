"""Measurements of turbojax: run as `python -m benchmarks.NAME`."""
