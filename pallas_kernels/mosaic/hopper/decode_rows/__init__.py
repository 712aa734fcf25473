"""Decode for many queries of a KV head: `kernel` is the program, `block` what a warp does."""
