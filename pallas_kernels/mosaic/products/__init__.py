"""Products of 8-bit operands on a warpgroup's matrix unit, and operands that are made for them."""
