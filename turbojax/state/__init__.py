"""The arrays of KV caches, and the operations on them that do not attend."""
