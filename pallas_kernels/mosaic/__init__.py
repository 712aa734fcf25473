"""Pallas kernels lowered through Mosaic GPU.

`lane` is the language of their inner parts, `ring` the frame of those whose copies run ahead of
warpgroups that multiply, `warp` that of those whose warps work by themselves. `softmax` and
`products` are what several kernels do with a tile. The kernels are in `hopper`, for NVIDIA GPUs of
compute capability 9.0.
"""
