"""Attention to pages: `kernel` is the program, `turbo4` and `fp8` multiply with what pages hold."""
