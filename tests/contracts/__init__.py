"""One suite for each verb over all kinds of caches and all implementations."""
