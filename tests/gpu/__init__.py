"""The same comparisons, compiled on a GPU: `make test-gpu`."""
