"""Checkpoints: Hugging Face folders, and those of quantized models."""
