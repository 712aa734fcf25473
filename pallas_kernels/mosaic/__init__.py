"""Pallas kernels lowered through Mosaic GPU, for NVIDIA GPUs of compute capability 9.0 (Hopper)."""
