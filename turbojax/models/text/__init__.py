"""Text as tokens, and conversations as text."""
