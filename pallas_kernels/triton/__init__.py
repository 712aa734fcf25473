"""Kernels that Pallas lowers to Triton: Ampere and later, and interpretable on a CPU."""
