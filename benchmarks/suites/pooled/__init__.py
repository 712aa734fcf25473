"""Pooled attention, and the choice of its levels."""
