"""Attention operations: one folder per op, and the registry that says who can run what."""
