"""Quantized linear layers: INT4 and e4m3 weights; `program` is what they share, and `epilogue`."""
