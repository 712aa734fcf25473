"""What `python -m benchmarks run` measures."""
