"""Attention of many queries to pages, for Hopper: prompts chunk by chunk."""
