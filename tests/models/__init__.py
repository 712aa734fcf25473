"""Families, checkpoints, tokenizers, chats, generation, and transformers beside ours."""
