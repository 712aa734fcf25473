"""Quantizers, packing and every cache alone, with its pages."""
