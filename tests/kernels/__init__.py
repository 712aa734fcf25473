"""Kernels without a GPU: their arithmetic in lanes, their interpreters, what they lower to."""
