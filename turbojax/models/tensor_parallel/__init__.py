"""Decoders whose layers are split over the devices of a mesh (tensor parallelism)."""
