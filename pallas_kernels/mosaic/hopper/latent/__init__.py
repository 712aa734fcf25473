"""Decode over pages of latents (MLA), for Hopper: one latent is key and value of all heads."""
