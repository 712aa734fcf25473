"""Which part of a compressed cache costs a model how much: one part at a time, the rest exact."""
