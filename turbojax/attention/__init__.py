"""Attention operations: one folder per op, and the registry of implementations."""
