"""Attention by XLA: prefill, decode, pooled, latent and paged, softmax, gradients."""
