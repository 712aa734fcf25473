"""Decode, prefill and compress against what one would run instead."""
