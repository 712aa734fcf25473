"""Products of tokens that are sorted by expert with INT4 weights of many experts."""
