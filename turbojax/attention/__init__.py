"""Attention without a cache: `turbo_attention`, `pooled_attention`, what all calls share."""
