"""Text through a model: prompts, steps, choosing tokens, and sessions."""
