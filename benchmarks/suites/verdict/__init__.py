"""Caches of 16, 8 and 4 bits side by side: bytes, speed, error and bits per byte in one run."""
