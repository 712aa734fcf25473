"""Kernels for Hopper (compute capability 9.0): attention, decode, pages, pooled, matmul."""
