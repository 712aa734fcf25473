"""GPU kernels in Pallas: raw arrays in, raw arrays out.

A leaf of the import graph: nothing here imports turbojax. What the kernels compute is handed to
them as small static callables (an exponential, a dequantizer, a mask), so that the formulas are
written once, in turbojax, and a kernel is only its schedule.

`layouts` says what arrays hold. `pallas_kernels.triton` holds kernels that Pallas lowers to Triton
(Ampere and later, and interpretable on a CPU), `pallas_kernels.mosaic` Mosaic GPU kernels, made for
Hopper, of which some compile for other GPUs, too, and `pallas_kernels.upstream_triton` one in
Triton's own language. What was measured of them stands in `docs/kernels/`.
"""
