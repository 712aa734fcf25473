"""Decode from packed codes: `kernel` is the program, `block` what a warp does with one block."""
