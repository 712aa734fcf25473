"""Caches whose tokens each have a scale (FireQ's KV4, and K8V4): state, codes, attention."""
