"""Pages of tokens: the pool, who holds which page, and what is read and written."""
