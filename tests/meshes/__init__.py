"""Several devices, which one CPU pretends to have."""
