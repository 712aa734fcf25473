"""Gradients of dense attention, for Hopper."""
