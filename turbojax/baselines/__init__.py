"""Plain-JAX baselines to compare with."""
