"""Pallas kernels lowered through Mosaic GPU.

`lane` is the language of their inner parts, `pipeline` the frame of those whose copies run ahead of
warpgroups that multiply, `warp` that of those whose warps work by themselves. `softmax` and
`products` are what several kernels do with a tile. The kernels are in `hopper`, made for
NVIDIA GPUs of compute capability 9.0. Those without products of warpgroups compile for 8.0, 8.9 and
10.0, too, but were run on Hopper only, see `docs/kernels.md`.
"""
