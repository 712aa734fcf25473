"""INT4 weights, grouped products, smoothing: matrices without attention."""
