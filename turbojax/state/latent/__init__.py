"""Latents of tokens, kept for latent attention: a contiguous cache, and pages of a pool."""
