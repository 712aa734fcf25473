"""Pooled attention: its forward pass and both gradients; `tiles` is how pooled keys are walked."""
