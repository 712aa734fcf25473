"""Products of INT4 weights: of all tokens, of experts, and how their operands are rounded."""
