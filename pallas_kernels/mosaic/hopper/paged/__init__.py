"""Attention to pages: `kernel` is the program; `turbo4`, `fp8` and `plain` multiply with them."""
