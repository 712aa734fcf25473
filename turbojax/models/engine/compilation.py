"""How many of the engine's programs were compiled, so that a step's time is known to hold that."""

_traced = 0


def note() -> None:
    """To be called in the body of a jitted function: it runs once for each program made of it."""
    global _traced
    _traced += 1


def count() -> int:
    """Calls of `note` in this process."""
    return _traced
