"""Flax modules: attention, linear layers, experts, masks and their transforms."""
