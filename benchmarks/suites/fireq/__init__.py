"""FireQ: products with INT4 weights, KV4, and models of them."""
