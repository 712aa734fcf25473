"""Kernels in upstream Triton, launched from jax through jax-triton (the extra `triton`).

For what Pallas's Triton lowering cannot express: its 8-bit products cannot relax how e4m3 is
accumulated, and it is being retired. Importing this package imports neither triton nor jax_triton;
calling a kernel does. As everywhere in `pallas_kernels`: raw arrays in, raw arrays out.
"""
