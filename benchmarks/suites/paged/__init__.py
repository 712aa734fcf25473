"""Attention over pages, and appending to them."""
