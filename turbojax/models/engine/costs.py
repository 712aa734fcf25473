"""What it costs a request to leave the pool: its pages moved away and back, or computed again."""

# Of what has just been seen, against all that was seen before.
_WEIGHT = 0.25
# Before anything was moved: pages go through the host's memory and no faster than that.
_FIRST_BYTES_PER_SECOND = 8e9
# Steps with fewer tokens of prompts say little about how fast these run.
_FEWEST_TOKENS = 32


class Costs:
    """Times seen so far.

    Args:
      may_recompute: whether tokens may be computed again at all.
    """

    def __init__(self, *, may_recompute: bool) -> None:
        self._may_recompute = may_recompute
        self._bytes_per_second = _FIRST_BYTES_PER_SECOND
        self._tokens_per_second: float | None = None

    def swapped(self, nbytes: int, seconds: float) -> None:
        """So many bytes came to host memory in this time."""
        if nbytes and seconds > 0:
            self._bytes_per_second += _WEIGHT * (nbytes / seconds - self._bytes_per_second)

    def stepped(self, prompt_tokens: int, seconds: float) -> None:
        """A step with so many tokens of prompts took this time."""
        if prompt_tokens < _FEWEST_TOKENS or seconds <= 0:
            return
        rate = prompt_tokens / seconds
        known = self._tokens_per_second
        self._tokens_per_second = rate if known is None else known + _WEIGHT * (rate - known)

    def recomputes(self, nbytes: int, tokens: int) -> bool:
        """Whether so many tokens are sooner computed than their pages are moved away and back."""
        if not self._may_recompute or self._tokens_per_second is None:
            return False
        return tokens / self._tokens_per_second < 2 * nbytes / self._bytes_per_second
