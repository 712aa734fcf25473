"""Serving: requests through the engine, against its kernels by hand, and over HTTP."""
