"""The suites that `python -m benchmarks run` measures; `benchmarks/suite.py` says what one is."""
