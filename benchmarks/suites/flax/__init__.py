"""One attention layer in nnx."""
